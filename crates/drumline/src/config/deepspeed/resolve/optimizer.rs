//! The optimizer by its name, with its parameters.

use super::Resolver;
use crate::config::deepspeed::given::{Argument, Betas};
use crate::config::deepspeed::plan::{AdagradPlan, AdamPlan, LambPlan, LionPlan, OptimizerPlan, SgdPlan};

const SECTION: &str = "optimizer.params";
const TYPE: &str = "optimizer.type";

/// Parameters that an optimizer has, beside those that all have.
const OF_ADAM: &[&str] =
    &["betas", "eps", "adam_w_mode", "torch_adam", "bias_correction", "amsgrad", "set_grad_none"];
const OF_LAMB: &[&str] =
    &["betas", "eps", "max_coeff", "min_coeff", "bias_correction", "amsgrad", "set_grad_none"];
const OF_LION: &[&str] = &["betas", "set_grad_none"];
const OF_ADAGRAD: &[&str] = &["eps", "lr_decay", "initial_accumulator_value", "set_grad_none"];
const OF_SGD: &[&str] = &["momentum", "dampening", "nesterov", "set_grad_none"];
const OF_ALL: [&str; 3] = ["lr", "weight_decay", "max_grad_norm"];

/// Optimizers that do not exist here, and what to use instead.
const REFUSED: [(&str, &str); 8] = [
    ("onebitadam", "AdamW, and 16-bit gradients by communication_data_type or the hook PowerSgd"),
    ("onebitlamb", "Lamb, and 16-bit gradients by communication_data_type or the hook PowerSgd"),
    ("zerooneadam", "AdamW, and 16-bit gradients by communication_data_type or the hook PowerSgd"),
    ("muadam", "AdamW with parameter groups of your own"),
    ("muadamw", "AdamW with parameter groups of your own"),
    ("musgd", "SGD with parameter groups of your own"),
    ("muon", "AdamW"),
    ("adafactor", "AdamW, or Adafactor of the program's own"),
];

impl Resolver<'_> {
    pub(super) fn optimizer(&mut self) -> Option<OptimizerPlan> {
        let name = match self.config.text(TYPE).value() {
            Some(name) => name,
            None if self.config.has_section("optimizer") => {
                self.problem(TYPE, "is not given, but other keys of the optimizer are; try \"AdamW\"");
                return None;
            }
            None => return None,
        };
        let betas = self.given.betas.as_ref();
        Some(match name.to_ascii_lowercase().as_str() {
            "adam" | "fusedadam" => OptimizerPlan::Adam(self.adam(!self.is_coupled())),
            "adamw" => OptimizerPlan::Adam(self.adam(true)),
            "lamb" | "fusedlamb" => OptimizerPlan::Lamb(self.lamb()),
            "lion" => {
                self.others_are_inactive("Lion", OF_LION);
                let betas = self.betas(Betas(0.9, 0.99), betas);
                OptimizerPlan::Lion(LionPlan {
                    lr: self.lr(1e-3),
                    betas,
                    weight_decay: self.weight_decay(0.0),
                })
            }
            "adagrad" => OptimizerPlan::Adagrad(self.adagrad()),
            "sgd" => OptimizerPlan::Sgd(self.sgd()),
            other => {
                let known = REFUSED.iter().find(|(refused, _)| *refused == other);
                let try_this = known.map_or("AdamW, Adam, Lamb, Lion, SGD or Adagrad", |(_, advice)| advice);
                self.problem(TYPE, format!("is {name}, which does not exist here; try {try_this}"));
                return None;
            }
        })
    }

    /// Whether Adam adds its weight decay to the gradient. DeepSpeed's Adam is AdamW by default.
    fn is_coupled(&self) -> bool {
        self.config.bool("optimizer.params.adam_w_mode").value() == Some(false)
    }

    fn adam(&mut self, is_decoupled: bool) -> AdamPlan {
        self.others_are_inactive("Adam", OF_ADAM);
        self.corrects_bias();
        let betas = self.given.betas.as_ref();
        let is_torch = self.is_on("optimizer.params.torch_adam");
        let weight_decay = if is_torch && is_decoupled { 0.01 } else { 0.0 };
        AdamPlan {
            lr: self.lr(1e-3),
            betas: self.betas(Betas(0.9, 0.999), betas),
            eps: self.eps(1e-8),
            weight_decay: self.weight_decay(weight_decay),
            is_decoupled,
            amsgrad: self.is_on("optimizer.params.amsgrad"),
        }
    }

    fn lamb(&mut self) -> LambPlan {
        self.others_are_inactive("Lamb", OF_LAMB);
        self.corrects_bias();
        let betas = self.given.betas.as_ref();
        if self.is_on("optimizer.params.amsgrad") {
            self.problem("optimizer.params.amsgrad", "is true, which Lamb does not have; try false");
        }
        LambPlan {
            lr: self.lr(1e-3),
            betas: self.betas(Betas(0.9, 0.999), betas),
            eps: self.eps(1e-8),
            weight_decay: self.weight_decay(0.0),
            max_coeff: self.number_or("optimizer.params.max_coeff", 10.0),
            min_coeff: self.number_or("optimizer.params.min_coeff", 0.01),
        }
    }

    fn adagrad(&mut self) -> AdagradPlan {
        self.others_are_inactive("Adagrad", OF_ADAGRAD);
        let from_zero = |config: &mut Self, key: &str| config.setting_or(key, 0.0, None);
        AdagradPlan {
            lr: self.lr(1e-2),
            lr_decay: from_zero(self, "optimizer.params.lr_decay"),
            weight_decay: self.weight_decay(0.0),
            initial_accumulator_value: from_zero(self, "optimizer.params.initial_accumulator_value"),
            eps: self.eps(1e-10),
        }
    }

    fn sgd(&mut self) -> SgdPlan {
        const MOMENTUM: &str = "optimizer.params.momentum";
        self.others_are_inactive("SGD", OF_SGD);
        let argument = self.given.momentum.as_ref();
        let momentum = self.filled(MOMENTUM, self.config.number(MOMENTUM), argument);
        SgdPlan {
            lr: self.lr(1e-3),
            momentum: momentum.unwrap_or(0.0),
            dampening: self.number_or("optimizer.params.dampening", 0.0),
            nesterov: self.is_on("optimizer.params.nesterov"),
            weight_decay: self.weight_decay(0.0),
        }
    }

    fn lr(&mut self, usual: f64) -> f64 {
        const KEY: &str = "optimizer.params.lr";
        let argument = self.given.lr.as_ref();
        let lr = self.filled(KEY, self.config.number(KEY), argument);
        if lr.is_none() && self.config.number(KEY).is_auto() {
            self.nothing_given(KEY);
        }
        if lr.is_some_and(|lr| lr < 0.0) {
            self.problem(KEY, "is negative; try 1e-3");
        }
        lr.unwrap_or(usual)
    }

    fn weight_decay(&mut self, usual: f64) -> f64 {
        const KEY: &str = "optimizer.params.weight_decay";
        let argument = self.given.weight_decay.as_ref();
        self.setting_or(KEY, usual, argument)
    }

    fn eps(&mut self, usual: f64) -> f64 {
        const KEY: &str = "optimizer.params.eps";
        let argument = self.given.eps.as_ref();
        self.setting_or(KEY, usual, argument)
    }

    /// A number from 0 that has a default.
    fn setting_or(&mut self, key: &str, usual: f64, argument: Option<&Argument<f64>>) -> f64 {
        let asked = self.config.number(key);
        let value = self.filled(key, asked, argument);
        if value.is_some_and(|value| value < 0.0) {
            self.problem(key, "is negative; try 0 or more");
        }
        value.unwrap_or_else(|| if asked.is_auto() { self.by_default(key, usual) } else { usual })
    }

    fn betas(&mut self, usual: Betas, argument: Option<&Argument<Betas>>) -> (f64, f64) {
        const KEY: &str = "optimizer.params.betas";
        let asked = self.config.betas(KEY);
        let is_written = self.config.setting(KEY).is_some_and(|setting| setting.written.starts_with('['));
        if is_written && asked.value().is_none() {
            self.problem(KEY, "is not two numbers; try [0.9, 0.999]");
        }
        let value = self.filled(KEY, asked, argument);
        let betas =
            value.unwrap_or_else(|| if asked.is_auto() { self.by_default(KEY, usual) } else { usual });
        if ![betas.0, betas.1].iter().all(|beta| (0.0..1.0).contains(beta)) {
            self.problem(KEY, format!("is {betas}; try two from 0 to below 1, [0.9, 0.999]"));
        }
        (betas.0, betas.1)
    }

    pub(super) fn number_or(&self, key: &str, usual: f64) -> f64 {
        self.config.number(key).value().unwrap_or(usual)
    }

    fn corrects_bias(&mut self) {
        const KEY: &str = "optimizer.params.bias_correction";
        if self.config.bool(KEY).value() == Some(false) {
            self.problem(KEY, "is false, and moments are always corrected here; try true");
        }
    }

    /// Notes parameters that this optimizer does not have.
    fn others_are_inactive(&mut self, name: &str, own: &[&str]) {
        let keys = self.config.settings().iter().filter_map(|setting| setting.key());
        let of_others = |name: &str| !own.contains(&name) && !OF_ALL.contains(&name);
        let is_param = |path: &str| path.starts_with(SECTION);
        let others: Vec<_> = keys.filter(|key| is_param(key.path) && of_others(key.name())).collect();
        for key in others {
            self.inactive(key.path, &format!("{name} has no such parameter"));
        }
    }
}
