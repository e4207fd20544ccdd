//! The training loop: epochs of steps, and between steps what a rank asks for.
//!
//! ```text
//!   resume ─▶ epochs ─▶ steps: supply ─▶ agree ─┬─▶ step (`step`)
//!                                               ├─▶ requests: evaluation (`evaluate`), checkpoint (`save`), stop
//!                                               └─▶ no data: end of the epoch
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::Instant;

use drumline_comm::{Axis, MeshShape, on_behalf_of};
use drumline_launch::{Signal, signal_name};
use drumline_observe::slow_ranks::SlowRank;
use drumline_observe::trace::Track;
use drumline_parallel::{Agreed, Brought};

use super::batch::Batch;
use super::context::Context;
use super::end::End;
use super::error::TrainerError;
use super::evaluate::{Evaluator, Validated};
use super::graphs::{Graphs, OwnStream};
use super::hooks::Hook;
use super::learner::Learner;
use super::model::Model;
use super::resume::{Resume, ask_for_missing_evaluation, load_best};
use super::save::Saver;
use super::settings::{Every, LoadBestModel};
use super::state::TrainState;
use super::step::Step;
use super::supply::{Supply, Window};
use super::train_data::TrainData;
use crate::checkpoint::Loaded;
use crate::comm::shared_failure::{LocalFailure, panic_message, with_causes};
use crate::data::loader::Sample;
use crate::injected_faults::InjectedFaults;

/// The result of a training.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainOutcome {
    /// The best value of the metric key; `None` if there was no evaluation.
    pub best_metric: Option<f64>,
    /// Steps done at the best evaluation.
    pub best_step: Option<u64>,
    /// Epochs done at the best evaluation, including one that had just ended.
    pub best_epoch: Option<u64>,
    /// How long it took.
    pub seconds: f64,
    /// Steps done, including those before the resume.
    pub steps: u64,
    /// Epochs done.
    pub epochs: u64,
    /// Why it ended.
    pub end: End,
    /// The folder of the last checkpoint, as rank 0 sees it; `None` without a `save_path`.
    pub checkpoint: Option<PathBuf>,
    /// Ranks that were slower than the others for 20 steps or more.
    pub slow_ranks: Vec<SlowRank>,
}

/// All parts of a training.
pub(super) struct Run<'a, M: Model<B> + ?Sized, B: Batch> {
    /// The first field, because it is dropped first: NCCL waits for graphs that contain its calls.
    pub(super) graphs: Graphs<B, M::Output>,
    pub(super) learner: Learner<'a, M, B>,
    pub(super) data: TrainData<B>,
    pub(super) evaluator: Evaluator<'a, B, M::Output>,
    pub(super) saver: Saver,
    pub(super) load_best_model: LoadBestModel,
    /// A checkpoint that the program has loaded to resume from.
    pub(super) loaded: Option<Loaded>,
    pub(super) faults: InjectedFaults,
    /// The working time of each rank at the beginning of the last step.
    pub(super) worked: Vec<f64>,
    pub(super) context: Context<'a>,
}

/// Why an epoch is over.
enum EpochEnd {
    /// All its samples were seen.
    NoData,
    /// `max_steps` are done.
    Enough,
    /// The training is over, too.
    Stop(End),
}

/// What comes next.
enum Next {
    Step(Agreed),
    NoData,
    /// The end of the training.
    Stop(End),
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    pub(super) fn train(mut self) -> Result<TrainOutcome, TrainerError> {
        let _stream = OwnStream::enter(self.learner.device())?;
        match catch_unwind(AssertUnwindSafe(|| self.whole())) {
            Ok(Ok(outcome)) => {
                // The training is done and saved, also if there is no memory for whole parameters.
                let released = on_behalf_of(self.context.site, || self.learner.engine.release());
                if let Err(error) = released {
                    tracing::warn!(%error, "the model has no parameters any more; try loading its checkpoint");
                }
                Ok(outcome)
            }
            Ok(Err(error)) => {
                self.fail(&error);
                Err(error)
            }
            Err(panic) => {
                self.learner.engine.abort(&panic_message(&*panic));
                resume_unwind(panic)
            }
        }
    }

    /// Saves the current state if ranks can still communicate. If they cannot, sends them the reason.
    fn fail(&mut self, error: &TrainerError) {
        if error.is_agreed() {
            self.saver.rescue(&self.learner, &self.data, &mut self.context);
        } else {
            self.learner.engine.abort(&with_causes(error));
        }
        self.context.hooks.exception(&mut self.context.state, error);
    }

    fn whole(&mut self) -> Result<TrainOutcome, TrainerError> {
        self.begin()?;
        let end = self.epochs()?;
        self.context.state.stop_reason = end.stop_reason().map(str::to_owned);
        self.context.write_trace();
        self.context.call(Hook::TrainEnd);
        self.context.check()?;
        self.saver.save_unless_saved(&self.learner, &self.data, &mut self.context)?;
        if self.load_best_model == LoadBestModel::Yes {
            load_best(&mut self.saver, &self.learner, &self.context)?;
        }
        self.say_end(&end);
        Ok(self.outcome(end))
    }

    /// Resumes, and calls `on_train_begin`.
    fn begin(&mut self) -> Result<(), TrainerError> {
        let context = &mut self.context;
        // With equal seeds all ranks would have the same dropout. The generators of a checkpoint override this.
        if context.state.rank() > 0 {
            tch::manual_seed(Sample::new(context.settings.seed, 0, context.state.rank()).seed as i64);
        }
        let resume =
            Resume { saver: &mut self.saver, learner: &mut self.learner, data: &mut self.data, context };
        if resume.run(self.loaded.take())? {
            self.count_epoch()?;
            ask_for_missing_evaluation(&self.saver, &mut self.context);
        }
        let context = &mut self.context;
        context.state.begin = Instant::now();
        if let Some(schedule) = &self.learner.schedule {
            match schedule.check(Some(context.state.total_steps())) {
                Ok(Some(warning)) if context.state.rank() == 0 => tracing::warn!("{warning}"),
                Ok(_) => {}
                Err(error) => context.hooks.note(error.into()),
            }
        }
        context.call(Hook::TrainBegin);
        if let Err(cause) = context.hooks.evaluation_weights() {
            context.hooks.note(LocalFailure::from(cause));
        }
        context.check()?;
        self.saver.set_num_kept(context);
        context.clock.restart();
        Ok(())
    }

    fn outcome(&self, end: End) -> TrainOutcome {
        let state = &self.context.state;
        TrainOutcome {
            best_metric: state.best.map(|best| best.metric),
            best_step: state.best.map(|best| best.step),
            best_epoch: state.best.map(|best| best.epoch),
            seconds: state.begin.elapsed().as_secs_f64(),
            steps: state.step,
            epochs: state.epoch,
            end,
            checkpoint: state.checkpoint.clone(),
            slow_ranks: state.slow.in_all(),
        }
    }

    /// Logs why and where the training stopped, after everything is saved, and which ranks were slow.
    fn say_end(&self, end: &End) {
        let Some(progress) = &self.context.progress else { return };
        if let Some(reason) = end.stop_reason() {
            progress.say(&stop_line(reason, &self.context.state));
        }
        for slow in self.context.state.slow.in_all() {
            progress.say(&format!("[ranks] == {slow} =="));
        }
    }

    /// Compares the working times of the ranks since the step before.
    fn compare_ranks(&mut self, work: &[f64]) {
        let before = std::mem::replace(&mut self.worked, work.to_vec());
        // The first interval is incomplete.
        if before.len() == work.len() {
            let work: Vec<f64> = work.iter().zip(&before).map(|(now, before)| now - before).collect();
            let work = of_equal_stages(&work, self.learner.engine.mesh().shape());
            let state = &mut self.context.state;
            state.notices = state.slow.step(&work).iter().map(ToString::to_string).collect();
        }
    }

    fn epochs(&mut self) -> Result<End, TrainerError> {
        // Makes the evaluation that a checkpoint lacks.
        if let Next::Stop(end) = self.next(Brought::default())? {
            return Ok(end);
        }
        while self.context.state.epoch < self.context.state.n_epochs && !self.context.state.is_enough() {
            self.context.call(Hook::EpochBegin);
            match self.steps()? {
                EpochEnd::NoData => self.end_epoch()?,
                EpochEnd::Enough => {
                    if self.context.settings.validate_every != Every::Never {
                        self.validate()?;
                    }
                }
                EpochEnd::Stop(end) => return Ok(end),
            }
            if let Next::Stop(end) = self.next(Brought::default())? {
                return Ok(end);
            }
        }
        Ok(End::Finished)
    }

    /// Makes steps to the end of the epoch, or of the training.
    fn steps(&mut self) -> Result<EpochEnd, TrainerError> {
        let mut supply = self.data.supply(self.learner.engine.mesh())?;
        loop {
            let state = &self.context.state;
            // The last step of an epoch is followed by the end of the epoch.
            if state.is_enough() && state.step_in_epoch < state.steps_per_epoch {
                return Ok(EpochEnd::Enough);
            }
            self.context.tracer.begin_step(state.step);
            let window = self.window(&mut supply);
            match self.next(window.brought)? {
                Next::Step(agreed) => self.step(window, &agreed, &mut supply)?,
                Next::NoData => return Ok(EpochEnd::NoData),
                Next::Stop(end) => return Ok(EpochEnd::Stop(end)),
            }
        }
    }

    /// This rank's batches of the next step, and whether they could run as a graph.
    fn window(&mut self, supply: &mut Supply<B>) -> Window<B> {
        let mut window = supply.next(&self.learner, &mut self.context);
        let can_run = self.graphs.can_run(&mut self.learner, &self.context, &window.batches);
        window.brought.graph = can_run;
        window.brought.record = can_run && self.graphs.has_to_record();
        window
    }

    fn step(
        &mut self,
        window: Window<B>,
        agreed: &Agreed,
        supply: &mut Supply<B>,
    ) -> Result<(), TrainerError> {
        self.compare_ranks(&agreed.work);
        self.faults.at(self.context.state.step + 1, &self.context.state.group);
        let step = Step { learner: &mut self.learner, graphs: &mut self.graphs, context: &mut self.context };
        step.run(window, agreed, supply)?;
        self.data.count_step();
        Ok(())
    }

    fn end_epoch(&mut self) -> Result<(), TrainerError> {
        // The buffers of the rank that trained last count.
        on_behalf_of(self.context.site, || self.learner.engine.sync_buffers())?;
        let step_in_epoch = self.context.state.step_in_epoch;
        let position = self.data.position();
        self.context.state.epoch += 1;
        self.context.state.step_in_epoch = 0;
        self.data.begin_epoch(self.context.state.epoch);
        self.context.is_unsaved = true;
        let is_due = self.context.settings.validate_every.is_at_epoch(self.context.state.epoch);
        if is_due && self.validate()? == Validated::Interrupted {
            // A training that resumes from the checkpoint ends the epoch again, with its evaluation.
            self.context.state.epoch -= 1;
            self.context.state.step_in_epoch = step_in_epoch;
            self.data.begin_at(position);
            return Ok(());
        }
        self.context.call(Hook::EpochEnd);
        self.count_epoch()
    }

    fn validate(&mut self) -> Result<Validated, TrainerError> {
        self.evaluator.validate(&mut self.learner, &mut self.saver.best, &mut self.context)
    }

    /// Finds out how many steps the next epoch has, if there is one: a sampler's epochs may differ.
    fn count_epoch(&mut self) -> Result<(), TrainerError> {
        let state = &mut self.context.state;
        if state.epoch < state.n_epochs {
            let mesh = self.learner.engine.mesh();
            state.steps_per_epoch = self.data.num_steps(state.epoch, &self.context.settings, mesh)?;
        }
        Ok(())
    }

    /// Agrees with the other ranks, and does what any of them asks for, until there are no more requests.
    fn next(&mut self, window: Brought) -> Result<Next, TrainerError> {
        loop {
            let agreed = self.agree(window)?;
            if agreed.failed {
                self.context.check()?;
            }
            if agreed.validation {
                self.validate()?;
            } else if agreed.checkpoint {
                self.saver.save(&self.learner, &self.data, &mut self.context)?;
            } else if agreed.stop {
                return Ok(Next::Stop(self.asked_end()?));
            } else if agreed.buffers_of().is_none() {
                return Ok(Next::NoData);
            } else {
                return Ok(Next::Step(agreed));
            }
        }
    }

    fn agree(&mut self, window: Brought) -> Result<Agreed, TrainerError> {
        let context = &mut self.context;
        let requests = &context.state.requests;
        let brought = Brought {
            failed: context.hooks.failure().is_some(),
            stop: requests.stop.is_some() || context.stop.is_requested(),
            validation: requests.validation,
            checkpoint: requests.checkpoint,
            work: (context.state.times.load + context.state.times.compute).as_secs_f64(),
            ..window
        };
        let begin = Instant::now();
        let mesh = self.learner.engine.mesh();
        let agreed = on_behalf_of(context.site, || Agreed::reach(mesh, &brought))?;
        context.state.times.comm += begin.elapsed();
        context.tracer.span("agree", Track::Communication, begin);
        Ok(agreed)
    }

    /// The end that the first rank asks for, of those that ask for one.
    fn asked_end(&self) -> Result<End, TrainerError> {
        let signal = self.context.stop.signal().map(|signal| End::Stopped { reason: signal_text(signal) });
        let own = self.context.state.requests.stop.clone().or(signal);
        let all = self.context.state.group.all_gather_object(&own)?;
        let first = all.into_iter().enumerate().find_map(|(rank, end)| Some((rank, end?)));
        Ok(match first {
            None | Some((_, End::Finished)) => End::Stopped { reason: String::new() },
            Some((rank, End::EarlyStopped { reason })) => {
                End::EarlyStopped { reason: format!("{reason} (rank {rank})") }
            }
            Some((rank, End::Stopped { reason })) => {
                End::Stopped { reason: format!("{reason} (rank {rank})") }
            }
        })
    }
}

/// The work of each rank as if all stages of a pipeline had as much: a rank is compared with those of the same stages.
fn of_equal_stages(work: &[f64], shape: &MeshShape) -> Vec<f64> {
    let mean_at = |stage: usize| {
        let ranks = (0..work.len()).filter(|rank| shape.coordinate(*rank, Axis::Pp) == stage);
        let (sum, count) = ranks.fold((0.0, 0.0), |(sum, count), rank| (sum + work[rank], count + 1.0));
        sum / f64::max(count, 1.0)
    };
    let means: Vec<f64> = (0..shape.size(Axis::Pp)).map(mean_at).collect();
    let whole = means.iter().sum::<f64>() / means.len() as f64;
    let of_rank = |(rank, work): (usize, &f64)| {
        let mean = means[shape.coordinate(rank, Axis::Pp)];
        if mean > 0.0 { work * whole / mean } else { *work }
    };
    work.iter().enumerate().map(of_rank).collect()
}

/// The name of a signal, with Ctrl-C for SIGINT.
fn signal_text(signal: Signal) -> String {
    let name = signal_name(signal.as_raw());
    if signal == Signal::INT { format!("{name} (Ctrl-C)") } else { name.to_owned() }
}

/// The line about a training that stopped before its last epoch.
fn stop_line(reason: &str, state: &TrainState) -> String {
    let (step, epoch, epochs) = (state.step, state.epoch + 1, state.n_epochs);
    let saved = match &state.checkpoint {
        Some(checkpoint) => format!("checkpoint {}, from which resume_from continues", checkpoint.display()),
        None => "no checkpoint, as there is no save_path".to_owned(),
    };
    format!("[stop] == {reason} | after step {step}, in epoch {} of {epochs} | {saved} ==", epoch.min(epochs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_compared_with_those_of_the_same_stages() {
        let shape = MeshShape::default().with(Axis::Pp, 2).with(Axis::Dp, 2);
        // The first stage has twice the work of the second one, and rank 3 is slower than rank 2.
        assert_eq!(of_equal_stages(&[4.0, 4.0, 2.0, 2.0], &shape), [3.0; 4]);
        let slow = of_equal_stages(&[4.0, 4.0, 1.0, 3.0], &shape);
        assert_eq!(slow, [3.0, 3.0, 1.5, 4.5]);
        let flat = MeshShape::default().with(Axis::Dp, 2);
        assert_eq!(of_equal_stages(&[1.0, 3.0], &flat), [1.0, 3.0]);
    }
}
