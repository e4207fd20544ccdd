//! Activation checkpointing, monitors, checkpoints, reports.

use super::Resolver;
use crate::config::deepspeed::plan::{ActivationPlan, CheckpointPlan, MonitorPlan, Monitors, TagValidation};
use crate::config::json::Value;

impl Resolver<'_> {
    pub(super) fn activations(&mut self) -> Option<ActivationPlan> {
        self.config.has_section("activation_checkpointing").then(|| ActivationPlan {
            is_on_cpu: self.is_on("activation_checkpointing.cpu_checkpointing"),
            num_checkpoints: self.config.whole("activation_checkpointing.number_checkpoints").value(),
        })
    }

    pub(super) fn monitors(&mut self) -> Monitors {
        Monitors { tensorboard: self.monitor("tensorboard"), csv: self.monitor("csv_monitor") }
    }

    fn monitor(&mut self, section: &'static str) -> Option<MonitorPlan> {
        let text = |key: &str| self.config.text(&format!("{section}.{key}")).value();
        let plan = self.config.has_section(section).then(|| MonitorPlan {
            is_enabled: self.is_on(&format!("{section}.enabled")),
            output_path: text("output_path").filter(|path| !path.is_empty()).map(Into::into),
            job_name: text("job_name").unwrap_or_else(|| "DeepSpeedJobName".to_owned()),
        })?;
        if !plan.is_enabled {
            for key in ["output_path", "job_name"] {
                self.inactive(&format!("{section}.{key}"), "it is not enabled");
            }
        }
        Some(plan)
    }

    pub(super) fn checkpoint(&mut self) -> CheckpointPlan {
        let tag = self.config.text("checkpoint.tag_validation").value().unwrap_or_default();
        let tag_validation = match tag.to_ascii_lowercase().as_str() {
            "ignore" => TagValidation::Ignore,
            "fail" => TagValidation::Fail,
            _ => TagValidation::Warn,
        };
        CheckpointPlan { tag_validation }
    }

    /// Steps between reports. `Infinity` is never, as 0.
    pub(super) fn steps_per_print(&mut self) -> Option<u64> {
        const KEY: &str = "steps_per_print";
        let is_infinite = |value: &Value| match value {
            Value::Number(number) => number.value.is_infinite(),
            Value::Text(text) => text == "Infinity" || text == "inf",
            _ => false,
        };
        let is_never = self.config.setting(KEY).is_some_and(|setting| is_infinite(&setting.value));
        if is_never { Some(0) } else { self.config.whole(KEY).value() }
    }
}
