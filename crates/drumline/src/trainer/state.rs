//! Where a training stands: what callbacks see, and what those of all ranks may change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drumline_comm::ProcessGroup;
use drumline_observe::slow_ranks::{SlowRank, SlowRanks};
use drumline_torch::{Named, Optimizer};
use serde_json::Value;
use tch::Device;

use crate::schedule::At;

/// The figures of an evaluation, over all samples and all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// Epochs done, counting one that has just ended.
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
    /// Samples of the data set.
    pub samples: u64,
    /// Each metric by its name, the loss first.
    pub metrics: Vec<(String, f64)>,
    /// The metric that says which model is best.
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

/// What was best so far.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Best {
    /// Of the metric that counts.
    pub metric: f64,
    /// Steps done by then.
    pub step: u64,
    /// Epochs done by then, counting one that had just ended.
    pub epoch: u64,
}

/// Where the time of this rank has gone since training began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Times {
    /// Waiting for batches.
    pub load: Duration,
    /// Forward, backward, callbacks before the optimizer, optimizer; with the calls of norms over all ranks.
    pub compute: Duration,
    /// Meeting the other ranks, and waiting for reductions that were not hidden behind backward.
    pub comm: Duration,
}

/// What callbacks ask for; done between steps, on all ranks, when any of them asks.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Requests {
    pub(super) stop: Option<String>,
    pub(super) validation: bool,
    pub(super) checkpoint: bool,
    pub(super) keep_last: Option<usize>,
    pub(super) keep_best: Option<usize>,
}

/// Where a training stands. Figures are those of all ranks together, and the same on each.
pub struct TrainState {
    pub(super) group: ProcessGroup,
    pub(super) device: Device,
    pub(super) optimizer: Box<dyn Optimizer>,
    /// A callback may have changed it since its last step.
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
    pub(super) requests: Requests,
    pub(super) resumed_at: Option<u64>,
    pub(super) saved_at: Option<u64>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) slow: SlowRanks,
    pub(super) notices: Vec<String>,
    pub(super) has_save_path: bool,
    pub(super) stop_reason: Option<String>,
}

/// What a training begins with.
pub(super) struct Start {
    pub(super) group: ProcessGroup,
    pub(super) device: Device,
    pub(super) optimizer: Box<dyn Optimizer>,
    pub(super) config: BTreeMap<String, Value>,
    pub(super) n_epochs: u64,
    pub(super) max_steps: Option<u64>,
    pub(super) steps_per_epoch: u64,
    pub(super) has_save_path: bool,
}

impl TrainState {
    pub(super) fn new(start: Start) -> Self {
        let Start { group, device, optimizer, config, n_epochs, max_steps, steps_per_epoch, has_save_path } =
            start;
        Self {
            group,
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
            requests: Requests::default(),
            resumed_at: None,
            saved_at: None,
            checkpoint: None,
            slow: SlowRanks::default(),
            notices: Vec::new(),
            stop_reason: None,
        }
    }

    /// Steps done, with those that were left out for overflow.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Of the steps done those that changed no weight, as the gradients of fp16 had overflowed. Schedules by steps do not count them.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Whether the gradients of this step are infinite or NaN in fp16, so that it will be left out: for callbacks between backward and step.
    pub fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Steps that the optimizer has made.
    pub(super) fn optimizer_steps(&self) -> u64 {
        self.step - self.skipped
    }

    /// Epochs done; the number of the epoch that is under way, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Steps done in the epoch that is under way.
    pub fn step_in_epoch(&self) -> u64 {
        self.step_in_epoch
    }

    /// Steps of the epoch that is under way, or comes next; with planned batches epochs may differ.
    pub fn steps_per_epoch(&self) -> u64 {
        self.steps_per_epoch
    }

    /// Epochs that were asked for.
    pub fn n_epochs(&self) -> u64 {
        self.n_epochs
    }

    /// Steps of the whole training, if all epochs to come are as long as the one that is under way.
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

    /// What the last step's loss was divided by: samples, or tokens.
    pub fn count(&self) -> f64 {
        self.count
    }

    /// Samples a second of all ranks, by the last step from end to end.
    pub fn samples_per_s(&self) -> f64 {
        self.samples_per_s
    }

    /// The metrics of the last step, over all its batches and ranks, by their names.
    pub fn train_metrics(&self) -> &[(String, f64)] {
        &self.train_metrics
    }

    /// How many batches of the evaluation that is under way this rank has done, and how many it has.
    pub fn valid_batches(&self) -> (u64, u64) {
        self.valid_batches
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        self.optimizer.lr()
    }

    /// The learning rate that the optimizer was made with, also after a checkpoint was loaded.
    pub fn initial_lr(&self) -> f64 {
        self.initial_lr
    }

    /// Sets the learning rate.
    pub fn set_lr(&mut self, lr: f64) {
        self.optimizer.set_lr(lr);
    }

    /// Where a schedule is asked for the learning rate of the next step.
    pub fn at(&self) -> At {
        let done = self.step_in_epoch as f64 / self.steps_per_epoch.max(1) as f64;
        At { epoch: self.epoch as f64 + done.min(1.0), step: self.optimizer_steps() }
    }

    /// The last evaluation.
    pub fn evaluation(&self) -> Option<&Evaluation> {
        self.evaluation.as_ref()
    }

    /// The best evaluation so far.
    pub fn best(&self) -> Option<Best> {
        self.best
    }

    /// What is trained, with gradients.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    /// The optimizer, to be changed. Its next step on a GPU is made operation by operation, and recorded anew after that: what it keeps may be other tensors.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        self.is_optimizer_changed = true;
        &mut *self.optimizer
    }

    /// The ranks that train. A call on it must be made by all of them.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How many ranks train.
    pub fn world_size(&self) -> usize {
        self.group.size()
    }

    /// Where the model is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether `max_steps` are done. The last step of an epoch is followed by what belongs to its end.
    pub(super) fn is_enough(&self) -> bool {
        self.max_steps.is_some_and(|most| self.step >= most) && self.step_in_epoch < self.steps_per_epoch
    }

    /// The trainer's settings by name, and what the program has added.
    pub fn config(&self) -> &BTreeMap<String, Value> {
        &self.config
    }

    /// The trainer's settings, one a line.
    pub fn config_text(&self) -> String {
        self.config.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
    }

    /// How long training has gone on, without what came before the checkpoint that it went on from.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Where the time has gone.
    pub fn times(&self) -> Times {
        self.times
    }

    /// Steps after which the checkpoint was saved that training went on from.
    pub fn resumed_at(&self) -> Option<u64> {
        self.resumed_at
    }

    /// Steps after which the last checkpoint in `save_path` was saved.
    pub fn saved_at(&self) -> Option<u64> {
        self.saved_at
    }

    /// Folder of the last checkpoint that was saved, or resumed from, as rank 0 sees it.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.checkpoint.as_deref()
    }

    /// Ranks that are slower than the others by more than 10 %, and have been for 20 steps (for 5 seconds, where steps are short); the same on all ranks.
    /// What ranks do by themselves is compared; over NCCL the GPUs' waiting for each other is part of it, which makes them look alike.
    pub fn slow_ranks(&self) -> Vec<SlowRank> {
        self.slow.now()
    }

    /// What people should hear of the ranks since the step before, in a line each: one has become slower than the others, or is so no more.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Why training has stopped before its last epoch, if it has; known from `on_train_end` on.
    pub fn stop_reason(&self) -> Option<&str> {
        self.stop_reason.as_deref()
    }

    /// Asks for the end after this step: all ranks stop together, when any asks. The first reason stays.
    pub fn request_stop(&mut self, reason: impl Into<String>) {
        self.requests.stop.get_or_insert_with(|| reason.into());
    }

    /// Asks for an evaluation after this step.
    pub fn request_validation(&mut self) {
        self.requests.validation = true;
    }

    /// Asks for a checkpoint after this step, in the trainer's `save_path`.
    pub fn request_checkpoint(&mut self) {
        self.requests.checkpoint = true;
    }

    /// How many checkpoints stay in the trainer's `save_path`, beside the best; from `on_train_begin`.
    pub fn keep_last_checkpoints(&mut self, num: usize) {
        self.requests.keep_last = Some(num);
    }

    /// How many checkpoints stay in the trainer's `save_path` because their evaluations were the best; from `on_train_begin`.
    pub fn keep_best_checkpoints(&mut self, num: usize) {
        self.requests.keep_best = Some(num);
    }

    /// Whether there is a folder for checkpoints.
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
