//! Old names of keys, and keys that people write where DeepSpeed does not have them.

use crate::config::json::Value;

/// Old names, and the names that they have now.
const RENAMED: [(&str, &str); 8] = [
    ("bfloat16", "bf16"),
    ("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"),
    ("zero_optimization.cpu_offload_params", "zero_optimization.offload_param.device"),
    ("zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device"),
    ("zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"),
    (
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    (
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    ("optimizer.params.adamw_mode", "optimizer.params.adam_w_mode"),
];

/// Keys in a section that does not have them, and why they do nothing there.
const MISPLACED: [(&str, &str); 8] = [
    ("bf16.loss_scale", "bf16 needs no loss scale"),
    ("bf16.initial_scale_power", "bf16 needs no loss scale"),
    ("bf16.loss_scale_window", "bf16 needs no loss scale"),
    ("bf16.hysteresis", "bf16 needs no loss scale"),
    ("bf16.consecutive_hysteresis", "bf16 needs no loss scale"),
    ("bf16.min_loss_scale", "bf16 needs no loss scale"),
    ("bf16.auto_cast", "inputs are always cast"),
    ("zero_allow_untested_optimiser", "the name is zero_allow_untested_optimizer"),
];

/// A key under its present name.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Renamed {
    pub(super) path: String,
    /// The value that the old one stands for, if it is written in another way.
    pub(super) value: Option<Value>,
}

/// The present name of an old key, or `None` if it has always had its name.
pub(super) fn renamed(path: &str, value: &Value) -> Option<Renamed> {
    if path == "zero_optimization"
        && let Value::Bool(is_on) = value
    {
        let stage = Value::Text(if *is_on { "1" } else { "0" }.to_owned());
        return Some(Renamed { path: "zero_optimization.stage".to_owned(), value: Some(stage) });
    }
    let (_, now) = RENAMED.iter().find(|(old, _)| *old == path)?;
    let device = match value {
        Value::Bool(is_on) if now.ends_with(".device") => {
            Some(Value::Text(if *is_on { "cpu" } else { "none" }.to_owned()))
        }
        _ => None,
    };
    Some(Renamed { path: (*now).to_owned(), value: device })
}

/// Why a key does nothing in this section.
pub(super) fn misplaced(path: &str) -> Option<&'static str> {
    MISPLACED.iter().find(|(known, _)| *known == path).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::deepspeed::keys;

    #[test]
    fn old_names_lead_to_keys_or_sections_that_exist() {
        for (old, now) in RENAMED {
            assert!(keys::find(now).is_some() || keys::is_section(now), "{old}: {now}");
        }
        for (misplaced, _) in MISPLACED {
            assert!(keys::find(misplaced).is_none(), "{misplaced} is a key");
        }
    }

    #[test]
    fn values_of_old_keys_are_translated() {
        let of = |path: &str, value: Value| renamed(path, &value).unwrap();
        let stage = of("zero_optimization", Value::Bool(true));
        assert_eq!(
            (stage.path.as_str(), stage.value),
            ("zero_optimization.stage", Some(Value::Text("1".into())))
        );
        let device = of("zero_optimization.cpu_offload", Value::Bool(false));
        assert_eq!(device.value, Some(Value::Text("none".into())));
        assert_eq!(of("bfloat16", Value::Null).value, None);
        assert!(renamed("zero_optimization", &Value::Null).is_none());
    }
}
