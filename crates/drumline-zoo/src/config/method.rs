//! `OPTIM`: the optimizer by name, and its settings.

use std::collections::BTreeSet;

use super::check::{invalid, not_negative};
use super::error::ConfigError;
use super::section::section;
use super::setting::{MasterWeightsKind, MomentsKind, OptimizerName, PrecisionKind};
use super::shared::SharedKeys;

section! {
    /// `OPTIM`: the optimizer by name, and its settings.
    Method "OPTIM" {
        /// The optimizer
        "METHOD" method: OptimizerName = OptimizerName::Adamw;
        /// Betas of adam, adamw, lamb and lion; by default [0.9, 0.99] for lion
        "BETAS" betas: Vec<f64> = vec![0.9, 0.999];
        /// Epsilon of adam, adamw, lamb and adagrad; by default 1e-10 for adagrad
        "EPS" eps: f64 = 1e-8;
        /// AMSGrad with adam and adamw
        "AMSGRAD" amsgrad: bool = false;
        /// How fast the learning rate of adagrad falls
        "LR_DECAY" lr_decay: f64 = 0.0;
        /// The sum of squared gradients of adagrad before the first step
        "INITIAL_ACCUMULATOR" initial_accumulator: f64 = 0.0;
        /// How adam and adamw keep their running means; bf16 and 8bit: on CPUs
        "MOMENTS" moments: MomentsKind = MomentsKind::F32;
        /// With PRECISION bf16-master, how master weights are kept: f32 copies, or the 16 bits that bf16 lacks (on CPUs)
        "MASTER" master: MasterWeightsKind = MasterWeightsKind::Copy;
        /// Least and greatest scale of a parameter's step with lamb
        "COEFF" coeff: Vec<f64> = vec![0.01, 10.0];
        /// adafactor multiplies the learning rate by the RMS of a parameter
        "SCALE_PARAMETER" scale_parameter: bool = true;
        /// The learning rate of adafactor is at most 1/sqrt(step)
        "RELATIVE_STEP" relative_step: bool = true;
    }
}

impl Method {
    /// Lion has betas of its own, Adagrad an epsilon.
    pub(crate) fn settle(&mut self, given: &BTreeSet<String>) {
        if self.method == OptimizerName::Adagrad && !given.contains("OPTIM.EPS") {
            self.eps = 1e-10;
        }
        if self.method == OptimizerName::Lion && !given.contains("OPTIM.BETAS") {
            self.betas = vec![0.9, 0.99];
        }
    }

    /// Returns an error for values that cannot be used together.
    pub(crate) fn check(&self, shared: &SharedKeys) -> Result<(), ConfigError> {
        if shared.optim.momentum >= 1.0 {
            return invalid("OPTIM.MOMENTUM", format!("is {}; try 0 to below 1", shared.optim.momentum));
        }
        if self.betas.len() != 2 || !self.betas.iter().all(|beta| (0.0..1.0).contains(beta)) {
            let what = format!("is {:?}; try two from 0 to below 1, [0.9, 0.95]", self.betas);
            return invalid("OPTIM.BETAS", what);
        }
        if self.coeff.len() != 2 || self.coeff[0] > self.coeff[1] {
            let what = format!("is {:?}; try a least and a greatest scale, [0.01, 10]", self.coeff);
            return invalid("OPTIM.COEFF", what);
        }
        not_negative(&[
            ("OPTIM.COEFF", self.coeff[0]),
            ("OPTIM.EPS", self.eps),
            ("OPTIM.LR_DECAY", self.lr_decay),
            ("OPTIM.INITIAL_ACCUMULATOR", self.initial_accumulator),
        ])?;
        self.check_amsgrad()?;
        self.check_adagrad()?;
        self.check_moments()?;
        self.check_master(shared.run.precision)
    }

    fn check_amsgrad(&self) -> Result<(), ConfigError> {
        if !self.amsgrad {
            return Ok(());
        }
        check_amsgrad_of(self.method, "OPTIM.AMSGRAD", "OPTIM.METHOD")?;
        if self.moments != MomentsKind::F32 || self.master == MasterWeightsKind::Split {
            let what = "is true, which needs OPTIM.MOMENTS f32 and OPTIM.MASTER copy; try those, or false";
            return invalid("OPTIM.AMSGRAD", what);
        }
        Ok(())
    }

    fn check_adagrad(&self) -> Result<(), ConfigError> {
        let of_adagrad =
            [("OPTIM.LR_DECAY", self.lr_decay), ("OPTIM.INITIAL_ACCUMULATOR", self.initial_accumulator)];
        let unused = of_adagrad.into_iter().find(|(_, value)| *value != 0.0);
        match unused.filter(|_| self.method != OptimizerName::Adagrad) {
            Some((key, value)) => {
                let method = self.method.name();
                invalid(key, format!("is {value}, and {method} has none; try 0, or OPTIM.METHOD adagrad"))
            }
            None => Ok(()),
        }
    }

    fn check_moments(&self) -> Result<(), ConfigError> {
        let (moments, method) = (self.moments.name(), self.method.name());
        if self.moments == MomentsKind::F32
            || matches!(self.method, OptimizerName::Adam | OptimizerName::Adamw)
        {
            return Ok(());
        }
        let what =
            format!("is {moments}, and {method} keeps f32; try OPTIM.MOMENTS f32, or OPTIM.METHOD adamw");
        invalid("OPTIM.MOMENTS", what)
    }

    fn check_master(&self, precision: PrecisionKind) -> Result<(), ConfigError> {
        if self.master == MasterWeightsKind::Copy {
            return Ok(());
        }
        if precision != PrecisionKind::Bf16Master {
            let precision = precision.name();
            let what = format!(
                "is split, and there are no master weights with PRECISION {precision}; try PRECISION bf16-master"
            );
            return invalid("OPTIM.MASTER", what);
        }
        if matches!(self.method, OptimizerName::Sgd | OptimizerName::Adagrad) {
            let what =
                format!("is split, and {} needs copy; try copy, or OPTIM.METHOD lion", self.method.name());
            return invalid("OPTIM.MASTER", what);
        }
        Ok(())
    }
}

/// Returns an error if an optimizer has no AMSGrad; the keys are those that asked for both.
pub(crate) fn check_amsgrad_of(
    method: OptimizerName,
    key: &'static str,
    method_key: &str,
) -> Result<(), ConfigError> {
    if matches!(method, OptimizerName::Adam | OptimizerName::Adamw) {
        return Ok(());
    }
    invalid(key, format!("is true, and {} has none; try {method_key} adamw", method.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(method: OptimizerName, change: impl FnOnce(&mut Method)) -> Option<String> {
        let mut keys = Method { method, ..Method::default() };
        change(&mut keys);
        keys.check(&SharedKeys::default()).err().map(|error| error.to_string())
    }

    #[test]
    fn what_a_method_has_not_is_refused() {
        for method in [OptimizerName::Sgd, OptimizerName::Adamw, OptimizerName::Lion] {
            let name = method.name();
            assert_eq!(
                error(method, |keys| keys.lr_decay = 0.5),
                Some(format!("OPTIM.LR_DECAY is 0.5, and {name} has none; try 0, or OPTIM.METHOD adagrad"))
            );
            assert_eq!(
                error(method, |keys| keys.initial_accumulator = 1.0),
                Some(format!(
                    "OPTIM.INITIAL_ACCUMULATOR is 1, and {name} has none; try 0, or OPTIM.METHOD adagrad"
                ))
            );
            assert_eq!(error(method, |_| {}), None, "control");
        }
        let both = |keys: &mut Method| (keys.lr_decay, keys.initial_accumulator) = (0.5, 1.0);
        assert_eq!(error(OptimizerName::Adagrad, both), None);
        let amsgrad = |keys: &mut Method| keys.amsgrad = true;
        let expected = "OPTIM.AMSGRAD is true, and sgd has none; try OPTIM.METHOD adamw";
        assert_eq!(error(OptimizerName::Sgd, amsgrad), Some(expected.to_owned()));
        assert_eq!(error(OptimizerName::Adam, amsgrad), None);
    }
}
