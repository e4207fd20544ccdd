//! The trainer's settings: plain values, checked once.

use std::collections::BTreeMap;
use std::path::PathBuf;

use drumline_parallel::Clip;
use drumline_torch::{Autocast, ScalePolicy, TorchError};
use serde_json::Value;
use tch::{Device, Kind};

use crate::data::loader::Cause;

/// The precision of forward. Weights, gradients and optimizer state keep their own type, usually f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32.
    #[default]
    F32,
    /// bfloat16 for matrix products and convolutions.
    Bf16,
    /// float16 for the same operations, with loss scaling: small gradients would underflow otherwise.
    Fp16,
}

impl Precision {
    /// The type of autocast, if any.
    pub(crate) fn autocast(self) -> Option<Kind> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(Kind::BFloat16),
            Self::Fp16 => Some(Kind::Half),
        }
    }

    /// Enters autocast on a device until the result is dropped.
    pub(super) fn enter_autocast(self, device: Device) -> Result<Option<Autocast>, TorchError> {
        self.autocast().map(|kind| Autocast::new(device, kind)).transpose()
    }
}

/// An interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Every {
    /// At the end of every n-th epoch.
    Epochs(u64),
    /// After every n-th step.
    Steps(u64),
    /// Never.
    Never,
}

impl Every {
    /// Whether it is due after this many steps.
    pub(super) fn is_at_step(self, step: u64) -> bool {
        matches!(self, Self::Steps(every) if every > 0 && step.is_multiple_of(every))
    }

    /// Whether it is due after this many epochs.
    pub(super) fn is_at_epoch(self, epoch: u64) -> bool {
        matches!(self, Self::Epochs(every) if every > 0 && epoch.is_multiple_of(every))
    }
}

impl Every {
    /// Returns an error for an interval of 0.
    pub(super) fn check(self, what: &str) -> Result<(), Cause> {
        match self {
            Self::Epochs(0) | Self::Steps(0) => {
                Err(format!("{what} is every {self}, expected at least 1; try Every::Never").into())
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Display for Every {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Epochs(every) => write!(f, "{every} epochs"),
            Self::Steps(every) => write!(f, "{every} steps"),
            Self::Never => write!(f, "never"),
        }
    }
}

/// Whether the model has the weights of the best evaluation at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadBestModel {
    /// Yes: they are loaded from the `save_path`, or without one from a copy in memory.
    Yes,
    /// No: the model has the weights of the last step.
    No,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    pub(super) batch_size_per_gpu: usize,
    pub(super) dev_batch_size: Option<usize>,
    pub(super) update_every: usize,
    pub(super) n_epochs: u64,
    pub(super) max_steps: Option<u64>,
    pub(super) num_workers: usize,
    pub(super) pin_memory: bool,
    pub(super) drop_last: bool,
    pub(super) shuffle: bool,
    pub(super) seed: u64,
    pub(super) print_every: u64,
    pub(super) validate_every: Every,
    pub(super) metric_key: Option<String>,
    pub(super) save_path: Option<PathBuf>,
    pub(super) log_path: Option<PathBuf>,
    pub(super) resume_from: Option<PathBuf>,
    pub(super) precision: Precision,
    /// Only in fp16.
    pub(super) loss_scale: ScalePolicy,
    /// Applied in this order.
    pub(super) clips: Vec<Clip>,
    pub(super) cuda_graphs: bool,
    pub(super) use_tqdm: bool,
    pub(super) stop_on_nan: bool,
    pub(super) accept_new_data: bool,
    /// Entries that the program adds.
    pub(super) config: BTreeMap<String, Value>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            batch_size_per_gpu: 8,
            dev_batch_size: None,
            update_every: 1,
            n_epochs: 1,
            max_steps: None,
            num_workers: 1,
            pin_memory: true,
            drop_last: false,
            shuffle: true,
            seed: 0,
            print_every: 10,
            validate_every: Every::Epochs(1),
            metric_key: None,
            save_path: None,
            log_path: None,
            resume_from: None,
            precision: Precision::F32,
            loss_scale: ScalePolicy::default(),
            clips: Vec::new(),
            cuda_graphs: true,
            use_tqdm: true,
            stop_on_nan: true,
            accept_new_data: false,
            config: BTreeMap::new(),
        }
    }
}

impl Settings {
    pub(super) fn check(&self) -> Result<(), Cause> {
        let positive = [
            ("batch_size_per_gpu", self.batch_size_per_gpu),
            ("dev_batch_size", self.dev_batch_size.unwrap_or(1)),
            ("update_every", self.update_every),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} is 0, expected at least 1; try 1").into());
        }
        self.validate_every.check("validate_every")
    }

    /// The settings by name, for logs and checkpoints.
    pub(super) fn to_config(&self) -> BTreeMap<String, Value> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let entries: [(&str, Value); 22] = [
            ("batch_size_per_gpu", self.batch_size_per_gpu.into()),
            ("dev_batch_size", self.dev_batch_size.into()),
            ("update_every", self.update_every.into()),
            ("n_epochs", self.n_epochs.into()),
            ("max_steps", self.max_steps.into()),
            ("num_workers", self.num_workers.into()),
            ("pin_memory", self.pin_memory.into()),
            ("drop_last", self.drop_last.into()),
            ("shuffle", self.shuffle.into()),
            ("seed", self.seed.into()),
            ("print_every", self.print_every.into()),
            ("validate_every", self.validate_every.to_string().into()),
            ("metric_key", self.metric_key.clone().into()),
            ("save_path", path(&self.save_path).into()),
            ("log_path", path(&self.log_path).into()),
            ("resume_from", path(&self.resume_from).into()),
            ("precision", format!("{:?}", self.precision).to_lowercase().into()),
            ("loss_scale", format!("{:?}", self.loss_scale).into()),
            ("clips", format!("{:?}", self.clips).into()),
            ("use_tqdm", self.use_tqdm.into()),
            ("stop_on_nan", self.stop_on_nan.into()),
            ("accept_new_data", self.accept_new_data.into()),
        ];
        entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_errors() {
        let message = |settings: Settings| settings.check().unwrap_err().to_string();
        let defaults = Settings::default;
        defaults().check().unwrap();
        assert!(message(Settings { update_every: 0, ..defaults() }).starts_with("update_every is 0"));
        assert!(
            message(Settings { batch_size_per_gpu: 0, ..defaults() }).starts_with("batch_size_per_gpu is 0")
        );
    }

    #[test]
    fn an_interval_is_due_at_every_nth() {
        let times = |every: Every| (1..=6).filter(|step| every.is_at_step(*step)).collect::<Vec<_>>();
        assert_eq!(
            (times(Every::Steps(3)), times(Every::Epochs(1)), times(Every::Steps(0))),
            (vec![3, 6], vec![], vec![])
        );
        assert!(
            Every::Epochs(2).is_at_epoch(4)
                && !Every::Epochs(2).is_at_epoch(3)
                && !Every::Never.is_at_epoch(1)
        );
    }
}
