//! The training itself: epochs of steps, and between the steps whatever a rank asks for.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drumline_comm::on_behalf_of;
use drumline_launch::{Signal, signal_name};
use drumline_observe::bar::Progress;
use drumline_observe::slow_ranks::SlowRank;
use drumline_observe::trace::Track;
use drumline_parallel::Ddp;
use drumline_torch::{LossScaler, Named};
use tch::nn::VarStore;

use super::batch::Batch;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::evaluate::Validated;
use super::graphs::{Graphs, OwnStream};
use super::hooks::{Hook, Hooks};
use super::loss::Loss;
use super::meeting::{Agreed, Brought, meet};
use super::metric::{MetricKey, Scores};
use super::model::Model;
use super::norms::Norms;
use super::prepare::steps_of_epoch;
use super::settings::{Every, LoadBestModel, Settings};
use super::state::TrainState;
use super::supply::Supply;
use super::tracer::Tracer;
use super::waits::Waits;
use crate::checkpoint::{Checkpoints, Loaded};
use crate::loader::{Loader, Sample};
use crate::rehearsal::Rehearsal;
use crate::sampler::{DataId, SamplerPosition};
use crate::shared_failure::{Trouble, agree, in_words, panic_words};
use crate::stop_request::StopRequest;

/// What a training came to.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainOutcome {
    /// The best value of the metric that counts; `None` if there was no evaluation.
    pub best_metric: Option<f64>,
    /// Steps done by then.
    pub best_step: Option<u64>,
    /// Epochs done by then, counting one that had just ended.
    pub best_epoch: Option<u64>,
    /// How long it took.
    pub seconds: f64,
    /// Steps done, with those before a checkpoint that it went on from.
    pub steps: u64,
    /// Epochs done.
    pub epochs: u64,
    /// Why it ended.
    pub end: End,
    /// Folder of the last checkpoint, as rank 0 sees it; `None` where there is no `save_path`.
    pub checkpoint: Option<PathBuf>,
    /// Ranks that were slower than the others for 20 steps or more.
    pub slow_ranks: Vec<SlowRank>,
}

/// Why a training ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// All epochs are done.
    Finished,
    /// It was asked to stop.
    Stopped {
        /// By what.
        reason: String,
    },
}

/// Where the samples of an epoch are, over all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Where this run began the epoch.
    pub(super) from: SamplerPosition,
    /// Steps since then.
    pub(super) turns: usize,
}

/// How long the last step took.
#[derive(Debug)]
pub(super) struct Clock {
    last: Instant,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { last: Instant::now() }
    }

    /// What comes now is no part of a step.
    pub(super) fn restart(&mut self) {
        self.last = Instant::now();
    }

    /// Time since this was asked for.
    pub(super) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        std::mem::replace(&mut self.last, now).elapsed()
    }
}

pub(super) struct Run<'a, M: Model<B> + ?Sized, B: Batch> {
    /// On a GPU, where steps can be recorded. Before all else, as it is dropped first: NCCL waits for graphs that have its calls.
    pub(super) graphs: Option<Graphs<B, M::Output>>,
    pub(super) ddp: Ddp<&'a M>,
    /// Where the program called `train`: the place that is named where ranks wait for each other, or do not fit together.
    pub(super) site: &'static Location<'static>,
    pub(super) store: &'a VarStore,
    pub(super) loss: Box<dyn Loss<B, M::Output> + 'a>,
    pub(super) scores: Scores<'a, B, M::Output>,
    pub(super) train_scores: Scores<'a, B, M::Output>,
    pub(super) key: MetricKey,
    pub(super) train: Loader<AnyDataset<B>>,
    pub(super) dev: Option<Loader<AnyDataset<B>>>,
    pub(super) stop: StopRequest,
    pub(super) checkpoints: Option<Checkpoints>,
    pub(super) hooks: Hooks<'a>,
    pub(super) settings: Settings,
    pub(super) load_best_model: LoadBestModel,
    /// A checkpoint that the program has loaded to go on from.
    pub(super) loaded: Option<Loaded>,
    /// Whether something has changed since the last checkpoint.
    pub(super) is_unsaved: bool,
    /// Where the state's evaluation stands among the best, if it is to be saved as such.
    pub(super) place_among_best: Option<NonZeroUsize>,
    /// Steps after which the last evaluation before that was made.
    pub(super) evaluated_at: Option<u64>,
    /// Folder of the checkpoint that it has gone on from.
    pub(super) resumed_from: Option<PathBuf>,
    /// The best model's, where there is no folder for it.
    pub(super) best_weights: Option<Vec<Named>>,
    /// The metrics of the best checkpoints, the best first.
    pub(super) kept_best: Vec<f64>,
    pub(super) place: Place,
    /// What is trained on, where all ranks have the same.
    pub(super) data: Option<DataId>,
    pub(super) norms: Norms,
    /// In fp16.
    pub(super) scaler: Option<LossScaler>,
    /// Whether the optimizer has made a step in this run: it has all that it keeps for what had a gradient then.
    pub(super) has_stepped: bool,
    pub(super) tracer: Tracer,
    pub(super) rehearsal: Rehearsal,
    pub(super) waits: Arc<Waits>,
    /// Whether any rank has callbacks of either kind.
    pub(super) has_callbacks: bool,
    pub(super) clock: Clock,
    /// What each rank had worked when the last step began.
    pub(super) worked: Vec<f64>,
    /// On rank 0, if steps are shown.
    pub(super) progress: Option<Progress>,
    pub(super) state: TrainState,
}

/// Why an epoch is over.
enum EpochEnd {
    /// All its samples were seen.
    NoData,
    /// `max_steps` are done.
    Enough,
    Stop {
        reason: String,
    },
}

/// What comes next.
enum Next {
    Step(Agreed),
    NoData,
    Stop { reason: String },
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    pub(super) fn train(mut self) -> Result<TrainOutcome, TrainerError> {
        let _stream = OwnStream::enter(self.state.device)?;
        match catch_unwind(AssertUnwindSafe(|| self.whole())) {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(error)) => {
                self.fail(&error);
                Err(error)
            }
            Err(panic) => {
                self.ddp.abort(&panic_words(&*panic));
                resume_unwind(panic)
            }
        }
    }

    /// Nothing is lost where ranks can still talk; where they cannot, they learn why.
    fn fail(&mut self, error: &TrainerError) {
        if error.is_agreed() {
            self.rescue();
        } else {
            self.ddp.abort(&in_words(error));
        }
        self.hooks.exception(&mut self.state, error);
    }

    fn whole(&mut self) -> Result<TrainOutcome, TrainerError> {
        // Ranks that drew the same weights would drop the same units; a checkpoint's generators win.
        if self.state.rank() > 0 {
            tch::manual_seed(Sample::new(self.settings.seed, 0, self.state.rank()).seed as i64);
        }
        self.resume()?;
        self.state.begin = Instant::now();
        self.hooks.call(Hook::TrainBegin, &mut self.state);
        if let Err(cause) = self.hooks.evaluation_weights() {
            self.hooks.note(Trouble::from(cause));
        }
        self.check()?;
        self.set_kept();
        self.clock.restart();
        let end = self.epochs()?;
        if let End::Stopped { reason } = &end {
            self.state.stop_reason = Some(reason.clone());
        }
        self.write_trace();
        self.hooks.call(Hook::TrainEnd, &mut self.state);
        self.check()?;
        self.save_unless_saved()?;
        if self.load_best_model == LoadBestModel::Yes {
            self.load_best()?;
        }
        self.say_end(&end);
        let best = self.state.best;
        Ok(TrainOutcome {
            best_metric: best.map(|best| best.metric),
            best_step: best.map(|best| best.step),
            best_epoch: best.map(|best| best.epoch),
            seconds: self.state.begin.elapsed().as_secs_f64(),
            steps: self.state.step,
            epochs: self.state.epoch,
            end,
            checkpoint: self.state.checkpoint.clone(),
            slow_ranks: self.state.slow.in_all(),
        })
    }

    /// Why and where it stopped, once all is saved, and which ranks were slow.
    fn say_end(&self, end: &End) {
        let Some(progress) = &self.progress else { return };
        if let End::Stopped { reason } = end {
            progress.say(&stop_line(reason, &self.state));
        }
        for slow in self.state.slow.in_all() {
            progress.say(&format!("[ranks] == {slow} =="));
        }
    }

    /// Compares what the ranks have worked since the step before.
    fn compare_ranks(&mut self, work: &[f64]) {
        let before = std::mem::replace(&mut self.worked, work.to_vec());
        // The first is not whole.
        if before.len() == work.len() {
            let work: Vec<f64> = work.iter().zip(&before).map(|(now, before)| now - before).collect();
            self.state.notices = self.state.slow.step(&work).iter().map(ToString::to_string).collect();
        }
    }

    fn epochs(&mut self) -> Result<End, TrainerError> {
        // An evaluation that a checkpoint is without.
        if let Next::Stop { reason } = self.next(Brought::default())? {
            return Ok(End::Stopped { reason });
        }
        while self.state.epoch < self.state.n_epochs && !self.state.is_enough() {
            self.hooks.call(Hook::EpochBegin, &mut self.state);
            match self.steps()? {
                EpochEnd::NoData => self.end_epoch()?,
                EpochEnd::Enough if self.settings.validate_every != Every::Never => drop(self.validate()?),
                EpochEnd::Enough => {}
                EpochEnd::Stop { reason } => return Ok(End::Stopped { reason }),
            }
            if let Next::Stop { reason } = self.next(Brought::default())? {
                return Ok(End::Stopped { reason });
            }
        }
        Ok(End::Finished)
    }

    /// Steps to the end of the epoch, or as far as training goes.
    fn steps(&mut self) -> Result<EpochEnd, TrainerError> {
        let batches = self.train.resume(self.place.from);
        let batches = agree::<_, TrainerError>(&self.state.group, batches.map_err(Trouble::from))?;
        let mut supply = Supply::new(batches);
        loop {
            // The last step of an epoch is followed by what belongs to its end.
            if self.state.is_enough() && self.state.step_in_epoch < self.state.steps_per_epoch {
                return Ok(EpochEnd::Enough);
            }
            self.tracer.begin_step(self.state.step);
            let window = self.window(&mut supply);
            match self.next(window.brought)? {
                Next::Step(agreed) => {
                    self.compare_ranks(&agreed.work);
                    self.step(window, &agreed, &mut supply)?;
                }
                Next::NoData => return Ok(EpochEnd::NoData),
                Next::Stop { reason } => return Ok(EpochEnd::Stop { reason }),
            }
        }
    }

    fn end_epoch(&mut self) -> Result<(), TrainerError> {
        // Whoever trained last has the buffers that count.
        on_behalf_of(self.site, || self.ddp.sync_buffers())?;
        let before = (self.state.step_in_epoch, self.place);
        self.state.epoch += 1;
        self.state.step_in_epoch = 0;
        self.place = Place { from: self.start_of(self.state.epoch), turns: 0 };
        self.is_unsaved = true;
        let cut =
            self.settings.validate_every.is_at_epoch(self.state.epoch) && self.validate()? == Validated::Cut;
        if cut {
            // Whoever goes on from the checkpoint ends the epoch again, with its evaluation.
            self.state.epoch -= 1;
            (self.state.step_in_epoch, self.place) = before;
            return Ok(());
        }
        self.hooks.call(Hook::EpochEnd, &mut self.state);
        self.count_epoch()
    }

    /// The beginning of an epoch.
    fn start_of(&self, epoch: u64) -> SamplerPosition {
        SamplerPosition { data: self.data, ..self.train.sampler().start(epoch) }
    }

    /// Finds out how many steps the epoch has that comes next, if one does: a sampler's epochs may differ.
    pub(super) fn count_epoch(&mut self) -> Result<(), TrainerError> {
        let epoch = self.state.epoch;
        if epoch < self.state.n_epochs {
            self.state.steps_per_epoch =
                steps_of_epoch(epoch, &self.state.group, &self.train, &self.settings)?;
        }
        Ok(())
    }

    /// Meets the others, and does what any of them asks for, until nobody asks for anything.
    fn next(&mut self, window: Brought) -> Result<Next, TrainerError> {
        loop {
            let requests = &self.state.requests;
            let brought = Brought {
                failed: self.hooks.trouble().is_some(),
                stop: requests.stop.is_some() || self.stop.is_requested(),
                validation: requests.validation,
                checkpoint: requests.checkpoint,
                work: (self.state.times.load + self.state.times.compute).as_secs_f64(),
                ..window
            };
            let begin = Instant::now();
            let agreed = on_behalf_of(self.site, || meet(&self.state.group, &brought))?;
            self.state.times.comm += begin.elapsed();
            self.tracer.span("meet", Track::Communication, begin);
            if agreed.failed {
                self.check()?;
            }
            match agreed {
                Agreed { validation: true, .. } => drop(self.validate()?),
                Agreed { checkpoint: true, .. } => self.save()?,
                Agreed { stop: true, .. } => return Ok(Next::Stop { reason: self.reason()? }),
                Agreed { buffers_of: None, .. } => return Ok(Next::NoData),
                agreed => return Ok(Next::Step(agreed)),
            }
        }
    }

    /// Writes the steps that were traced, if any were.
    pub(super) fn write_trace(&mut self) {
        if let Err(error) = self.tracer.write() {
            self.hooks.note(error.into());
        }
    }

    /// An error on all ranks if one has trouble. All call it.
    pub(super) fn check(&self) -> Result<(), TrainerError> {
        agree(&self.state.group, self.hooks.trouble().cloned().map_or(Ok(()), Err))
    }

    /// Why training stops: the first rank's reason.
    fn reason(&self) -> Result<String, TrainerError> {
        let signal = self.stop.signal().map(signal_words);
        let own = self.state.requests.stop.clone().or(signal);
        let all = self.state.group.all_gather_object(&own)?;
        let first = all.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?)));
        Ok(first.map_or_else(String::new, |(rank, reason)| format!("{reason} (rank {rank})")))
    }
}

/// What people do is known to them by another name.
fn signal_words(signal: Signal) -> String {
    let name = signal_name(signal.as_raw());
    if signal == Signal::INT { format!("{name} (Ctrl-C)") } else { name.to_owned() }
}

/// The line about a training that stopped before its last epoch.
fn stop_line(reason: &str, state: &TrainState) -> String {
    let (step, epoch, epochs) = (state.step, state.epoch + 1, state.n_epochs);
    let kept = match &state.checkpoint {
        Some(checkpoint) => format!("checkpoint {}, from which resume_from continues", checkpoint.display()),
        None => "no checkpoint, as there is no save_path".to_owned(),
    };
    format!("[stop] == {reason} | after step {step}, in epoch {} of {epochs} | {kept} ==", epoch.min(epochs))
}
