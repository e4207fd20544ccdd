//! Values that are of the right type and still cannot be used, found before anything starts.

use super::error::ConfigError;
use super::keys::{Config, Run};
use super::setting::LrPolicy;

impl Config {
    pub(super) fn check_values(&self) -> Result<(), ConfigError> {
        self.check_sizes()?;
        self.check_optim()?;
        self.check_model()?;
        self.fp16.check("PRECISION", self.run.precision)?;
        if self.model.pretrained {
            return unfit(
                "MODEL.PRETRAINED",
                "is True, but no weights are fetched; try MODEL.WEIGHTS FILE.safetensors",
            );
        }
        self.run.check()
    }

    fn check_model(&self) -> Result<(), ConfigError> {
        match self.model.new_classifier && self.model.weights.is_none() {
            true => unfit(
                "MODEL.NEW_CLASSIFIER",
                "is True, which is for MODEL.WEIGHTS; try that, or leave it out",
            ),
            false => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        at_least_1(&[
            ("MODEL.NUM_CLASSES", self.model.num_classes as u64),
            ("TRAIN.BATCH_SIZE", self.train.batch_size as u64),
            ("TRAIN.IM_SIZE", self.train.im_size as u64),
            ("TRAIN.PRINT_FREQ", self.train.print_freq as u64),
            ("TRAIN.ACCUMULATE", self.train.accumulate as u64),
            ("TRAIN.TOPK", self.train.topk as u64),
            ("TEST.BATCH_SIZE", self.test.batch_size as u64),
            ("TEST.IM_SIZE", self.test.im_size as u64),
            ("TEST.PRINT_FREQ", self.test.print_freq as u64),
            ("OPTIM.MAX_EPOCH", self.optim.max_epoch),
            ("TRAIN.MAX_STEPS", self.train.max_steps.unwrap_or(1)),
        ])
    }

    fn check_optim(&self) -> Result<(), ConfigError> {
        let optim = &self.optim;
        let not_negative = [
            ("OPTIM.BASE_LR", optim.base_lr),
            ("OPTIM.MIN_LR", optim.min_lr),
            ("OPTIM.LR_MULT", optim.lr_mult),
            ("OPTIM.MOMENTUM", optim.momentum),
            ("OPTIM.WARMUP_FACTOR", optim.warmup_factor),
            ("OPTIM.WEIGHT_DECAY", optim.weight_decay),
        ];
        if let Some((key, value)) = not_negative.into_iter().find(|(_, value)| *value < 0.0) {
            return unfit(key, format!("is {value}; try 0 or more"));
        }
        if optim.nesterov && (optim.momentum == 0.0 || optim.dampening != 0.0) {
            let what = "is True, which needs a momentum and no dampening; try OPTIM.NESTEROV False";
            return unfit("OPTIM.NESTEROV", what);
        }
        let rises = optim.steps.windows(2).all(|pair| pair[0] < pair[1]);
        match optim.lr_policy {
            LrPolicy::Steps if optim.steps.first() != Some(&0) || !rises => unfit(
                "OPTIM.STEPS",
                "must begin with 0 and rise when OPTIM.LR_POLICY is steps; try [0, 30, 60, 90]",
            ),
            _ => Ok(()),
        }
    }
}

impl Run {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let name = &self.cfg_dest;
        match name.is_empty() || name.contains('/') {
            true => unfit(
                "CFG_DEST",
                format!("is `{name}`, which is no name of a file in OUT_DIR; try config.yaml"),
            ),
            false => Ok(()),
        }
    }
}

/// Refuses the first key that is 0.
pub(crate) fn at_least_1(keys: &[(&'static str, u64)]) -> Result<(), ConfigError> {
    match keys.iter().find(|(_, value)| *value == 0) {
        Some((key, _)) => unfit(key, "is 0; try 1 or more"),
        None => Ok(()),
    }
}

/// Refuses a key's value.
pub(crate) fn unfit(key: &'static str, what: impl Into<String>) -> Result<(), ConfigError> {
    Err(ConfigError::Unfit { key, what: what.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_work_are_refused_with_what_to_try() {
        for (pairs, words) in [
            (&["TRAIN.BATCH_SIZE", "0"][..], "TRAIN.BATCH_SIZE is 0; try 1 or more"),
            (&["OPTIM.LR_POLICY", "steps"], "OPTIM.STEPS must begin with 0"),
            (&["OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", "[0, 9, 9]"], "and rise"),
            (&["OPTIM.MOMENTUM", "0"], "try OPTIM.NESTEROV False"),
            (&["OPTIM.BASE_LR", "-1"], "OPTIM.BASE_LR is -1; try 0 or more"),
            (&["MODEL.PRETRAINED", "True"], "try MODEL.WEIGHTS"),
            (&["CFG_DEST", "a/b"], "try config.yaml"),
        ] {
            let said = Config::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
        let control = [
            "OPTIM.LR_POLICY",
            "steps",
            "OPTIM.STEPS",
            "[0, 9]",
            "OPTIM.MOMENTUM",
            "0",
            "OPTIM.NESTEROV",
            "False",
        ];
        Config::load(None, &control).unwrap();
    }
}
