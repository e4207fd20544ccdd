//! `FP16`: how the loss is scaled in fp16 training, with the key names of DeepSpeed's `"fp16"` section. All tasks share
//! it.
//!
//! ```text
//!   no key                           ─▶ PyTorch's rule
//!   LOSS_SCALE above 0               ─▶ that scale, constant
//!   LOSS_SCALE 0, or any other key   ─▶ DeepSpeed's rule
//! ```

use drumline_torch::{DeepSpeedScale, ScalePolicy};

use super::check::invalid;
use super::error::ConfigError;
use super::section::section;
use super::setting::PrecisionKind;

section! {
    /// `FP16`: how the loss is scaled if the precision is fp16. A key that is not given is `None`.
    Fp16 "FP16" {
        /// With PRECISION fp16, the constant loss scale; 0: dynamic by DeepSpeed's rule; null: dynamic by PyTorch's
        /// rule, or by DeepSpeed's if a key below is given
        "LOSS_SCALE" loss_scale: Option<f64> = None;
        /// DeepSpeed's rule: initial loss scale, as a power of 2; null: 16
        "INITIAL_SCALE_POWER" initial_scale_power: Option<u32> = None;
        /// DeepSpeed's rule: the scale doubles after this many steps without overflow; null: 1000
        "LOSS_SCALE_WINDOW" loss_scale_window: Option<u32> = None;
        /// DeepSpeed's rule: the scale halves after this many overflows; null: 2
        "HYSTERESIS" hysteresis: Option<u32> = None;
        /// DeepSpeed's rule: whether a step without overflow resets the count of overflows; null: false, only a growing
        /// scale does
        "CONSECUTIVE_HYSTERESIS" consecutive_hysteresis: Option<bool> = None;
        /// DeepSpeed's rule: lowest loss scale; null: 1
        "MIN_LOSS_SCALE" min_loss_scale: Option<f64> = None;
    }
}

impl Fp16 {
    /// The loss scaling policy.
    pub fn policy(&self) -> ScalePolicy {
        match self.loss_scale {
            Some(scale) if scale > 0.0 => ScalePolicy::Static(scale),
            None if self.given().is_none() => ScalePolicy::default(),
            _ => ScalePolicy::DeepSpeed(self.deepspeed()),
        }
    }

    fn deepspeed(&self) -> DeepSpeedScale {
        let unless_given = DeepSpeedScale::default();
        DeepSpeedScale {
            initial_scale_power: self.initial_scale_power.unwrap_or(unless_given.initial_scale_power),
            loss_scale_window: self.loss_scale_window.unwrap_or(unless_given.loss_scale_window),
            hysteresis: self.hysteresis.unwrap_or(unless_given.hysteresis),
            consecutive_hysteresis: self
                .consecutive_hysteresis
                .unwrap_or(unless_given.consecutive_hysteresis),
            min_loss_scale: self.min_loss_scale.unwrap_or(unless_given.min_loss_scale),
        }
    }

    /// The first key that was given.
    fn given(&self) -> Option<&'static str> {
        self.loss_scale.map(|_| "FP16.LOSS_SCALE").or_else(|| self.given_of_deepspeed())
    }

    fn given_of_deepspeed(&self) -> Option<&'static str> {
        let keys = [
            ("FP16.INITIAL_SCALE_POWER", self.initial_scale_power.is_some()),
            ("FP16.LOSS_SCALE_WINDOW", self.loss_scale_window.is_some()),
            ("FP16.HYSTERESIS", self.hysteresis.is_some()),
            ("FP16.CONSECUTIVE_HYSTERESIS", self.consecutive_hysteresis.is_some()),
            ("FP16.MIN_LOSS_SCALE", self.min_loss_scale.is_some()),
        ];
        keys.into_iter().find(|(_, is_given)| *is_given).map(|(key, _)| key)
    }

    /// Returns an error for numbers that cannot scale a loss, and for keys that would have no effect. `of` is the key
    /// of the precision.
    pub(crate) fn check(&self, of: &str, precision: PrecisionKind) -> Result<(), ConfigError> {
        if let Some(key) = self.given().filter(|_| precision != PrecisionKind::Fp16) {
            let what =
                format!("is given, but {of} is {}; try {of} fp16, or leave the key out", precision.name());
            return invalid(key, what);
        }
        if let (Some(scale), Some(key)) =
            (self.loss_scale.filter(|scale| *scale > 0.0), self.given_of_deepspeed())
        {
            return invalid(
                key,
                format!("is for a scale that moves; try FP16.LOSS_SCALE 0 instead of {scale}"),
            );
        }
        self.check_numbers()
    }

    fn check_numbers(&self) -> Result<(), ConfigError> {
        let most = f64::from(f32::MAX);
        let DeepSpeedScale { initial_scale_power, loss_scale_window, hysteresis, min_loss_scale, .. } =
            self.deepspeed();
        match self.loss_scale {
            Some(scale) if !(0.0..=most).contains(&scale) => {
                invalid("FP16.LOSS_SCALE", format!("is {scale}; try 0, or a number such as 1024"))
            }
            _ if initial_scale_power > 127 => {
                invalid("FP16.INITIAL_SCALE_POWER", format!("is {initial_scale_power}; try 16"))
            }
            _ if loss_scale_window == 0 => invalid("FP16.LOSS_SCALE_WINDOW", "is 0; try 1 or more"),
            _ if hysteresis == 0 => invalid("FP16.HYSTERESIS", "is 0; try 1 or more"),
            _ if min_loss_scale <= 0.0 || min_loss_scale > most => {
                invalid("FP16.MIN_LOSS_SCALE", format!("is {min_loss_scale}; try 1"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::ImageConfig;

    fn loaded(pairs: &[&str]) -> Result<ImageConfig, ConfigError> {
        ImageConfig::load(None, &[&["PRECISION", "fp16"], pairs].concat())
    }

    #[test]
    fn the_keys_select_the_scaling_policy() {
        let policy = |pairs: &[&str]| loaded(pairs).unwrap().shared.fp16.policy();
        let rule = DeepSpeedScale::default();
        assert_eq!(policy(&[]), ScalePolicy::default());
        assert_eq!(policy(&["FP16.LOSS_SCALE", "128"]), ScalePolicy::Static(128.0));
        assert_eq!(policy(&["FP16.LOSS_SCALE", "0"]), ScalePolicy::DeepSpeed(rule));
        assert_eq!(
            policy(&["FP16.HYSTERESIS", "4", "FP16.CONSECUTIVE_HYSTERESIS", "True"]),
            ScalePolicy::DeepSpeed(DeepSpeedScale { hysteresis: 4, consecutive_hysteresis: true, ..rule })
        );
        let all =
            "FP16.LOSS_SCALE 0 FP16.INITIAL_SCALE_POWER 8 FP16.LOSS_SCALE_WINDOW 50 FP16.MIN_LOSS_SCALE 0.5";
        let all: Vec<_> = all.split(' ').collect();
        let expected =
            DeepSpeedScale { initial_scale_power: 8, loss_scale_window: 50, min_loss_scale: 0.5, ..rule };
        assert_eq!(policy(&all), ScalePolicy::DeepSpeed(expected));
    }

    #[test]
    fn invalid_loss_scales_are_refused() {
        for (pairs, words) in [
            (&["FP16.LOSS_SCALE", "-1"][..], "FP16.LOSS_SCALE is -1; try 0, or a number such as 1024"),
            (&["FP16.LOSS_SCALE", "1e39"], "FP16.LOSS_SCALE is 1"),
            (&["FP16.INITIAL_SCALE_POWER", "128"], "FP16.INITIAL_SCALE_POWER is 128; try 16"),
            (&["FP16.LOSS_SCALE_WINDOW", "0"], "FP16.LOSS_SCALE_WINDOW is 0; try 1 or more"),
            (&["FP16.LOSS_SCALE_WINDOW", "5000000000"], "expected a whole number or null"),
            (&["FP16.HYSTERESIS", "0"], "FP16.HYSTERESIS is 0; try 1 or more"),
            (&["FP16.MIN_LOSS_SCALE", "0"], "FP16.MIN_LOSS_SCALE is 0; try 1"),
            (
                &["FP16.LOSS_SCALE", "64", "FP16.HYSTERESIS", "2"],
                "FP16.HYSTERESIS is for a scale that moves; try FP16.LOSS_SCALE 0 instead of 64",
            ),
            (
                &["PRECISION", "bf16", "FP16.MIN_LOSS_SCALE", "1"],
                "FP16.MIN_LOSS_SCALE is given, but PRECISION is bf16; try PRECISION fp16, or leave the key out",
            ),
            (
                &["PRECISION", "fp32", "FP16.LOSS_SCALE", "0"],
                "FP16.LOSS_SCALE is given, but PRECISION is fp32",
            ),
        ] {
            let said = loaded(pairs).unwrap_err().to_string();
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
        loaded(&["PRECISION", "bf16", "FP16.LOSS_SCALE", "null"]).unwrap();
    }

    #[test]
    fn a_saved_configuration_is_read_back() {
        let config = loaded(&["FP16.LOSS_SCALE", "0", "FP16.HYSTERESIS", "3"]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, config.to_yaml()).unwrap();
        assert_eq!(ImageConfig::load::<&str>(Some(&path), &[]).unwrap(), config);
    }
}
