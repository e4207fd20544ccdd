//! What a configuration asks for, as plain values: all sizes derived, all `"auto"` filled.

use std::fmt;
use std::path::PathBuf;

use drumline_torch::ScalePolicy;
use serde_json::{Map, Value as Json};

use crate::engine::{ShardOptions, Stage};
use crate::schedule::LrPolicy;

/// A plan, and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// What to do.
    pub plan: DeepSpeedPlan,
    /// What each `"auto"` became, in the order in which they were needed.
    pub autos: Vec<Became>,
}

/// What an `"auto"` became.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Became {
    /// The key's path.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Where it comes from: the name of an argument, or a rule.
    pub from: String,
}

/// What a configuration asks for. `None` and defaults leave the decision to the program.
#[derive(Debug, Clone, PartialEq)]
pub struct DeepSpeedPlan {
    /// Batch sizes.
    pub batch: BatchPlan,
    /// Precision; `None` if neither the file nor an argument has any.
    pub precision: Option<PrecisionPlan>,
    /// The norm to which gradients are clipped; `Some(0.0)` is none.
    pub clip_norm: Option<f64>,
    /// The optimizer; `None` if the program brings one.
    pub optimizer: Option<OptimizerPlan>,
    /// The learning rate schedule; `None` if the program brings one, or none is wanted.
    pub scheduler: Option<SchedulerPlan>,
    /// What ranks divide among them; `None` if the file does not say it.
    pub zero: Option<ZeroPlan>,
    /// Where the optimizer's state is, and the parameters.
    pub offload: OffloadPlan,
    /// How activations are checkpointed; `None` if the file does not say it.
    pub activations: Option<ActivationPlan>,
    /// Files of metrics.
    pub monitors: Monitors,
    /// Checkpoints.
    pub checkpoint: CheckpointPlan,
    /// The 16-bit type in which gradients are reduced in stage 0.
    pub reduce_in: Option<Compute>,
    /// Steps between reports; `None` if the file does not say it, 0 for no reports.
    pub steps_per_print: Option<u64>,
    /// `wall_clock_breakdown`
    pub wall_clock_breakdown: bool,
    /// `dump_state`
    pub dump_state: bool,
    /// `dataloader_drop_last`
    pub drop_last: Option<bool>,
}

/// Batch sizes, which fit each other: `train_batch = micro_batch × accumulation × num_ranks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    /// Samples of a step on all ranks.
    pub train_batch: u64,
    /// Samples of a forward on one rank.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// Ranks that train on samples of their own.
    pub num_ranks: u64,
}

/// A data type of computations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    Fp16,
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        })
    }
}

/// The precision of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrecisionPlan {
    /// The data type of matrix products and convolutions.
    pub compute: Compute,
    /// Whether the weights of forward and backward have that type too, beside f32 copies that the optimizer steps. It is
    /// false with `torch_autocast`, and if the precision is the program's own.
    pub has_16_bit_weights: bool,
    /// How the loss is scaled, in float16.
    pub loss_scale: Option<ScalePolicy>,
}

/// An optimizer with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerPlan {
    /// Adagrad.
    Adagrad(AdagradPlan),
    /// Adam, or AdamW if the weight decay is decoupled.
    Adam(AdamPlan),
    /// LAMB.
    Lamb(LambPlan),
    /// Lion.
    Lion(LionPlan),
    /// SGD.
    Sgd(SgdPlan),
}

impl OptimizerPlan {
    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adagrad(AdagradPlan { lr, .. })
            | Self::Adam(AdamPlan { lr, .. })
            | Self::Lamb(LambPlan { lr, .. })
            | Self::Lion(LionPlan { lr, .. })
            | Self::Sgd(SgdPlan { lr, .. }) => *lr,
        }
    }

    /// Whether it has decay rates of running means, which a schedule may cycle.
    pub fn has_betas(&self) -> bool {
        !matches!(self, Self::Adagrad(_) | Self::Sgd(_))
    }

    /// The name of the algorithm.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adagrad(_) => "Adagrad",
            Self::Adam(AdamPlan { is_decoupled: true, .. }) => "AdamW",
            Self::Adam(_) => "Adam",
            Self::Lamb(_) => "Lamb",
            Self::Lion(_) => "Lion",
            Self::Sgd(_) => "SGD",
        }
    }
}

/// Parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradPlan {
    /// Learning rate.
    pub lr: f64,
    /// How fast the learning rate falls.
    pub lr_decay: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The sum of squared gradients before the first step.
    pub initial_accumulator_value: f64,
    /// Epsilon.
    pub eps: f64,
}

/// Parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamPlan {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of both means.
    pub betas: (f64, f64),
    /// Epsilon.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether weight decay is decoupled from the gradient: AdamW.
    pub is_decoupled: bool,
    /// AMSGrad.
    pub amsgrad: bool,
}

/// Parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambPlan {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of both means.
    pub betas: (f64, f64),
    /// Epsilon.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Highest trust ratio.
    pub max_coeff: f64,
    /// Lowest trust ratio.
    pub min_coeff: f64,
}

/// Parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionPlan {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the direction and of the mean.
    pub betas: (f64, f64),
    /// Weight decay.
    pub weight_decay: f64,
}

/// Parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdPlan {
    /// Learning rate.
    pub lr: f64,
    /// Momentum.
    pub momentum: f64,
    /// Dampening.
    pub dampening: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
    /// Weight decay.
    pub weight_decay: f64,
}

/// A learning rate schedule of DeepSpeed. Step counts that are `"auto"` may wait for the start of the training.
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerPlan {
    /// Its name: `WarmupLR`.
    pub name: String,
    /// Its parameters, without those that wait.
    pub params: Map<String, Json>,
    /// Whether `total_num_steps` waits for the number of steps.
    pub total_waits: bool,
    /// The fraction of all steps that `warmup_num_steps` waits for.
    pub warmup_waits: Option<f64>,
}

/// The number of steps is needed, and is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownTotal {
    /// No number of steps.
    #[error(
        "scheduler.params of {name} depend on the number of steps, which is not known; try numbers instead of \"auto\""
    )]
    Unknown {
        /// The schedule.
        name: String,
    },
    /// The parameters are not those of the schedule.
    #[error("scheduler.params of {name}: {cause}")]
    Params {
        /// The schedule.
        name: String,
        /// What is wrong with them.
        cause: String,
    },
}

impl SchedulerPlan {
    /// Whether it needs the number of steps.
    pub fn waits(&self) -> bool {
        self.total_waits || self.warmup_waits.is_some()
    }

    /// The schedule of a training of `total_steps` steps.
    pub fn policy(&self, total_steps: Option<u64>) -> Result<LrPolicy, UnknownTotal> {
        let name = || self.name.clone();
        let total = || total_steps.ok_or_else(|| UnknownTotal::Unknown { name: name() });
        let mut params = self.params.clone();
        if self.total_waits {
            params.insert("total_num_steps".into(), total()?.into());
        }
        if let Some(fraction) = self.warmup_waits {
            let steps = (fraction * total()? as f64).ceil() as u64;
            params.insert("warmup_num_steps".into(), steps.max(1).into());
        }
        let policy = serde_json::json!({"type": self.name, "params": params});
        serde_json::from_value(policy)
            .map_err(|cause| UnknownTotal::Params { name: name(), cause: cause.to_string() })
    }
}

/// What ranks divide among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroPlan {
    /// The stage.
    pub stage: Stage,
    /// Ranks that hold a copy of the model together; `None` for all ranks.
    pub shard: Option<u64>,
    /// Parameters of at most this many elements stay gathered in stage 3.
    pub keep_gathered: u64,
}

impl ZeroPlan {
    /// The options of the sharded engine; `None` for stage 0, which is DDP.
    pub fn shard_options(&self) -> Option<ShardOptions> {
        (self.stage != Stage::Zero0).then(|| ShardOptions {
            shard: self.shard.map(|shard| shard as usize),
            keep_gathered: self.keep_gathered as usize,
            ..ShardOptions::new(self.stage)
        })
    }
}

/// Where states are instead of on the training's device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OffloadPlan {
    /// Where the optimizer's state is.
    pub optimizer: Option<OffloadDevice>,
    /// The part of the parameters whose optimizer state is offloaded.
    pub optimizer_ratio: f64,
    /// Where parameters are.
    pub parameters: Option<OffloadDevice>,
}

/// A place for offloaded states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffloadDevice {
    /// Host memory.
    Cpu,
    /// A folder on a disk.
    Disk(PathBuf),
}

/// How activations are checkpointed. A block in the file alone checkpoints nothing: the model decides which parts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationPlan {
    /// Whether activations are kept in host memory.
    pub is_on_cpu: bool,
    /// How many parts are checkpointed.
    pub num_checkpoints: Option<u64>,
}

/// Files of metrics. `None` if the file does not say it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Monitors {
    /// TensorBoard's event files.
    pub tensorboard: Option<MonitorPlan>,
    /// CSV files.
    pub csv: Option<MonitorPlan>,
}

/// One kind of files of metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorPlan {
    /// Whether they are written.
    pub is_enabled: bool,
    /// Their folder.
    pub output_path: Option<PathBuf>,
    /// The folder within.
    pub job_name: String,
}

impl MonitorPlan {
    /// Where its files are written, `output_path/job_name`; `None` if none are. The default of `output_path` is the
    /// current folder, as in DeepSpeed.
    pub fn folder(&self) -> Option<PathBuf> {
        let Self { is_enabled, output_path, job_name } = self;
        is_enabled.then(|| output_path.clone().unwrap_or_default().join(job_name))
    }
}

/// What happens if ranks save under different tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TagValidation {
    /// Nothing.
    Ignore,
    /// A warning.
    #[default]
    Warn,
    /// An error.
    Fail,
}

/// How checkpoints are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckpointPlan {
    /// What happens if ranks save under different tags.
    pub tag_validation: TagValidation,
}
