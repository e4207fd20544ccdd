//! What a training goes by, whatever it trains: where it writes and goes on from, how far it goes, and what is told of it.
//!
//! ```text
//!   Config, TextConfig, GptConfig ─▶ Course ─ begin ─▶ the run's checkpoints, and the last of them ─▶ a DistTrainer of its kind ─ train ─▶ the last words
//! ```

use drumline::SamplerPosition;
use drumline::checkpoint::{Checkpoints, Loaded};
use drumline::trainer::{
    Batch, Checkpoint, DistTrainer, End, EventFile, Every, LoadBestModel, Model, RankFiles, TensorBoard,
    TrainOutcome, was_evaluated,
};
use drumline_observe::bar::Progress;

use super::callbacks::{EvaluateLast, FiniteLoss, SaveConfig};
use super::ending::Stopped;
use super::job::Job;
use super::pieces;
use super::resumed::{Change, changes};
use super::shown::{IMAGES, Shown, Words};
use crate::config::{Config, Entry, Run};

/// What numbers are, and with them what is kept of weights.
const PRECISION: &str = "PRECISION";
/// What a run begins with, where one that goes on has its own, and what may be another each time.
const OF_NO_WEIGHT: [&str; 5] = [
    "MODEL.WEIGHTS",
    "MODEL.NEW_CLASSIFIER",
    "MODEL.DUMMY_INPUT",
    "MODEL.MEMORY_FORMAT",
    "MODEL.LOSS_CHUNKS",
];
/// Steps that are not traced: memory is new, and files are read for the first time.
const WARM_UP: u64 = 5;

/// The keys that all trainings have.
pub(super) struct Course {
    pub(super) run: Run,
    /// All keys, for whoever looks at the run.
    pub(super) entries: Vec<Entry>,
    /// The same as it is saved.
    pub(super) yaml: String,
    pub(super) auto_resume: bool,
    pub(super) accept_new_data: bool,
    pub(super) max_epoch: u64,
    pub(super) max_steps: Option<u64>,
    /// Whether there is something to evaluate on.
    pub(super) evaluates: bool,
    pub(super) print_freq: u64,
    /// Batches of an evaluation from line to line.
    pub(super) eval_print_freq: u64,
    pub(super) words: Words,
    /// How often a checkpoint is saved, beside the best and the last.
    pub(super) save_every: Every,
    pub(super) tensorboard: bool,
    pub(super) trace_steps: u64,
    /// What the best model is the best by.
    pub(super) best_by: String,
    /// What to try when the loss is no number.
    pub(super) calmer: &'static str,
}

/// What a training begins with.
pub(super) struct Begin {
    pub(super) found: Option<Loaded>,
    /// Those that it is found among, and saved to.
    pub(super) checkpoints: Checkpoints,
    pub(super) progress: Progress,
    pub(super) seed: u64,
}

impl From<&Config> for Course {
    fn from(config: &Config) -> Self {
        let (train, optim) = (&config.train, &config.optim);
        Self {
            run: config.run.clone(),
            entries: config.entries(),
            yaml: config.to_yaml(),
            auto_resume: train.auto_resume,
            accept_new_data: train.accept_new_data,
            max_epoch: optim.max_epoch,
            max_steps: train.max_steps,
            evaluates: true,
            print_freq: train.print_freq as u64,
            eval_print_freq: config.test.print_freq as u64,
            words: IMAGES,
            save_every: Every::Epochs(1),
            tensorboard: train.tensorboard,
            trace_steps: train.trace_steps,
            best_by: "Acc@1".to_owned(),
            calmer: "a smaller OPTIM.BASE_LR or more OPTIM.WARMUP_EPOCHS",
        }
    }
}

impl Course {
    /// Looks for where to go on; `None`, and a word about it, where nothing is left to do.
    pub(super) fn begin(&self, job: &Job, seed: u64) -> anyhow::Result<Option<Begin>> {
        job.claim("OUT_DIR", &self.run.out_dir)?;
        let progress = match job.is_first() {
            true => Progress::new(self.print_freq),
            false => Progress::silent(),
        };
        let progress = job.agree(progress.log_to(&self.run.out_dir).map_err(Into::into))?;
        let log = progress.clone();
        let checkpoints = pieces::checkpoints(&self.run).on_warning(move |line| log.note(line));
        let found = match self.auto_resume {
            true => checkpoints.load_latest(&job.group)?,
            false => None,
        };
        found.iter().flat_map(|found| self.other_model(found)).for_each(|line| progress.say(&line));
        if let Some(found) = found.as_ref().filter(|found| self.is_over(found)) {
            progress.say(&self.nothing_left(found));
            return Ok(None);
        }
        let seed = self.seed_of(seed, found.as_ref());
        Ok(Some(Begin { found, checkpoints, progress, seed }))
    }

    /// Trains to the end, with what is shown, written and kept of all trainings, and tells how it ended.
    pub(super) fn train<M: Model<B> + ?Sized, B: Batch>(
        &self,
        job: &Job,
        trainer: DistTrainer<'_, M, B>,
        begin: Begin,
    ) -> anyhow::Result<()> {
        let Begin { found, checkpoints, progress, seed } = begin;
        let trainer = self.set_up(trainer, job, seed).save_path(checkpoints);
        let trainer = match found {
            Some(found) => trainer.resume_with(found),
            None => trainer,
        };
        let outcome = self.observed(trainer, progress.clone()).train(LoadBestModel::No)?;
        outcome.slow_ranks.iter().for_each(|slow| progress.say(&format!("[ranks] == {slow} ==")));
        progress.say(&self.last_words(&outcome));
        match (job.signal_that_ended_it(), &outcome.end) {
            (Some(signal), End::Stopped { .. }) => Err(Stopped { signal }.into()),
            _ => Ok(()),
        }
    }

    /// With what all trainings have, behind the callbacks of its own.
    fn set_up<'a, M: Model<B> + ?Sized, B: Batch>(
        &self,
        trainer: DistTrainer<'a, M, B>,
        job: &Job,
        seed: u64,
    ) -> DistTrainer<'a, M, B> {
        let out_dir = self.run.out_dir.clone();
        let trainer = trainer
            .stop_request(job.stop.clone())
            .cuda_graphs(self.run.cuda_graphs)
            .callback(FiniteLoss { out_dir, calmer: self.calmer })
            .callback(Checkpoint::every(self.save_every))
            .n_epochs(self.max_epoch)
            .seed(seed)
            .print_every(0)
            .accept_new_data(self.accept_new_data)
            .config(self.entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())));
        let trainer = if self.evaluates { trainer.callback(EvaluateLast) } else { trainer };
        match self.max_steps {
            Some(most) => trainer.max_steps(most),
            None => trainer,
        }
    }

    /// With those that show and write what happens.
    fn observed<'a, M: Model<B> + ?Sized, B: Batch>(
        &self,
        trainer: DistTrainer<'a, M, B>,
        progress: Progress,
    ) -> DistTrainer<'a, M, B> {
        let folder = &self.run.out_dir;
        let shown = Shown::new(progress, self.eval_print_freq, self.words);
        let trainer = trainer
            .callback(RankFiles::in_folder(folder))
            .master_callback(SaveConfig { run: self.run.clone(), yaml: self.yaml.clone() })
            .master_callback(shown)
            .master_callback(EventFile::in_folder(folder));
        let trainer = match self.tensorboard {
            true => trainer.master_callback(TensorBoard::in_folder(folder.join("tensorboard"))),
            false => trainer,
        };
        trainer.trace_steps(WARM_UP..WARM_UP + self.trace_steps, folder)
    }

    /// Whether the checkpoint is that of the last step, with its evaluation.
    fn is_over(&self, found: &Loaded) -> bool {
        let is_enough = self.max_steps.is_some_and(|most| found.state.step >= most);
        let is_last = found.state.epoch >= self.max_epoch || is_enough;
        is_last && (!self.evaluates || was_evaluated(found))
    }

    /// A line for each key of the model that is not what the run has it with: should weights not fit, here is why.
    fn other_model(&self, found: &Loaded) -> Vec<String> {
        let is_of_model =
            |key: &str| key == PRECISION || key.starts_with("MODEL.") && !OF_NO_WEIGHT.contains(&key);
        let keys = self.entries.iter().filter(|entry| is_of_model(&entry.key));
        let now = keys.map(|entry| (entry.key.clone(), entry.value.to_json()));
        let told = |Change { key, saved, now }: Change<'_>| {
            format!("note: the run in {} has {key} {saved}, and now it is {now}", self.run.out_dir.display())
        };
        changes(found, now).map(told).collect()
    }

    fn nothing_left(&self, found: &Loaded) -> String {
        let (step, epoch) = (found.state.step, found.state.epoch);
        let best = found.best_metric().map(|best| format!("; best {} {best:.3}", self.best_by));
        format!(
            "[resume] == nothing left to do after step {step}, {epoch} epochs{} in {}; \
             try a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS, or another OUT_DIR ==",
            best.unwrap_or_default(),
            self.run.out_dir.display()
        )
    }

    /// A run that was given no seed goes on with the one that it drew.
    fn seed_of(&self, seed: u64, found: Option<&Loaded>) -> u64 {
        let saved = found.and_then(|found| serde_json::from_value(found.state.sampler.clone()).ok());
        match (self.run.rng_seed, saved) {
            (None, Some(SamplerPosition { seed, .. })) => seed,
            _ => seed,
        }
    }

    fn last_words(&self, outcome: &TrainOutcome) -> String {
        let (step, folder) = (outcome.steps, self.run.out_dir.display());
        let finished = |how: &str| {
            let best = outcome.best_metric.map(|best| format!("best {} {best:.3} | ", self.best_by));
            let best = best.unwrap_or_default();
            format!("            =======  Training Finished  ======={how}\n   {best}{folder}")
        };
        match &outcome.end {
            End::Stopped { reason } if reason.starts_with("early stop") => {
                finished(&format!("\n   {reason}, after step {step}"))
            }
            End::Stopped { reason } => format!(
                "[stop] == asked to stop after step {step}: {reason}; the checkpoint is in {}; the same command resumes there ==",
                outcome.checkpoint.as_deref().unwrap_or(&self.run.out_dir).display()
            ),
            End::Finished => finished(""),
        }
    }
}
