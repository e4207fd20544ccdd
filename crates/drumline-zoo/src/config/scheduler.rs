//! `OPTIM.SCHEDULER`: a learning rate schedule by its name in DeepSpeed or PyTorch, `{type: WarmupLR, params: {…}}`.
//!
//! `total_num_steps: auto` is the length of the training, and `warmup_num_steps` below 1 a fraction of it.

use std::cell::OnceCell;

use drumline::config::deepspeed::SchedulerPlan;
use drumline::config::json;
use drumline::schedule::{At, LrSchedule, Schedule, ScheduleError};
use serde_json::{Map, Value as Json, json};

use super::check::invalid;
use super::error::ConfigError;
use super::setting::Setting;
use super::value::Value;

const KEY: &str = "OPTIM.SCHEDULER";
const TOTAL: &str = "total_num_steps";
const WARMUP: &str = "warmup_num_steps";

impl Setting for SchedulerPlan {
    fn expects() -> String {
        "{type: NAME, params: {…}}".into()
    }

    fn schema() -> Json {
        json!({
            "type": "object",
            "properties": {"type": {"type": "string"}, "params": {"type": "object"}},
            "required": ["type"],
            "additionalProperties": false,
        })
    }

    fn read(value: &Value) -> Option<Self> {
        let json = match value {
            Value::Text(text) => serde_json::from_str(&json::parse(text).ok()?.value.to_string()).ok()?,
            value => value.to_json(),
        };
        let Json::Object(mut map) = json else { return None };
        let name = map.remove("type")?.as_str()?.to_owned();
        let params = match map.remove("params") {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(params)) => params,
            Some(_) => return None,
        };
        map.is_empty().then(|| of_params(name, params))
    }

    fn write(&self) -> Value {
        let Self { name, params, total_waits, warmup_waits } = self;
        let mut params = params.clone();
        if *total_waits {
            params.insert(TOTAL.into(), "auto".into());
        }
        if let Some(fraction) = warmup_waits {
            params.insert(WARMUP.into(), (*fraction).into());
        }
        Value::section([
            ("type", Value::Text(name.clone())),
            ("params", Value::from_json(&Json::Object(params))),
        ])
    }
}

fn of_params(name: String, mut params: Map<String, Json>) -> SchedulerPlan {
    let total_waits = params.get(TOTAL).is_some_and(|total| *total == "auto");
    let warmup = params.get(WARMUP).and_then(Json::as_f64);
    let warmup_waits = warmup.filter(|steps| (0.0..1.0).contains(steps));
    if total_waits {
        params.remove(TOTAL);
    }
    if warmup_waits.is_some() {
        params.remove(WARMUP);
    }
    SchedulerPlan { name, params, total_waits, warmup_waits }
}

/// Returns an error for a schedule that does not exist, or whose parameters cannot be used.
pub(crate) fn check_scheduler(key: &'static str, plan: Option<&SchedulerPlan>) -> Result<(), ConfigError> {
    match plan.map(|plan| made(plan, Some(1000), 0.0)).transpose() {
        Ok(_) => Ok(()),
        Err(error) => {
            invalid(key, format!("cannot be used: {}; try the names and keys of DeepSpeed", error.what))
        }
    }
}

fn made(plan: &SchedulerPlan, total: Option<u64>, base_lr: f64) -> Result<LrSchedule, ScheduleError> {
    let policy = plan.policy(total);
    let policy = policy.map_err(|error| ScheduleError { policy: KEY, what: error.to_string() })?;
    LrSchedule::new(base_lr, policy)
}

/// The schedule of `OPTIM.SCHEDULER`, which is made when the number of steps is known.
#[derive(Debug)]
pub(crate) struct NamedSchedule {
    plan: SchedulerPlan,
    made: OnceCell<Option<LrSchedule>>,
}

impl NamedSchedule {
    pub(crate) fn new(plan: SchedulerPlan) -> Self {
        Self { plan, made: OnceCell::new() }
    }

    fn made(&self, at: At) -> Option<&LrSchedule> {
        self.made.get_or_init(|| made(&self.plan, at.total_steps, at.base_lr).ok()).as_ref()
    }
}

impl Schedule for NamedSchedule {
    fn lr(&self, at: At) -> f64 {
        self.made(at).map_or(at.base_lr, |schedule| schedule.lr(at))
    }

    fn betas(&self, at: At) -> Option<(f64, f64)> {
        self.made(at)?.betas(at)
    }

    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        made(&self.plan, total_steps, 0.0).map(|_| None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::ImageConfig;

    fn loaded(yaml: &str) -> Result<ImageConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        std::fs::write(&path, yaml).unwrap();
        ImageConfig::load::<&str>(Some(&path), &[]).map_err(|error| error.to_string())
    }

    #[test]
    fn it_is_read_from_yaml_and_text_and_written_back() {
        let yaml = "OPTIM: {SCHEDULER: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: 0.1, warmup_max_lr: 0.5}}}";
        let config = loaded(yaml).unwrap();
        let plan = config.shared.optim.scheduler.clone().unwrap();
        assert_eq!((plan.total_waits, plan.warmup_waits), (true, Some(0.1)));
        assert_eq!(loaded(&config.to_yaml()).unwrap(), config);
        let text = "{type: 'WarmupLR', params: {warmup_num_steps: 20}}";
        let config = ImageConfig::load(None, &["OPTIM.SCHEDULER", text]).unwrap();
        assert_eq!(config.shared.optim.scheduler.as_ref().unwrap().params["warmup_num_steps"], 20);
        assert_eq!(loaded(&config.to_yaml()).unwrap(), config);
    }

    #[test]
    fn the_learning_rate_follows_from_the_number_of_steps() {
        let params = serde_json::json!({"total_num_steps": "auto", "warmup_num_steps": 0.2, "warmup_type": "linear", "warmup_max_lr": 1.0});
        let Json::Object(params) = params else { panic!("a map") };
        let schedule = NamedSchedule::new(of_params("WarmupDecayLR".into(), params));
        assert_eq!(schedule.check(Some(100)).unwrap(), None);
        assert!(schedule.check(None).unwrap_err().what.contains("is not known"));
        let at = |step| schedule.lr(At { step, total_steps: Some(100), base_lr: 1.0, ..At::default() });
        assert_eq!((at(0), at(11), at(21), at(101)), (0.0, 0.5, 1.0, 0.0));
    }

    #[test]
    fn schedules_that_do_not_exist_are_refused() {
        for (value, words) in [
            (
                "{type: CosineLR}",
                "OPTIM.SCHEDULER cannot be used: scheduler.params of CosineLR: unknown variant `CosineLR`",
            ),
            ("{type: WarmupLR, params: {warmup: 1}}", "unknown field `warmup`"),
            ("{params: {}}", "expected {type: NAME, params: {…}} or null"),
            ("3", "expected {type: NAME, params: {…}} or null"),
        ] {
            let error = ImageConfig::load(None, &["OPTIM.SCHEDULER", value]).unwrap_err().to_string();
            assert!(error.contains(words), "{value}: {error}");
        }
    }
}
