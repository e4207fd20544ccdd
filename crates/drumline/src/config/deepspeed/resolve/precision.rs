//! fp16, bf16 and autocast.

use drumline_torch::{DeepSpeedScale, ScalePolicy};

use super::Resolver;
use crate::config::deepspeed::asked::Asked;
use crate::config::deepspeed::plan::{Compute, PrecisionPlan};

const FP16: &str = "fp16.enabled";
const BF16: &str = "bf16.enabled";
const AUTOCAST: &str = "torch_autocast.enabled";

impl Resolver<'_> {
    pub(super) fn precision(&mut self) -> Option<PrecisionPlan> {
        let on: Vec<_> = [FP16, BF16, AUTOCAST].into_iter().filter(|key| self.is_on(key)).collect();
        if let [first, second, ..] = on.as_slice() {
            self.problem(second, format!("is true, and so is {first}; try one of them"));
        }
        let given = self.given.compute.as_ref();
        let (compute, has_16_bit_weights) = match on.first() {
            Some(&FP16) => (Compute::Fp16, true),
            Some(&BF16) => (Compute::Bf16, true),
            Some(_) => (self.autocast_dtype(), false),
            None if self.is_off() => (Compute::F32, false),
            None => (given.map(|given| given.value)?, false),
        };
        if !on.is_empty() {
            self.compare(on[0], &compute, given);
        }
        self.fill_enabled(compute);
        self.note_inactive(compute);
        let loss_scale = (compute == Compute::Fp16).then(|| self.loss_scale());
        Some(PrecisionPlan { compute, has_16_bit_weights, loss_scale })
    }

    /// Whether the file says f32: at least one of both keys is there, and both are off.
    fn is_off(&self) -> bool {
        let both = [FP16, BF16].map(|key| self.config.bool(key));
        both.contains(&Asked::This(false))
            && !both.contains(&Asked::Auto)
            && !both.contains(&Asked::This(true))
    }

    fn autocast_dtype(&self) -> Compute {
        match self.config.text("torch_autocast.dtype").value().as_deref() {
            Some("float16" | "fp16") => Compute::Fp16,
            _ => Compute::Bf16,
        }
    }

    /// Notes what `"enabled": "auto"` became.
    fn fill_enabled(&mut self, compute: Compute) {
        let from =
            self.given.compute.as_ref().map_or("the other keys".to_owned(), |given| given.name.clone());
        for (key, own) in [(FP16, Compute::Fp16), (BF16, Compute::Bf16)] {
            if self.config.bool(key).is_auto() {
                self.became(key, compute == own, &from);
            }
        }
    }

    fn note_inactive(&mut self, compute: Compute) {
        if compute != Compute::Fp16 {
            for key in SCALE_KEYS {
                self.inactive(key, "fp16 is off");
            }
        }
        if !self.is_on(AUTOCAST) {
            self.inactive("torch_autocast.dtype", "torch_autocast is off");
        }
    }

    fn loss_scale(&mut self) -> ScalePolicy {
        let most = f64::from(f32::MAX);
        let scale = self.config.number("fp16.loss_scale").value().unwrap_or(0.0);
        if !(0.0..=most).contains(&scale) {
            self.problem("fp16.loss_scale", format!("is {scale}; try 0, or a number such as 1024"));
        }
        let usual = DeepSpeedScale::default();
        let whole = |key: &str, usual: u32| {
            self.config.whole(key).value().map_or(usual, |value| u32::try_from(value).unwrap_or(u32::MAX))
        };
        let rule = DeepSpeedScale {
            initial_scale_power: whole("fp16.initial_scale_power", usual.initial_scale_power),
            loss_scale_window: whole("fp16.loss_scale_window", usual.loss_scale_window),
            hysteresis: whole("fp16.hysteresis", usual.hysteresis),
            consecutive_hysteresis: self.is_on("fp16.consecutive_hysteresis"),
            min_loss_scale: self.config.number("fp16.min_loss_scale").value().unwrap_or(usual.min_loss_scale),
        };
        if scale > 0.0 {
            for key in &SCALE_KEYS[1..] {
                self.inactive(key, "fp16.loss_scale is constant");
            }
            return ScalePolicy::Static(scale);
        }
        self.check_rule(&rule);
        ScalePolicy::DeepSpeed(rule)
    }

    fn check_rule(&mut self, rule: &DeepSpeedScale) {
        let power = rule.initial_scale_power;
        if power > 127 {
            self.problem("fp16.initial_scale_power", format!("is {power}; try 16"));
        }
        if rule.loss_scale_window == 0 {
            self.problem("fp16.loss_scale_window", "is 0; try 1000");
        }
        if rule.hysteresis == 0 {
            self.problem("fp16.hysteresis", "is 0; try 2");
        }
        if rule.min_loss_scale <= 0.0 {
            self.problem("fp16.min_loss_scale", format!("is {}; try 1", rule.min_loss_scale));
        }
    }
}

/// The keys of the loss scale, the constant one first.
const SCALE_KEYS: [&str; 6] = [
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
];
