//! A plan as values of our keys. What a task cannot do is a mistake in the file's words.

use std::path::Path;

use drumline::config::deepspeed::{
    AdagradPlan, AdamPlan, Compute, DeepSpeedConfig, DeepSpeedPlan, LambPlan, LionPlan, MonitorPlan,
    OffloadDevice, OptimizerPlan, PrecisionPlan, Problem, SgdPlan,
};
use drumline_torch::ScalePolicy;

use super::given::Values;
use super::names::{BASE_LR, CLIP, Names};
use super::{Pair, written};
use crate::config::setting::Setting;
use crate::config::{DeviceKind, OptimizerName, PrecisionKind, ReduceIn, Value};

/// More steps than any training has: no reports.
const NEVER: usize = 1 << 40;

const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const TRAIN: &str = "train_batch_size";

/// Keys that the engine of programs carries out, and that `drumline train` has in another way.
const OF_THE_ENGINE: [(&str, &str); 7] = [
    ("activation_checkpointing.cpu_checkpointing", "MODEL.CHECKPOINT decides what is kept"),
    ("activation_checkpointing.number_checkpoints", "MODEL.CHECKPOINT decides what is kept"),
    ("checkpoint.tag_validation", "checkpoints have no tags here"),
    ("dataloader_drop_last", "the task decides"),
    ("tensorboard.output_path", "event files are in OUT_DIR/tensorboard"),
    ("tensorboard.job_name", "event files are in OUT_DIR/tensorboard"),
    ("wall_clock_breakdown", "`drumline watch` always shows where the time of a step goes"),
];

/// A mapping on its way.
pub(super) struct Mapping<'a> {
    config: &'a DeepSpeedConfig,
    values: &'a Values<'a>,
    /// Whether ranks train on CPUs.
    is_on_cpu: bool,
    pairs: Vec<Pair>,
    problems: Vec<Problem>,
    idle: Vec<(&'static str, String)>,
}

/// A plan in our keys.
#[derive(Default)]
pub(super) struct Mapped {
    pub(super) pairs: Vec<Pair>,
    /// What this program cannot do, or what contradicts a key that was given.
    pub(super) problems: Vec<Problem>,
    /// Keys of the file that have no effect in this program, and why.
    pub(super) idle: Vec<(&'static str, String)>,
}

impl<'a> Mapping<'a> {
    pub(super) fn new(
        config: &'a DeepSpeedConfig,
        values: &'a Values<'a>,
        device: Option<DeviceKind>,
    ) -> Self {
        let device = device.or_else(|| values.read("DEVICE"));
        let is_on_cpu = device == Some(DeviceKind::Cpu);
        Self { config, values, is_on_cpu, pairs: Vec::new(), problems: Vec::new(), idle: Vec::new() }
    }

    pub(super) fn mapped(mut self, plan: &DeepSpeedPlan) -> Mapped {
        self.batch(plan);
        self.clipping(plan);
        if let Some(precision) = &plan.precision {
            self.precision(precision);
        }
        if let Some(optimizer) = &plan.optimizer {
            self.optimizer(optimizer);
        }
        if let Some(scheduler) = &plan.scheduler {
            self.set("scheduler.type", "OPTIM.SCHEDULER", scheduler.write());
        }
        self.zero(plan);
        self.offload(plan);
        self.reports(plan);
        Mapped { pairs: self.pairs, problems: self.problems, idle: self.idle }
    }

    fn batch(&mut self, plan: &DeepSpeedPlan) {
        let has = |key: &str| self.config.position(key).is_some();
        let Some(micro) = [MICRO, TRAIN, ACCUMULATION].into_iter().find(|key| has(key)) else { return };
        let steps = if has(ACCUMULATION) { ACCUMULATION } else { micro };
        self.set(micro, "TRAIN.BATCH_SIZE", written(&plan.batch.micro_batch));
        self.set(steps, "TRAIN.ACCUMULATE", written(&plan.batch.accumulation));
    }

    fn clipping(&mut self, plan: &DeepSpeedPlan) {
        const KEY: &str = "gradient_clipping";
        if self.config.is_set(KEY) {
            let norm = plan.clip_norm.filter(|norm| *norm > 0.0);
            let norm = match self.values.names() {
                Names::Usual => written(&norm),
                Names::Njunmt => written(&norm.unwrap_or(-1.0)),
            };
            self.set(KEY, CLIP, norm);
        }
    }

    fn precision(&mut self, precision: &PrecisionPlan) {
        const ON: [&str; 3] = ["fp16.enabled", "bf16.enabled", "torch_autocast.enabled"];
        let PrecisionPlan { compute, has_16_bit_weights, loss_scale } = *precision;
        let asked = ON.into_iter().find(|key| self.config.is_on(key));
        let asked = asked.or_else(|| ON.into_iter().find(|key| self.config.is_set(key)));
        let kind = match compute {
            Compute::F32 => PrecisionKind::Fp32,
            Compute::Fp16 => PrecisionKind::Fp16,
            Compute::Bf16 if has_16_bit_weights => PrecisionKind::Bf16Master,
            Compute::Bf16 => PrecisionKind::Bf16,
        };
        // A precision that was given stays: both kinds of bf16 compute in bf16.
        if let Some(from) = asked.filter(|_| self.values.place("PRECISION").is_none()) {
            self.set(from, "PRECISION", written(&kind));
        }
        if let Some(policy) = loss_scale.filter(|_| self.config.has("fp16")) {
            self.loss_scale(policy);
        }
    }

    fn loss_scale(&mut self, policy: ScalePolicy) {
        const KEY: &str = "FP16.LOSS_SCALE";
        match policy {
            ScalePolicy::Static(scale) => self.set("fp16.loss_scale", KEY, written(&scale)),
            ScalePolicy::DeepSpeed(rule) => {
                self.set("fp16.loss_scale", KEY, written(&0.0));
                let keys = [
                    (
                        "fp16.initial_scale_power",
                        "FP16.INITIAL_SCALE_POWER",
                        written(&rule.initial_scale_power),
                    ),
                    ("fp16.loss_scale_window", "FP16.LOSS_SCALE_WINDOW", written(&rule.loss_scale_window)),
                    ("fp16.hysteresis", "FP16.HYSTERESIS", written(&rule.hysteresis)),
                    ("fp16.min_loss_scale", "FP16.MIN_LOSS_SCALE", written(&rule.min_loss_scale)),
                    (
                        "fp16.consecutive_hysteresis",
                        "FP16.CONSECUTIVE_HYSTERESIS",
                        written(&rule.consecutive_hysteresis),
                    ),
                ];
                for (from, key, value) in keys {
                    self.set(from, key, value);
                }
            }
            ScalePolicy::Dynamic(_) => {}
        }
    }

    fn optimizer(&mut self, optimizer: &OptimizerPlan) {
        self.method(optimizer);
        self.set("optimizer.params.lr", BASE_LR, written(&optimizer.lr()));
        match *optimizer {
            OptimizerPlan::Adagrad(adagrad) => self.adagrad(&adagrad),
            OptimizerPlan::Adam(AdamPlan { betas, eps, weight_decay, amsgrad, .. }) => {
                self.adam(betas.into(), Some(eps), weight_decay);
                if amsgrad || self.values.has("OPTIM.AMSGRAD") {
                    self.set("optimizer.params.amsgrad", "OPTIM.AMSGRAD", written(&amsgrad));
                }
            }
            OptimizerPlan::Lamb(LambPlan { betas, eps, weight_decay, max_coeff, min_coeff, .. }) => {
                self.adam(betas.into(), Some(eps), weight_decay);
                let coeff = [min_coeff, max_coeff];
                if coeff != [0.01, 10.0] || self.values.has("OPTIM.COEFF") {
                    self.set("optimizer.params.max_coeff", "OPTIM.COEFF", written(&coeff.to_vec()));
                }
            }
            OptimizerPlan::Lion(LionPlan { betas, weight_decay, .. }) => {
                self.adam(betas.into(), None, weight_decay)
            }
            OptimizerPlan::Sgd(sgd) => self.sgd(&sgd),
        }
    }

    /// The optimizer's name. A task without `OPTIM.METHOD` trains with SGD.
    fn method(&mut self, optimizer: &OptimizerPlan) {
        const KEY: &str = "OPTIM.METHOD";
        const FROM: &str = "optimizer.type";
        let name = Value::Text(optimizer.name().to_lowercase());
        match OptimizerName::read(&name) {
            _ if !self.values.has(KEY) => {
                let is_sgd = matches!(optimizer, OptimizerPlan::Sgd(_));
                let what = format!("is {}, and this task trains with SGD; try \"SGD\"", optimizer.name());
                self.only(FROM, is_sgd, &what);
            }
            None => {
                let what =
                    format!("is {name}, which is not an OPTIM.METHOD; try {}", OptimizerName::expects());
                self.only(FROM, false, &what);
            }
            Some(method) => self.set(FROM, KEY, written(&method)),
        }
    }

    fn adam(&mut self, betas: [f64; 2], eps: Option<f64>, weight_decay: f64) {
        self.set("optimizer.params.betas", "OPTIM.BETAS", written(&betas.to_vec()));
        if let Some(eps) = eps {
            self.set("optimizer.params.eps", "OPTIM.EPS", written(&eps));
        }
        self.set("optimizer.params.weight_decay", "OPTIM.WEIGHT_DECAY", written(&weight_decay));
    }

    fn adagrad(&mut self, adagrad: &AdagradPlan) {
        let AdagradPlan { lr: _, lr_decay, weight_decay, initial_accumulator_value, eps } = *adagrad;
        self.set("optimizer.params.eps", "OPTIM.EPS", written(&eps));
        self.set("optimizer.params.weight_decay", "OPTIM.WEIGHT_DECAY", written(&weight_decay));
        self.set("optimizer.params.lr_decay", "OPTIM.LR_DECAY", written(&lr_decay));
        const SUM: &str = "optimizer.params.initial_accumulator_value";
        self.set(SUM, "OPTIM.INITIAL_ACCUMULATOR", written(&initial_accumulator_value));
    }

    fn sgd(&mut self, sgd: &SgdPlan) {
        let SgdPlan { lr: _, momentum, dampening, nesterov, weight_decay } = *sgd;
        self.set("optimizer.params.momentum", "OPTIM.MOMENTUM", written(&momentum));
        self.set("optimizer.params.weight_decay", "OPTIM.WEIGHT_DECAY", written(&weight_decay));
        if self.values.has("OPTIM.DAMPENING") {
            self.set("optimizer.params.dampening", "OPTIM.DAMPENING", written(&dampening));
            self.set("optimizer.params.nesterov", "OPTIM.NESTEROV", written(&nesterov));
            return;
        }
        self.only("optimizer.params.dampening", dampening == 0.0, "has no key here; try 0");
        self.only("optimizer.params.nesterov", !nesterov, "has no key here; try false");
    }

    fn zero(&mut self, plan: &DeepSpeedPlan) {
        let Some(zero) = plan.zero else { return };
        self.set("zero_optimization.stage", "PARALLEL.ZERO", written(&zero.stage));
        if let Some(shard) = zero.shard {
            self.set("zero_optimization.mics_shard_size", "PARALLEL.SHARD", written(&shard));
        }
        const THRESHOLD: &str = "zero_optimization.stage3_param_persistence_threshold";
        if self.config.has(THRESHOLD) {
            self.set(THRESHOLD, "PARALLEL.KEEP_GATHERED", written(&zero.keep_gathered));
        }
    }

    /// Where states are. On a CPU all of them are in host memory in any case.
    fn offload(&mut self, plan: &DeepSpeedPlan) {
        const DEVICE: &str = "zero_optimization.offload_optimizer.device";
        const FOLDER: &str = "zero_optimization.offload_optimizer.nvme_path";
        const KEY: &str = "PARALLEL.OFFLOAD";
        const RATIO: &str = "zero_optimization.offload_optimizer.ratio";
        match &plan.offload.optimizer {
            Some(OffloadDevice::Cpu) if self.is_on_cpu => self.idle(DEVICE, "ranks on a CPU have it there"),
            Some(OffloadDevice::Cpu) => {
                self.set(DEVICE, KEY, Value::Text("host".into()));
                self.set(RATIO, "PARALLEL.OFFLOAD_RATIO", written(&plan.offload.optimizer_ratio));
            }
            Some(OffloadDevice::Disk(folder)) => {
                self.set(DEVICE, KEY, Value::Text("disk".into()));
                self.folder(FOLDER, folder);
                self.set(RATIO, "PARALLEL.OFFLOAD_RATIO", written(&plan.offload.optimizer_ratio));
            }
            None => {}
        }
        let is_idle = self.is_on_cpu && plan.offload.optimizer == Some(OffloadDevice::Cpu);
        if is_idle && plan.offload.optimizer_ratio < 1.0 {
            self.idle(RATIO, "all of the state is in host memory");
        }
        self.offload_parameters(plan.offload.parameters.as_ref());
    }

    fn offload_parameters(&mut self, place: Option<&OffloadDevice>) {
        const DEVICE: &str = "zero_optimization.offload_param.device";
        const FOLDER: &str = "zero_optimization.offload_param.nvme_path";
        const KEY: &str = "PARALLEL.OFFLOAD_PARAMS";
        match place {
            Some(OffloadDevice::Cpu) if self.is_on_cpu => self.idle(DEVICE, "ranks on a CPU have them there"),
            Some(OffloadDevice::Cpu) => self.set(DEVICE, KEY, Value::Text("host".into())),
            Some(OffloadDevice::Disk(folder)) => {
                self.set(DEVICE, KEY, Value::Text("disk".into()));
                self.folder(FOLDER, folder);
            }
            None => {}
        }
    }

    /// The folder of files: one for all of them.
    fn folder(&mut self, from: &str, folder: &Path) {
        const KEY: &str = "PARALLEL.OFFLOAD_DIR";
        let value = written(&Some(folder.to_owned()));
        match self.pairs.iter().find(|pair| pair.key == KEY) {
            None => self.set(from, KEY, value),
            Some(pair) if pair.value == value => {}
            Some(_) => self.only(from, false, "is not that of offload_optimizer; try the same folder"),
        }
    }

    fn reports(&mut self, plan: &DeepSpeedPlan) {
        if let Some(steps) = plan.steps_per_print {
            let steps = if steps == 0 { NEVER } else { steps as usize };
            self.suggest("steps_per_print", "TRAIN.PRINT_FREQ", written(&steps));
        }
        if let Some(tensorboard) = &plan.monitors.tensorboard {
            self.suggest("tensorboard.enabled", "TRAIN.TENSORBOARD", written(&tensorboard.is_enabled));
        }
        if let Some(folder) = plan.monitors.csv.as_ref().and_then(MonitorPlan::folder) {
            self.suggest("csv_monitor.enabled", "TRAIN.CSV", written(&Some(folder)));
        }
        if let Some(compute) = plan.reduce_in {
            let kind = if compute == Compute::Fp16 { ReduceIn::Fp16 } else { ReduceIn::Bf16 };
            self.set("communication_data_type", "PARALLEL.REDUCE_IN", written(&Some(kind)));
        }
        for (from, why) in OF_THE_ENGINE {
            self.idle(from, why);
        }
    }

    /// Sets a key of ours. A task that does not have it cannot carry out the file's. If the key was given with another
    /// value, that is a mistake, or the file's default gives way.
    fn set(&mut self, from: &str, key: &'static str, value: Value) {
        let is_in_file = self.config.position(from).is_some();
        let own_key = self.values.own(key);
        if !self.values.has(key) {
            self.only(
                from,
                !is_in_file,
                &format!("needs {own_key}, which this task does not have; try without it"),
            );
            return;
        }
        match self.values.place(key).filter(|_| !self.values.is(key, &value)) {
            None => self.pairs.push(Pair { from: from.to_owned(), key: own_key, value }),
            Some(place) => {
                let own = self.values.shown(key);
                let what = format!("means {own_key} {value}, and {place} has {own}; try only one of them");
                self.only(from, !is_in_file, &what);
            }
        }
    }

    /// The same for a key that only concerns reports: what was given here is used.
    fn suggest(&mut self, from: &'static str, key: &'static str, value: Value) {
        let own = self.values.own(key);
        match self.values.place(key) {
            _ if !self.values.has(key) => self.idle(from, "the task decides"),
            None => self.set(from, key, value),
            Some(place) => {
                self.idle(from, format!("{place} has {own} {}, which is used", self.values.shown(key)))
            }
        }
    }

    /// Notes that a key of the file has no effect.
    fn idle(&mut self, from: &'static str, why: impl Into<String>) {
        self.idle.push((from, why.into()));
    }

    /// A mistake unless `holds`. `what` continues the sentence that the file's key begins.
    fn only(&mut self, from: &str, holds: bool, what: &str) {
        if !holds {
            let at = self.config.position(from);
            self.problems.push(Problem { key: from.to_owned(), at, what: what.to_owned() });
        }
    }
}
