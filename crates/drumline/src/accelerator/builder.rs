//! The options of an accelerator, and their defaults.

use std::path::PathBuf;
use std::rc::Rc;

use drumline_comm::ProcessGroup;
use drumline_parallel::{EngineOptions, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::ScalePolicy;
use tch::Device;

use super::Accelerator;
use super::error::{AcceleratorError, Result};
use super::shared::{MakeEngineOptions, Shared, SharedOptions};
use super::tracker::{JsonLines, Tracker, Trackers};
use crate::comm::alike::{NamedValues, check_alike};
use crate::comm::shared_failure::{LocalFailure, agree};
use crate::device::local_device;
use crate::scaling::scaler_for;
use crate::trainer::Precision;

/// Options of an [`Accelerator`]. All of them have defaults.
///
/// ```
/// use drumline::Accelerator;
///
/// let accelerator = Accelerator::builder().gradient_accumulation_steps(4).seed(7).build()?;
/// assert!(accelerator.is_main_process());
/// # Ok::<(), drumline::accelerator::AcceleratorError>(())
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
    engine: Option<MakeEngineOptions>,
}

/// Whether a state that was saved on other data is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum NewData {
    #[default]
    Refuse,
    Accept,
}

impl AcceleratorBuilder {
    /// Batches of each rank in a step; default 1.
    #[must_use]
    pub fn gradient_accumulation_steps(self, batches: usize) -> Self {
        Self { gradient_accumulation_steps: Some(batches), ..self }
    }

    /// The precision of forward; default f32.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// How the loss of [`Precision::Fp16`] is scaled; by default as PyTorch's `GradScaler` does.
    #[must_use]
    pub fn loss_scale(self, policy: ScalePolicy) -> Self {
        Self { loss_scale: policy, ..self }
    }

    /// Seeds libtorch's random number generators: `seed + r` on rank `r`. Drumline's dropout in forwards of a prepared model
    /// then draws masks by position, which are the same on any number of ranks: in the batches of a prepared loader, and in
    /// windows ([`accumulate`](Accelerator::accumulate), or an engine of [`deepspeed`](crate::deepspeed)). All ranks give the
    /// same seed.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Logs to `metrics.jsonl` in this folder, with [`JsonLines`].
    #[must_use]
    pub fn project_dir(self, folder: impl Into<PathBuf>) -> Self {
        self.tracker(JsonLines::in_folder(folder))
    }

    /// Adds a tracker that logs figures on rank 0, such as [`TensorBoard`](super::TensorBoard).
    #[must_use]
    pub fn tracker(mut self, tracker: impl Tracker + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Whether [`load_state`](Accelerator::load_state) accepts a state that was saved on a data set of another length
    /// or fingerprint. By default that is an error. If it is accepted, the epoch continues at the same position in the
    /// order of the new data.
    #[must_use]
    pub fn accept_new_data(self, accept: bool) -> Self {
        Self { new_data: if accept { NewData::Accept } else { NewData::Refuse }, ..self }
    }

    /// Sets how ranks train a model together; by default each rank has a replica. The function makes the options for
    /// each model that [`prepare`](Accelerator::prepare) prepares.
    #[must_use]
    pub fn engine<O: Into<Box<dyn EngineOptions>>>(self, options: impl Fn() -> O + 'static) -> Self {
        Self { engine: Some(Box::new(move || options().into())), ..self }
    }

    /// Divides the state of each training among all ranks, as ZeRO of this stage. Other settings are
    /// [`ShardOptions`](crate::engine::ShardOptions), for [`engine`](Self::engine). An optimizer then trains the
    /// parameters of one model.
    #[must_use]
    pub fn shard(self, stage: Stage) -> Self {
        self.engine(move || ShardOptions::new(stage))
    }

    /// Uses the CPU even if there is a GPU.
    #[must_use]
    pub fn cpu(self) -> Self {
        Self { device: Some(Device::Cpu), ..self }
    }

    /// Uses this group, for a program that has joined its job already.
    #[must_use]
    pub fn group(self, group: &ProcessGroup) -> Self {
        Self { group: Some(group.clone()), ..self }
    }

    /// Joins the job, unless there is a [`group`](Self::group), and chooses the device.
    pub(crate) fn joined(self) -> Result<(Self, ProcessGroup, Device)> {
        let group = self.group.clone().map_or_else(ProcessGroup::from_env, Ok)?;
        let device = self.device.unwrap_or_else(|| local_device(&group));
        Ok((Self { group: Some(group.clone()), device: Some(device), ..self }, group, device))
    }

    /// The options that must be the same on all ranks.
    fn shared_values(&self, window: usize) -> std::result::Result<NamedValues, LocalFailure> {
        if window == 0 {
            return Err("gradient_accumulation_steps is 0, expected at least 1; try 1".into());
        }
        Ok(vec![
            ("gradient_accumulation_steps".into(), window.to_string()),
            ("precision".into(), format!("{:?}", self.precision)),
            ("loss_scale".into(), format!("{:?}", self.loss_scale)),
            ("seed".into(), format!("{:?}", self.seed)),
            ("accept_new_data".into(), (self.new_data == NewData::Accept).to_string()),
        ])
    }

    /// Builds the accelerator, and joins the job unless there is a [`group`](Self::group). All ranks call it.
    pub fn build(self) -> Result<Accelerator> {
        let (this, group, device) = self.joined()?;
        this.build_on(&group, device)
    }

    fn build_on(self, group: &ProcessGroup, device: Device) -> Result<Accelerator> {
        let window = self.gradient_accumulation_steps.unwrap_or(1);
        check_alike(group, "accelerator", &self.shared_values(window))?;
        if let Some(seed) = self.seed {
            tch::manual_seed(seed.wrapping_add(group.rank() as u64) as i64);
        }
        let scaler = scaler_for(self.precision, self.loss_scale, device);
        let scaler = agree::<_, AcceleratorError>(group, scaler.map_err(LocalFailure::from))?;
        let trackers = if group.rank() == 0 { self.trackers } else { Vec::new() };
        let engine = self.engine.unwrap_or_else(|| Box::new(Default::default));
        let (precision, seed) = (self.precision, self.seed);
        let options = SharedOptions { device, precision, scaler, window, engine, seed };
        Ok(Accelerator {
            shared: Rc::new(Shared::new(group.clone(), options)?),
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
