//! `TrainState`: the live state of a training, which callbacks read, and those of all ranks may change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drumline_comm::{MeshShape, ProcessGroup};
use drumline_observe::slow_ranks::{SlowRank, SlowRanks};
use drumline_torch::{Named, Optimizer, StepMade};
use serde_json::Value;
use tch::Device;

use super::end::End;
use crate::schedule::At;

/// The result of an evaluation, over all samples and all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// Epochs done, including one that has just ended.
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
    /// Samples of the data set.
    pub samples: u64,
    /// Each metric by its name, the loss first.
    pub metrics: Vec<(String, f64)>,
    /// The metric that decides which model is best.
    pub metric_key: String,
    /// Whether it is better than all before.
    pub is_better: bool,
}

impl Evaluation {
    /// The metric of this name.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }
}

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Best {
    /// The value of the metric key.
    pub metric: f64,
    /// Steps done at that time.
    pub step: u64,
    /// Epochs done at that time, including one that had just ended.
    pub epoch: u64,
}

/// How this rank has spent its time since the training began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Times {
    /// Waiting for batches.
    pub load: Duration,
    /// Forward, backward, callbacks before the optimizer, and the optimizer, including collectives of norms over all
    /// ranks.
    pub compute: Duration,
    /// Agreeing with the other ranks, and waiting for reductions that were not hidden behind backward.
    pub comm: Duration,
}

/// Requests of callbacks, which are carried out between steps, on all ranks, if any of them asks.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Requests {
    pub(super) stop: Option<End>,
    pub(super) validation: bool,
    pub(super) checkpoint: bool,
    pub(super) keep_last: Option<usize>,
    pub(super) keep_best: Option<usize>,
}

/// The live state of a training. Its values are those of all ranks together, and the same on each.
///
/// What is saved of it is [`checkpoint::RunState`](crate::checkpoint::RunState).
pub struct TrainState {
    pub(super) group: ProcessGroup,
    pub(super) mesh: MeshShape,
    pub(super) device: Device,
    pub(super) optimizer: Box<dyn Optimizer>,
    /// Whether a callback may have changed the optimizer since its last step.
    pub(super) is_optimizer_changed: bool,
    pub(super) parameters: Vec<Named>,
    pub(super) config: BTreeMap<String, Value>,
    pub(super) begin: Instant,
    pub(super) initial_lr: f64,
    pub(super) n_epochs: u64,
    pub(super) max_steps: Option<u64>,
    pub(super) steps_per_epoch: u64,
    /// Epochs done.
    pub(super) epoch: u64,
    pub(super) step_in_epoch: u64,
    pub(super) step: u64,
    pub(super) loss: f64,
    pub(super) samples: u64,
    pub(super) count: f64,
    pub(super) skipped: u64,
    pub(super) has_overflowed: bool,
    pub(super) samples_per_s: f64,
    pub(super) train_metrics: Vec<(String, f64)>,
    pub(super) valid_batches: (u64, u64),
    pub(super) evaluation: Option<Evaluation>,
    pub(super) best: Option<Best>,
    pub(super) times: Times,
    pub(super) bubble: Option<f64>,
    pub(super) requests: Requests,
    pub(super) resumed_at: Option<u64>,
    pub(super) saved_at: Option<u64>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) slow: SlowRanks,
    pub(super) notices: Vec<String>,
    pub(super) has_save_path: bool,
    pub(super) accumulation_note: Option<String>,
    pub(super) offload_note: Option<String>,
    pub(super) stop_reason: Option<String>,
}

/// The values with which a training begins.
pub(super) struct Start {
    pub(super) group: ProcessGroup,
    pub(super) mesh: MeshShape,
    pub(super) device: Device,
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) config: BTreeMap<String, Value>,
    pub(super) n_epochs: u64,
    pub(super) max_steps: Option<u64>,
    pub(super) steps_per_epoch: u64,
    pub(super) has_save_path: bool,
    pub(super) accumulation_note: Option<String>,
    pub(super) offload_note: Option<String>,
}

impl TrainState {
    pub(super) fn new(start: Start) -> Self {
        let Start {
            group,
            mesh,
            device,
            optimizer,
            config,
            n_epochs,
            max_steps,
            steps_per_epoch,
            has_save_path,
            accumulation_note,
            offload_note,
        } = start;
        Self {
            group,
            mesh,
            device,
            parameters: optimizer.parameters(),
            initial_lr: optimizer.lr(),
            optimizer,
            is_optimizer_changed: false,
            config,
            n_epochs,
            max_steps,
            steps_per_epoch,
            has_save_path,
            accumulation_note,
            offload_note,
            begin: Instant::now(),
            epoch: 0,
            step_in_epoch: 0,
            step: 0,
            loss: f64::NAN,
            samples: 0,
            count: 0.0,
            skipped: 0,
            has_overflowed: false,
            samples_per_s: 0.0,
            train_metrics: Vec::new(),
            valid_batches: (0, 0),
            evaluation: None,
            best: None,
            times: Times::default(),
            bubble: None,
            requests: Requests::default(),
            resumed_at: None,
            saved_at: None,
            checkpoint: None,
            slow: SlowRanks::default(),
            notices: Vec::new(),
            stop_reason: None,
        }
    }

    /// Steps done, including those that were skipped because of overflow.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Steps that changed no weights, because gradients had overflowed in fp16. Schedules by steps do not count them.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Whether gradients have overflowed in fp16, so that this step will be skipped. It is for callbacks between
    /// backward and the optimizer.
    pub fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Steps of the optimizer.
    pub(super) fn optimizer_steps(&self) -> u64 {
        self.step - self.skipped
    }

    /// Epochs done, which is also the number of the current epoch, counted from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Steps done in the current epoch.
    pub fn step_in_epoch(&self) -> u64 {
        self.step_in_epoch
    }

    /// Steps of the current epoch, or of the next one between epochs. With planned batches epochs may differ.
    pub fn steps_per_epoch(&self) -> u64 {
        self.steps_per_epoch
    }

    /// The number of epochs of the training.
    pub fn n_epochs(&self) -> u64 {
        self.n_epochs
    }

    /// Steps of the whole training, if all remaining epochs are as long as the current one.
    pub fn total_steps(&self) -> u64 {
        let epochs = self.n_epochs.saturating_sub(self.epoch);
        let left = epochs.saturating_mul(self.steps_per_epoch).saturating_sub(self.step_in_epoch);
        let whole = self.step.saturating_add(left);
        self.max_steps.map_or(whole, |most| most.min(whole))
    }

    /// The mean loss of the last step, over the samples (or tokens) of all its batches and ranks. NaN before the first.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// Samples of the last step, over all its batches and ranks.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The divisor of the last step's loss: samples, or tokens.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Samples per second of all ranks, from the total time of the last step.
    pub fn samples_per_s(&self) -> f64 {
        self.samples_per_s
    }

    /// The metrics of the last step, over all its batches and ranks, by their names.
    pub fn train_metrics(&self) -> &[(String, f64)] {
        &self.train_metrics
    }

    /// How many batches of the current evaluation this rank has done, and how many it has.
    pub fn valid_batches(&self) -> (u64, u64) {
        self.valid_batches
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.optimizer.lr()
    }

    /// The optimizer's initial learning rate, also after a resume.
    pub fn initial_lr(&self) -> f64 {
        self.initial_lr
    }

    /// Sets the learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        self.optimizer.set_lr(lr);
    }

    /// The progress for which a schedule returns the learning rate of the next step.
    pub fn at(&self) -> At {
        let done = self.step_in_epoch as f64 / self.steps_per_epoch.max(1) as f64;
        At {
            epoch: self.epoch as f64 + done.min(1.0),
            step: self.optimizer_steps(),
            total_steps: Some(self.total_steps()),
            base_lr: self.initial_lr,
        }
    }

    /// Counts a skipped step, and stores the loss scale of the next.
    pub(super) fn note_scale(&mut self, made: StepMade, scale: f64) {
        self.skipped += u64::from(made == StepMade::Skipped);
        let figures = [("loss_scale", scale), ("skipped_steps", self.skipped as f64)];
        self.train_metrics.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    }

    /// The last evaluation.
    pub fn evaluation(&self) -> Option<&Evaluation> {
        self.evaluation.as_ref()
    }

    /// The best evaluation so far.
    pub fn best(&self) -> Option<Best> {
        self.best
    }

    /// The parameters that are trained, with gradients.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    /// The optimizer, for changes. Its next step on a GPU is eager, and is recorded again after that, because its state
    /// may be in other tensors.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        self.is_optimizer_changed = true;
        &mut *self.optimizer
    }

    /// The group of all ranks. A collective on it must be called by all of them.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How the ranks are arranged.
    pub fn mesh(&self) -> &MeshShape {
        &self.mesh
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.size()
    }

    /// How gradients of several micro-batches are accumulated, and why, if the engine has decided that.
    pub fn accumulation_note(&self) -> Option<&str> {
        self.accumulation_note.as_deref()
    }

    /// Where the optimizer's state lies, as a table, if it is offloaded.
    pub fn offload_note(&self) -> Option<&str> {
        self.offload_note.as_deref()
    }

    /// The device of the model.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether `max_steps` are done. The last step of an epoch is followed by the end of the epoch.
    pub(super) fn is_enough(&self) -> bool {
        self.max_steps.is_some_and(|most| self.step >= most) && self.step_in_epoch < self.steps_per_epoch
    }

    /// The trainer's settings by name, and those that the program has added.
    pub fn config(&self) -> &BTreeMap<String, Value> {
        &self.config
    }

    /// The trainer's settings, one on a line.
    pub fn config_text(&self) -> String {
        self.config.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
    }

    /// The duration of the training, without the time before a resume.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// How this rank has spent its time.
    pub fn times(&self) -> Times {
        self.times
    }

    /// In a pipeline, the share of the last step in which the stages of this rank computed nothing, from 0 to 1. The step counts
    /// from its begin until all ranks are done with forward and backward. `None` on GPUs, where computations are only launched.
    pub fn bubble(&self) -> Option<f64> {
        self.bubble
    }

    /// The step of the checkpoint that was resumed, if any.
    pub fn resumed_at(&self) -> Option<u64> {
        self.resumed_at
    }

    /// The step of the last checkpoint in `save_path`.
    pub fn saved_at(&self) -> Option<u64> {
        self.saved_at
    }

    /// The folder of the last checkpoint that was saved or resumed, as rank 0 sees it.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.checkpoint.as_deref()
    }

    /// Ranks that have been slower than the others by more than 10 % for 20 steps (for 5 seconds, if steps are short);
    /// the same on all ranks. It compares what ranks do without waiting for others. With NCCL this includes the waiting
    /// of the GPUs, which makes ranks look equally fast.
    pub fn slow_ranks(&self) -> Vec<SlowRank> {
        self.slow.now()
    }

    /// Messages about ranks since the step before, one line each: a rank has become slower than the others, or no
    /// longer is.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Why the training has stopped before its last epoch, if it has. It is known from `on_train_end` on.
    pub fn stop_reason(&self) -> Option<&str> {
        self.stop_reason.as_deref()
    }

    /// Requests the end of the training after this step. All ranks stop together if any asks. The first reason counts.
    pub fn request_stop(&mut self, reason: impl Into<String>) {
        self.requests.stop.get_or_insert_with(|| End::Stopped { reason: reason.into() });
    }

    /// Like [`request_stop`](Self::request_stop), for a training that is complete, because more steps would not help.
    pub fn request_early_stop(&mut self, reason: impl Into<String>) {
        self.requests.stop.get_or_insert_with(|| End::EarlyStopped { reason: reason.into() });
    }

    /// Requests an evaluation after this step.
    pub fn request_validation(&mut self) {
        self.requests.validation = true;
    }

    /// Requests a checkpoint after this step, in the trainer's `save_path`.
    pub fn request_checkpoint(&mut self) {
        self.requests.checkpoint = true;
    }

    /// Sets how many checkpoints are kept in the trainer's `save_path`, besides the best. Call it in `on_train_begin`.
    pub fn keep_last_checkpoints(&mut self, num: usize) {
        self.requests.keep_last = Some(num);
    }

    /// Sets how many of the best checkpoints are kept in the trainer's `save_path`. Call it in `on_train_begin`.
    pub fn keep_best_checkpoints(&mut self, num: usize) {
        self.requests.keep_best = Some(num);
    }

    /// Whether the trainer has a `save_path`.
    pub fn has_save_path(&self) -> bool {
        self.has_save_path
    }
}

impl std::fmt::Debug for TrainState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainState")
            .field("epoch", &self.epoch)
            .field("step", &self.step)
            .field("loss", &self.loss)
            .field("lr", &self.lr())
            .finish_non_exhaustive()
    }
}
