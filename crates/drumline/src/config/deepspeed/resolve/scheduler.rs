//! The learning rate schedule by its name, with its parameters.

use serde_json::{Map, Value as Json};

use super::Resolver;
use crate::config::deepspeed::asked::Asked;
use crate::config::deepspeed::given::{Argument, StepCounts, WarmupLength};
use crate::config::deepspeed::plan::{OptimizerPlan, SchedulerPlan};

const TYPE: &str = "scheduler.type";
const TOTAL: &str = "scheduler.params.total_num_steps";
const WARMUP: &str = "scheduler.params.warmup_num_steps";
const MAX_LR: &str = "scheduler.params.warmup_max_lr";
const MIN_LR: &str = "scheduler.params.warmup_min_lr";

/// A schedule of DeepSpeed.
struct Known {
    name: &'static str,
    /// Its parameters, without the step counts.
    params: &'static [&'static str],
    has_total: bool,
    has_warmup: bool,
}

const KNOWN: [Known; 5] = [
    Known {
        name: "WarmupLR",
        params: &["warmup_min_lr", "warmup_max_lr", "warmup_type"],
        has_total: false,
        has_warmup: true,
    },
    Known {
        name: "WarmupDecayLR",
        params: &["warmup_min_lr", "warmup_max_lr", "warmup_type"],
        has_total: true,
        has_warmup: true,
    },
    Known {
        name: "WarmupCosineLR",
        params: &["warmup_min_ratio", "cos_min_ratio", "warmup_type"],
        has_total: true,
        has_warmup: true,
    },
    Known {
        name: "LRRangeTest",
        params: &[
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ],
        has_total: false,
        has_warmup: false,
    },
    Known {
        name: "OneCycle",
        params: &[
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
        ],
        has_total: false,
        has_warmup: false,
    },
];

/// Parameters that have neither a default nor anything from which they follow.
const REQUIRED: [&str; 2] = ["cycle_min_lr", "cycle_max_lr"];

impl Resolver<'_> {
    /// The schedule. `optimizer`: that of the file, if it has one.
    pub(super) fn scheduler(&mut self, optimizer: Option<&OptimizerPlan>) -> Option<SchedulerPlan> {
        let name = match self.config.text(TYPE).value() {
            Some(name) => name,
            None if self.config.has_section("scheduler") => {
                self.problem(TYPE, "is not given, but its parameters are; try \"WarmupLR\"");
                return None;
            }
            None => return None,
        };
        let Some(known) = KNOWN.iter().find(|known| known.name == name) else {
            let names = KNOWN.map(|known| known.name).join(", ");
            self.problem(
                TYPE,
                format!("is {name}, which is not a schedule of DeepSpeed; try one of {names}"),
            );
            return None;
        };
        self.others_have_no_effect(known);
        let mut plan = SchedulerPlan {
            name,
            params: self.own_params(known, optimizer),
            total_waits: false,
            warmup_waits: None,
        };
        if known.has_total {
            self.total(&mut plan);
        }
        if known.has_warmup {
            self.warmup(&mut plan);
        }
        if known.name == "OneCycle" {
            self.check_one_cycle(optimizer);
        }
        self.check_policy(&plan);
        Some(plan)
    }

    /// The parameters that are written, and those whose `"auto"` needs no step count.
    fn own_params(&mut self, known: &Known, optimizer: Option<&OptimizerPlan>) -> Map<String, Json> {
        let mut params = Map::new();
        for name in known.params {
            let path = format!("scheduler.params.{name}");
            match self.config.asked(&path, as_json) {
                Asked::This(value) => {
                    params.insert((*name).to_owned(), value);
                }
                Asked::Auto if REQUIRED.contains(name) => self.nothing_given(&path),
                Asked::Auto | Asked::Nothing => {}
            }
        }
        if known.params.contains(&"warmup_max_lr") {
            let given = self.given.lr.as_ref().map(|lr| lr.value);
            let lr = optimizer.map(OptimizerPlan::lr).or(given);
            match (self.config.number(MAX_LR), lr) {
                (Asked::Auto, Some(lr)) => {
                    self.became(MAX_LR, lr, "the optimizer's learning rate");
                    params.insert("warmup_max_lr".into(), lr.into());
                }
                (Asked::Auto, None) => self.nothing_given(MAX_LR),
                _ => {}
            }
            if self.config.number(MIN_LR).is_auto() {
                let lr = self.by_default(MIN_LR, 0.0);
                params.insert("warmup_min_lr".into(), lr.into());
            }
        }
        params
    }

    fn total(&mut self, plan: &mut SchedulerPlan) {
        let asked = self.config.whole(TOTAL);
        let argument = match &self.given.steps {
            StepCounts::Total(total) => Some(total.clone()),
            StepCounts::Unknown | StepCounts::AtStart => None,
        };
        match self.filled(TOTAL, asked, argument.as_ref()) {
            Some(total) => {
                plan.params.insert("total_num_steps".into(), total.into());
            }
            None if self.given.steps == StepCounts::AtStart => {
                plan.total_waits = true;
                if asked.is_auto() {
                    self.became(TOTAL, "all steps", "the length of the training");
                }
            }
            None if asked.is_auto() => self.nothing_given(TOTAL),
            None => self.problem(TOTAL, format!("is not given, and {} needs it; try \"auto\"", plan.name)),
        }
    }

    fn warmup(&mut self, plan: &mut SchedulerPlan) {
        let asked = self.config.whole(WARMUP);
        let argument = self.given.warmup.as_ref();
        let steps = match (asked, argument) {
            (Asked::This(steps), argument) => {
                let of_steps = argument.and_then(in_steps);
                self.compare(WARMUP, &steps, of_steps.as_ref());
                steps
            }
            (Asked::Auto, Some(Argument { value: WarmupLength::Steps(steps), name, .. })) => {
                self.became(WARMUP, (*steps).max(1), name);
                *steps
            }
            (Asked::Auto, Some(Argument { value: WarmupLength::Fraction(fraction), name, .. })) => {
                return self.fraction(plan, *fraction, name);
            }
            (Asked::Auto, None) => return self.nothing_given(WARMUP),
            (Asked::Nothing, _) => return,
        };
        plan.params.insert("warmup_num_steps".into(), steps.max(1).into());
    }

    fn fraction(&mut self, plan: &mut SchedulerPlan, fraction: f64, name: &str) {
        match &self.given.steps {
            StepCounts::Total(total) => {
                let steps = ((fraction * total.value as f64).ceil() as u64).max(1);
                self.became(WARMUP, steps, format!("{name}, {fraction} of {} steps", total.value));
                plan.params.insert("warmup_num_steps".into(), steps.into());
            }
            StepCounts::AtStart => {
                self.became(WARMUP, WarmupLength::Fraction(fraction), name);
                plan.warmup_waits = Some(fraction);
            }
            StepCounts::Unknown => self.nothing_given(WARMUP),
        }
    }

    /// Optimizers without betas keep their momentum, as in DeepSpeed.
    fn check_one_cycle(&mut self, optimizer: Option<&OptimizerPlan>) {
        const KEYS: [&str; 4] = ["cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"];
        let Some(optimizer) = optimizer.filter(|optimizer| !optimizer.has_betas()) else { return };
        for key in KEYS {
            let why = format!("{} has no betas, which alone are cycled", optimizer.name());
            self.inactive(&format!("scheduler.params.{key}"), &why);
        }
    }

    /// Reports a parameter that is missing or cannot be used, with 1000 for step counts that wait.
    fn check_policy(&mut self, plan: &SchedulerPlan) {
        let is_new = !self.problems.iter().any(|problem| problem.key.starts_with("scheduler."));
        let policy = plan.policy(Some(1000));
        if !is_new {
            return;
        }
        let checked = policy.map_err(|error| error.to_string()).and_then(|policy| {
            let schedule = crate::schedule::LrSchedule::new(0.0, policy);
            schedule.map(drop).map_err(|error| error.to_string())
        });
        if let Err(cause) = checked {
            self.problem(TYPE, format!("is {}, and cannot be made: {cause}", plan.name));
        }
    }

    fn others_have_no_effect(&mut self, known: &Known) {
        let own = |name: &str| {
            name == "last_batch_iteration"
                || known.params.contains(&name)
                || (known.has_total && name == "total_num_steps")
                || (known.has_warmup && name == "warmup_num_steps")
        };
        let keys = self.config.settings().iter().filter_map(|setting| setting.key());
        let is_param = |path: &str| path.starts_with("scheduler.params.");
        let others: Vec<_> = keys.filter(|key| is_param(key.path) && !own(key.name())).collect();
        for key in others {
            self.inactive(key.path, &format!("{} has no such parameter", known.name));
        }
    }
}

/// A warm-up that was given as a number of steps.
fn in_steps(argument: &Argument<WarmupLength>) -> Option<Argument<u64>> {
    let WarmupLength::Steps(value) = argument.value else { return None };
    Some(Argument { value, name: argument.name.clone(), is_default: argument.is_default })
}

/// A parameter as JSON, whole numbers without a point.
fn as_json(value: &crate::config::json::Value) -> Option<Json> {
    use crate::config::deepspeed::read::{as_number, as_whole};
    use crate::config::json::Value;
    match value {
        Value::Bool(value) => Some((*value).into()),
        Value::Text(text) if as_number(value).is_none() => Some(text.as_str().into()),
        value => as_whole(value).map(Json::from).or_else(|| as_number(value).map(Json::from)),
    }
}
