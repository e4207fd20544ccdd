//! What an accelerator can be told, and how it finds out the rest.

use std::path::PathBuf;
use std::rc::Rc;

use drumline_comm::ProcessGroup;
use drumline_torch::ScalePolicy;
use tch::Device;

use super::Accelerator;
use super::error::{AcceleratorError, Result};
use super::shared::Shared;
use super::tracker::{JsonLines, Tracker, Trackers};
use crate::alike::{Given, check_alike};
use crate::device::local_device;
use crate::scaling::scaler_for;
use crate::shared_failure::{Trouble, agree};
use crate::trainer::Precision;

/// Options of an [`Accelerator`]; each may be left out.
///
/// ```
/// use drumline::Accelerator;
///
/// let accelerator = Accelerator::builder().gradient_accumulation_steps(4).seed(7).build()?;
/// assert!(accelerator.is_main_process());
/// # Ok::<(), drumline::AcceleratorError>(())
/// ```
#[derive(Default)]
pub struct AcceleratorBuilder {
    group: Option<ProcessGroup>,
    device: Option<Device>,
    gradient_accumulation_steps: Option<usize>,
    precision: Precision,
    loss_scale: ScalePolicy,
    seed: Option<u64>,
    trackers: Vec<Box<dyn Tracker>>,
    new_data: NewData,
}

/// What becomes of a state that was saved on other data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum NewData {
    #[default]
    Refuse,
    Accept,
}

impl AcceleratorBuilder {
    /// Batches of each rank in a step; 1, if it is not said.
    #[must_use]
    pub fn gradient_accumulation_steps(self, batches: usize) -> Self {
        Self { gradient_accumulation_steps: Some(batches), ..self }
    }

    /// In which numbers forwards are computed; f32, if it is not said.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// How the loss of [`Precision::Fp16`] is scaled; as by PyTorch's `GradScaler`, if it is not said.
    #[must_use]
    pub fn loss_scale(self, policy: ScalePolicy) -> Self {
        Self { loss_scale: policy, ..self }
    }

    /// Seeds libtorch's generators: those of rank `r` with `seed + r`.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// The folder of what is logged: `metrics.jsonl`, as by [`JsonLines`].
    #[must_use]
    pub fn project_dir(self, folder: impl Into<PathBuf>) -> Self {
        self.tracker(JsonLines::in_folder(folder))
    }

    /// One more place to which figures are logged, on rank 0, such as [`TensorBoard`](super::TensorBoard).
    #[must_use]
    pub fn tracker(mut self, tracker: impl Tracker + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Whether [`load_state`](Accelerator::load_state) accepts a state that was saved on a data set of another length or fingerprint; by default
    /// it is an error. The epoch then continues at the same position in the order of the new data.
    #[must_use]
    pub fn accept_new_data(self, accept: bool) -> Self {
        Self { new_data: if accept { NewData::Accept } else { NewData::Refuse }, ..self }
    }

    /// Uses the processor, also where there is a GPU.
    #[must_use]
    pub fn cpu(self) -> Self {
        Self { device: Some(Device::Cpu), ..self }
    }

    /// The ranks, for a program that has joined its job already.
    #[must_use]
    pub fn group(self, group: &ProcessGroup) -> Self {
        Self { group: Some(group.clone()), ..self }
    }

    /// What must be the same on all ranks.
    fn given(&self, window: usize) -> std::result::Result<Given, Trouble> {
        if window == 0 {
            return Err("gradient_accumulation_steps is 0, expected at least 1; try 1".into());
        }
        Ok(vec![
            ("gradient_accumulation_steps".into(), window.to_string()),
            ("precision".into(), format!("{:?}", self.precision)),
            ("loss_scale".into(), format!("{:?}", self.loss_scale)),
            ("accept_new_data".into(), (self.new_data == NewData::Accept).to_string()),
        ])
    }

    /// Joins the job, unless a group was given. All ranks call it.
    pub fn build(self) -> Result<Accelerator> {
        let group = self.group.clone().map_or_else(ProcessGroup::from_env, Ok)?;
        let window = self.gradient_accumulation_steps.unwrap_or(1);
        check_alike(&group, "accelerator", self.given(window))?;
        if let Some(seed) = self.seed {
            tch::manual_seed(seed.wrapping_add(group.rank() as u64) as i64);
        }
        let device = self.device.unwrap_or_else(|| local_device(&group));
        let scaler = scaler_for(self.precision, self.loss_scale, device);
        let scaler = agree::<_, AcceleratorError>(&group, scaler.map_err(Trouble::from))?;
        let trackers = if group.rank() == 0 { self.trackers } else { Vec::new() };
        Ok(Accelerator {
            shared: Rc::new(Shared::new(group, device, (self.precision, scaler), window)?),
            models: Default::default(),
            optimizers: Default::default(),
            schedules: Default::default(),
            trackers: Trackers::new(trackers, self.seed).into(),
            checkpoints: Default::default(),
            new_data: self.new_data,
        })
    }
}

impl std::fmt::Debug for AcceleratorBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AcceleratorBuilder")
            .field("gradient_accumulation_steps", &self.gradient_accumulation_steps)
            .field("precision", &self.precision)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}
