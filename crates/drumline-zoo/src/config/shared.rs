//! The sections that every task has: the same keys with the same meaning; defaults may differ between tasks.
//!
//! ```text
//!   ImageConfig, TextConfig, GptConfig ─▶ shared: SharedKeys ─┐
//!   NmtConfig (NJUNMT's keys) ─ mapped ─▶ shared: SharedKeys ─┴─▶ the driver
//! ```

use drumline::config::deepspeed::SchedulerPlan;
use drumline_files::{Durability, replace};
use std::collections::BTreeSet;
use std::path::PathBuf;

use super::check::{at_least_1, invalid, not_negative};
use super::error::ConfigError;
use super::fp16::Fp16;
use super::parallel::Parallel;
use super::scheduler::check_scheduler;
use super::section::section;
use super::setting::{AfterWarmup, DeviceKind, PrecisionKind};

section! {
    /// `TRAIN`: training.
    Train "TRAIN" {
        /// Batch size of each rank
        "BATCH_SIZE" batch_size: usize = 32;
        /// Shuffle the data in each epoch
        "SHUFFLE" shuffle: bool = true;
        /// Gradient accumulation: batches per optimizer step, on each rank
        "ACCUMULATE" accumulate: usize = 1;
        /// Resume from the last checkpoint in OUT_DIR
        "AUTO_RESUME" auto_resume: bool = true;
        /// Resume even if the dataset's length or fingerprint differs from the checkpoint's
        "ACCEPT_NEW_DATA" accept_new_data: bool = false;
        /// Threads that load batches, for each rank
        "WORKERS" workers: usize = 1;
        /// Load batches into pinned memory, for GPUs
        "PIN_MEMORY" pin_memory: bool = true;
        /// Print progress every this many steps
        "PRINT_FREQ" print_freq: usize = 30;
        /// Evaluate every this many steps, and after the last; null: after each epoch
        "EVAL_FREQ" eval_freq: Option<u64> = None;
        /// Save a checkpoint every this many steps; null: after each epoch
        "SAVE_FREQ" save_freq: Option<u64> = None;
        /// Stop after this many evaluations without improvement
        "EARLY_STOP" early_stop: Option<u64> = None;
        /// Event files for TensorBoard in OUT_DIR/tensorboard
        "TENSORBOARD" tensorboard: bool = true;
        /// Folder for a CSV file of the loss and one of the learning rate, as DeepSpeed's csv_monitor writes them
        "CSV" csv: Option<PathBuf> = None;
        /// Steps to trace for Perfetto, after the first five, in OUT_DIR/trace
        "TRACE_STEPS" trace_steps: u64 = 0;
        /// Stop after this many steps of the whole run
        "MAX_STEPS" max_steps: Option<u64> = None;
    }
}

section! {
    /// `TEST`: evaluation.
    Test "TEST" {
        /// Batch size of each rank
        "BATCH_SIZE" batch_size: usize = 200;
        /// Print progress every this many batches
        "PRINT_FREQ" print_freq: usize = 10;
    }
}

section! {
    /// `OPTIM`: the keys of all optimizers and schedules.
    Optim "OPTIM" {
        /// Number of epochs
        "MAX_EPOCH" max_epoch: u64 = 100;
        /// Learning rate
        "BASE_LR" base_lr: f64 = 0.2;
        /// Final learning rate of a cosine, as a fraction of BASE_LR
        "MIN_LR" min_lr: f64 = 0.0;
        /// Momentum of SGD
        "MOMENTUM" momentum: f64 = 0.9;
        /// Weight decay
        "WEIGHT_DECAY" weight_decay: f64 = 5e-5;
        /// Clip the norm of the gradient to this
        "GRAD_CLIP" grad_clip: Option<f64> = None;
        /// A schedule of DeepSpeed or PyTorch by its name, instead of the one below; total_num_steps auto: all steps
        "SCHEDULER" scheduler: Option<SchedulerPlan> = None;
    }
}

section! {
    /// `OPTIM`: a learning rate with a warm-up counted in steps.
    WarmupOptim "OPTIM" {
        /// Length of the warm-up: below 1 a fraction of all steps, otherwise a number of steps
        "WARMUP" warmup: f64 = 0.1;
        /// Learning rate after the warm-up
        "SCHEDULE" schedule: AfterWarmup = AfterWarmup::Linear;
    }
}

section! {
    /// Keys without a section.
    Run "" {
        /// Folder for checkpoints, metrics and the resolved configuration
        "OUT_DIR" out_dir: PathBuf = "./exp".into();
        /// Name of the resolved configuration in OUT_DIR
        "CFG_DEST" cfg_dest: String = "config.yaml".into();
        /// Seed of weights, shuffling and augmentation; None: a new one for each run
        "RNG_SEED" rng_seed: Option<u64> = None;
        /// Device to compute on; auto: a GPU if there is one
        "DEVICE" device: DeviceKind = DeviceKind::Auto;
        /// Precision of the training; bf16 and fp16: in matrix products and convolutions
        "PRECISION" precision: PrecisionKind = PrecisionKind::Fp32;
        /// On a GPU, record steps as CUDA graphs where possible; the losses are the same
        "CUDA_GRAPHS" cuda_graphs: bool = true;
    }
}

/// The sections that every task has.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SharedKeys {
    /// `TRAIN`
    pub train: Train,
    /// `TEST`
    pub test: Test,
    /// `OPTIM`
    pub optim: Optim,
    /// `FP16`
    pub fp16: Fp16,
    /// `PARALLEL`
    pub parallel: Parallel,
    /// `OUT_DIR`, `CFG_DEST`, `RNG_SEED`, `DEVICE`, `PRECISION`, `CUDA_GRAPHS`
    pub run: Run,
}

impl SharedKeys {
    /// Returns an error for values that no task can use.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self { train, test, optim, .. } = self;
        at_least_1(&[
            ("TRAIN.BATCH_SIZE", train.batch_size as u64),
            ("TRAIN.ACCUMULATE", train.accumulate as u64),
            ("TRAIN.PRINT_FREQ", train.print_freq as u64),
            ("TRAIN.EVAL_FREQ", train.eval_freq.unwrap_or(1)),
            ("TRAIN.SAVE_FREQ", train.save_freq.unwrap_or(1)),
            ("TRAIN.EARLY_STOP", train.early_stop.unwrap_or(1)),
            ("TRAIN.MAX_STEPS", train.max_steps.unwrap_or(1)),
            ("TEST.BATCH_SIZE", test.batch_size as u64),
            ("TEST.PRINT_FREQ", test.print_freq as u64),
            ("OPTIM.MAX_EPOCH", optim.max_epoch),
        ])?;
        not_negative(&[
            ("OPTIM.BASE_LR", optim.base_lr),
            ("OPTIM.MIN_LR", optim.min_lr),
            ("OPTIM.MOMENTUM", optim.momentum),
            ("OPTIM.WEIGHT_DECAY", optim.weight_decay),
        ])?;
        if let Some(norm) = optim.grad_clip.filter(|norm| *norm <= 0.0) {
            return invalid("OPTIM.GRAD_CLIP", format!("is {norm}; try more than 0, or null"));
        }
        check_scheduler("OPTIM.SCHEDULER", optim.scheduler.as_ref())?;
        self.fp16.check("PRECISION", self.run.precision)?;
        self.parallel.check()?;
        self.check_micro_batches()?;
        self.run.check()
    }

    /// The batches of a step on each rank.
    pub(crate) fn micro_batches(&self) -> usize {
        self.parallel.micro_batches.unwrap_or(self.train.accumulate)
    }

    /// Returns an error for a number of them that contradicts another key, or that the schedule cannot have.
    pub(crate) fn check_micro_batches(&self) -> Result<(), ConfigError> {
        let accumulate = self.train.accumulate;
        if let Some(given) =
            self.parallel.micro_batches.filter(|given| accumulate > 1 && *given != accumulate)
        {
            let what = format!(
                "is {given}, and TRAIN.ACCUMULATE (update_cycle of a translation) {accumulate}, which mean the same; try one of them"
            );
            return invalid("PARALLEL.MICRO_BATCHES", what);
        }
        self.parallel.check_schedule(self.micro_batches())
    }

    /// Returns an error if a setting needs evaluations but `key`, which names the evaluation data, is not given.
    pub(crate) fn check_evaluates(&self, key: &'static str) -> Result<(), ConfigError> {
        let Train { early_stop, eval_freq, .. } = self.train;
        if early_stop.is_some() || eval_freq.is_some() {
            return invalid(key, "is not given, and without it nothing is evaluated; try a file");
        }
        Ok(())
    }

    /// `TEST.PRINT_FREQ` defaults to `TRAIN.PRINT_FREQ`.
    pub(crate) fn settle_print_freq(&mut self, given: &BTreeSet<String>) {
        if !given.contains("TEST.PRINT_FREQ") {
            self.test.print_freq = self.train.print_freq;
        }
    }
}

impl Run {
    fn check(&self) -> Result<(), ConfigError> {
        let name = &self.cfg_dest;
        if name.is_empty() || name.contains('/') {
            let what = format!("is `{name}`, which is not a file name in OUT_DIR; try config.yaml");
            return invalid("CFG_DEST", what);
        }
        Ok(())
    }

    /// Writes a configuration to `OUT_DIR/CFG_DEST` atomically and returns the path.
    pub(crate) fn save(&self, yaml: &str) -> Result<PathBuf, ConfigError> {
        let path = self.out_dir.join(&self.cfg_dest);
        let written =
            std::fs::create_dir_all(&self.out_dir).and_then(|()| replace(&path, yaml, Durability::Process));
        written.map(|()| path.clone()).map_err(|source| ConfigError::Save { path, source })
    }
}

impl WarmupOptim {
    /// Returns an error for values that cannot be used.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        not_negative(&[("OPTIM.WARMUP", self.warmup)])?;
        if self.warmup >= 1.0 && self.warmup.fract() != 0.0 {
            let what = format!("is {}; try a part below 1, or a whole number of steps", self.warmup);
            return invalid("OPTIM.WARMUP", what);
        }
        Ok(())
    }
}

/// A configuration that has the shared sections.
pub(crate) trait TaskConfig: super::table::Table {
    /// The title of its JSON schema.
    const TITLE: &'static str;

    /// The shared sections, or the task's own keys mapped to them.
    fn shared(&self) -> SharedKeys;

    /// Sets the device: the flag `--device` overrides the key.
    fn set_device(&mut self, device: DeviceKind);
}
