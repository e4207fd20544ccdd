//! From a configuration and what the program brings to an engine.

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_parallel::{CommHook, Compressed, DdpOptions, EngineOptions, Offload, Place, ShardOptions};
use drumline_torch::Optimizer;
use tch::Device;
use tch::nn::VarStore;

use super::Result;
use super::engine::{DeepSpeedEngine, Steps};
use super::optimizer::{AnyOptimizer, fill_from, make};
use super::source::ConfigSource;
use crate::accelerator::{Accelerator, AcceleratorBuilder, CsvFiles, PreparedLoader, TensorBoard};
use crate::comm::alike::{NamedValues, check_alike};
use crate::comm::shared_failure::{LocalFailure, agree};
use crate::config::deepspeed::{
    Argument, BatchPlan, Compute, DeepSpeedPlan, Given, MonitorPlan, Monitors, OffloadDevice, OffloadPlan,
    PrecisionPlan, Resolved, ZeroPlan,
};
use crate::data::loader::{Dataset, Loader};
use crate::run_error::RunError;
use crate::schedule::{LrSchedule, Schedule};
use crate::trainer::{Batch, Precision};

/// What a program brings beside a configuration. All of it is optional.
///
/// ```
/// use drumline::config::deepspeed::{Argument, Given};
/// use drumline::deepspeed;
/// use drumline::tch::nn::{self, VarStore};
///
/// let store = VarStore::new(drumline::tch::Device::Cpu);
/// let model = nn::linear(store.root(), 2, 1, Default::default());
/// let config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}"#;
/// let given = Given { lr: Some(Argument::given("--lr", 3e-5)), ..Given::default() };
/// let engine = deepspeed::builder(config).given(given).initialize(model, &store)?;
/// assert_eq!(engine.get_lr(), [3e-5]);
/// assert_eq!(engine.autos()[0].from, "--lr");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DeepSpeedBuilder {
    config: ConfigSource,
    given: Given,
    accelerator: AcceleratorBuilder,
    optimizer: Option<AnyOptimizer>,
    schedule: Option<Box<dyn Schedule>>,
}

impl DeepSpeedBuilder {
    pub(super) fn new(config: ConfigSource) -> Self {
        let (given, accelerator) = (Given::default(), Accelerator::builder());
        Self { config, given, accelerator, optimizer: None, schedule: None }
    }

    /// The program's arguments, which fill `"auto"` and must not contradict other values. The number of ranks is known
    /// without them.
    #[must_use]
    pub fn given(self, given: Given) -> Self {
        Self { given, ..self }
    }

    /// Options of the accelerator that the configuration does not have: the group, the device, the seed, trackers.
    #[must_use]
    pub fn accelerator(self, accelerator: AcceleratorBuilder) -> Self {
        Self { accelerator, ..self }
    }

    /// Trains with this optimizer, whatever the configuration names. Its settings fill `"auto"`, and weights keep their
    /// type.
    #[must_use]
    pub fn optimizer(self, optimizer: impl Optimizer + 'static) -> Self {
        Self { optimizer: Some(Box::new(optimizer)), ..self }
    }

    /// Sets learning rates by this schedule, whatever the configuration names.
    #[must_use]
    pub fn schedule(self, schedule: impl Schedule + 'static) -> Self {
        Self { schedule: Some(Box::new(schedule)), ..self }
    }

    /// Prepares the model. All ranks call it, and get the weights of rank 0.
    #[track_caller]
    pub fn initialize<M: 'static>(self, model: M, store: &VarStore) -> Result<DeepSpeedEngine<M>> {
        on_behalf_of(call_site(), || self.prepare(model, store))
    }

    /// Prepares the model and the loader of its training data, whose batches are the micro-batches.
    #[track_caller]
    pub fn initialize_with<M: 'static, D: Dataset + 'static>(
        mut self,
        model: M,
        store: &VarStore,
        loader: Loader<D>,
    ) -> Result<(DeepSpeedEngine<M>, PreparedLoader<D>)>
    where
        D::Batch: Batch,
    {
        let batch_size = loader.options().batch_size as u64;
        self.given.micro_batch = Some(Argument::given("the loader's batch size", batch_size));
        on_behalf_of(call_site(), || {
            let engine = self.prepare(model, store)?;
            let loader = engine.accelerator().prepare_loader(loader)?;
            Ok((engine, loader))
        })
    }

    fn prepare<M: 'static>(self, model: M, store: &VarStore) -> Result<DeepSpeedEngine<M>> {
        let Self { config, given, accelerator, optimizer, schedule } = self;
        let (accelerator, group, device) = accelerator.joined()?;
        let resolved = resolve(config, given, optimizer.as_deref(), group.size());
        let resolved = resolved.and_then(|resolved| {
            check(&resolved.plan, device)?;
            create_folders(&resolved.plan.monitors, group.rank())?;
            Ok(resolved)
        });
        let resolved = agree::<_, RunError>(&group, resolved)?;
        check_alike(&group, "configuration of DeepSpeed", &Ok(shared_values(&resolved.plan)))?;
        report(&resolved, &group);
        let plan = &resolved.plan;
        let accelerator = settings(plan, accelerator).build()?;
        let made = match (optimizer, schedule) {
            (Some(optimizer), schedule) => Ok((Some(optimizer), schedule)),
            (None, schedule) => make(plan, store).map(|optimizer| (optimizer, schedule)),
        };
        let (optimizer, schedule) = agree::<_, RunError>(&group, made.map_err(LocalFailure::from))?;
        let schedule = match (schedule, &optimizer) {
            (None, Some(optimizer)) => agree::<_, RunError>(&group, schedule_of(plan, optimizer.lr()))?,
            (schedule, _) => schedule,
        };
        let model = accelerator.prepare_model(model, store, accelerator.engine_options())?;
        let steps = Steps::new(&accelerator, optimizer, schedule)?;
        Ok(DeepSpeedEngine::new(accelerator, model, steps, resolved))
    }
}

impl std::fmt::Debug for DeepSpeedBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeepSpeedBuilder")
            .field("config", &self.config)
            .field("given", &self.given)
            .finish_non_exhaustive()
    }
}

/// Reads the configuration and fills it.
fn resolve(
    config: ConfigSource,
    mut given: Given,
    optimizer: Option<&dyn Optimizer>,
    num_ranks: usize,
) -> std::result::Result<Resolved, LocalFailure> {
    if let Some(optimizer) = optimizer {
        fill_from(&mut given, optimizer);
    }
    given.num_ranks = num_ranks as u64;
    Ok(config.read()?.resolve(&given)?)
}

/// Refuses what this engine does not do on a device. On CPUs the optimizer's state is in host memory anyway.
fn check(plan: &DeepSpeedPlan, device: Device) -> std::result::Result<(), LocalFailure> {
    let OffloadPlan { optimizer, parameters, .. } = &plan.offload;
    let is_on_disk = |device: &Option<OffloadDevice>| matches!(device, Some(OffloadDevice::Disk(_)));
    let has_parameters_elsewhere = device != Device::Cpu && parameters.is_some();
    if has_parameters_elsewhere || is_on_disk(optimizer) || is_on_disk(parameters) {
        let text = "this engine does not offload parameters, and optimizer state only to the CPU; \
                    try zero_optimization without offload_param and \"device\": \"nvme\", or `drumline train --deepspeed`";
        return Err(text.into());
    }
    Ok(())
}

/// Creates the folders in which rank 0 will write figures, so that one that cannot be written is an error now.
fn create_folders(
    Monitors { tensorboard, csv }: &Monitors,
    rank: usize,
) -> std::result::Result<(), LocalFailure> {
    let enabled = [("tensorboard", tensorboard), ("csv_monitor", csv)].into_iter();
    let folders = enabled.filter_map(|(name, plan)| Some((name, plan.as_ref()?.folder()?)));
    for (name, folder) in folders.filter(|_| rank == 0) {
        std::fs::create_dir_all(&folder).map_err(|error| {
            format!(
                "{name}.output_path cannot be used: cannot create {}: {error}; try another folder",
                folder.display()
            )
        })?;
    }
    Ok(())
}

/// What must be the same on all ranks.
fn shared_values(plan: &DeepSpeedPlan) -> NamedValues {
    let DeepSpeedPlan { batch, precision, clip_norm, optimizer, scheduler, zero, offload, reduce_in, .. } =
        plan;
    let BatchPlan { train_batch, micro_batch, accumulation, .. } = batch;
    let values = [
        ("train_batch_size", train_batch.to_string()),
        ("train_micro_batch_size_per_gpu", micro_batch.to_string()),
        ("gradient_accumulation_steps", accumulation.to_string()),
        ("precision", format!("{precision:?}")),
        ("gradient_clipping", format!("{clip_norm:?}")),
        ("optimizer", format!("{optimizer:?}")),
        ("scheduler", format!("{scheduler:?}")),
        ("zero_optimization", format!("{zero:?}")),
        ("offload_optimizer", format!("{:?}, ratio {}", offload.optimizer, offload.optimizer_ratio)),
        ("communication_data_type", format!("{reduce_in:?}")),
    ];
    values.map(|(name, value)| (name.to_owned(), value)).to_vec()
}

/// Logs what each `"auto"` became, on rank 0.
fn report(Resolved { plan, autos }: &Resolved, group: &ProcessGroup) {
    if group.rank() != 0 {
        return;
    }
    for became in autos {
        tracing::info!("{} is {}, from {}", became.key, became.value, became.from);
    }
    if plan.dump_state {
        tracing::info!("{plan:#?}");
    }
}

/// The accelerator of a plan.
fn settings(plan: &DeepSpeedPlan, builder: AcceleratorBuilder) -> AcceleratorBuilder {
    let mut builder = builder.gradient_accumulation_steps(plan.batch.accumulation as usize);
    if let Some(PrecisionPlan { compute, loss_scale, .. }) = plan.precision {
        builder = builder.precision(match compute {
            Compute::F32 => Precision::F32,
            Compute::Bf16 => Precision::Bf16,
            Compute::Fp16 => Precision::Fp16,
        });
        if let Some(policy) = loss_scale {
            builder = builder.loss_scale(policy);
        }
    }
    let Monitors { tensorboard, csv } = &plan.monitors;
    if let Some(folder) = tensorboard.as_ref().and_then(MonitorPlan::folder) {
        builder = builder.tracker(TensorBoard::in_folder(folder));
    }
    if let Some(folder) = csv.as_ref().and_then(MonitorPlan::folder) {
        builder = builder.tracker(CsvFiles::in_folder(folder));
    }
    let (zero, reduce_in, offload) = (plan.zero, plan.reduce_in, offload(&plan.offload));
    builder.engine(move || engine_options(zero, reduce_in, offload.clone()))
}

/// Where the optimizer's state is.
fn offload(plan: &OffloadPlan) -> Offload {
    match plan.optimizer {
        Some(OffloadDevice::Cpu) => {
            Offload { optimizer: Place::Host, ratio: plan.optimizer_ratio, ..Offload::default() }
        }
        Some(OffloadDevice::Disk(_)) | None => Offload::default(),
    }
}

/// How ranks train the model together.
fn engine_options(
    zero: Option<ZeroPlan>,
    reduce_in: Option<Compute>,
    offload: Offload,
) -> Box<dyn EngineOptions> {
    if let Some(options) = zero.and_then(|zero| zero.shard_options()) {
        return ShardOptions { offload, ..options }.into();
    }
    let hook: Option<Box<dyn CommHook>> = match reduce_in {
        Some(Compute::Fp16) => Some(Box::new(Compressed::half())),
        Some(Compute::Bf16) => Some(Box::new(Compressed::bf16())),
        Some(Compute::F32) | None => None,
    };
    let usual = DdpOptions::default();
    match hook {
        Some(hook) => DdpOptions { hook, ..usual }.into(),
        None => usual.into(),
    }
}

/// The schedule that the configuration names.
fn schedule_of(
    plan: &DeepSpeedPlan,
    base_lr: f64,
) -> std::result::Result<Option<Box<dyn Schedule>>, LocalFailure> {
    let Some(scheduler) = &plan.scheduler else { return Ok(None) };
    let schedule = LrSchedule::new(base_lr, scheduler.policy(None)?)?;
    Ok(Some(Box::new(schedule)))
}
