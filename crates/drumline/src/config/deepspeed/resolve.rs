//! From a configuration and what the program was given to a plan. Mistakes are collected on the way.
//!
//! ```text
//!   batch ─▶ precision ─▶ optimizer ─▶ scheduler ─▶ zero, offload ─▶ rest ─▶ a plan, or all mistakes in one error
//! ```

mod batch;
mod filling;
mod optimizer;
mod precision;
mod rest;
mod scheduler;
mod zero;

#[cfg(test)]
mod tests;

use super::error::{DeepSpeedError, Problem};
use super::given::Given;
use super::plan::{Became, DeepSpeedPlan, Resolved};
use super::read::DeepSpeedConfig;

/// A resolution on its way.
pub(super) struct Resolver<'a> {
    config: &'a DeepSpeedConfig,
    given: &'a Given,
    autos: Vec<Became>,
    problems: Vec<Problem>,
    /// Keys that have no effect beside others, and why.
    inactive: Vec<(&'static str, String)>,
}

/// A resolution that may have failed, for explanations.
pub(super) struct Outcome {
    pub(super) plan: DeepSpeedPlan,
    pub(super) autos: Vec<Became>,
    pub(super) problems: Vec<Problem>,
    pub(super) inactive: Vec<(&'static str, String)>,
}

impl DeepSpeedConfig {
    /// What the file asks for, with each `"auto"` filled from what is given. One error names all values that cannot be
    /// used, or that contradict what is given.
    pub fn resolve(&self, given: &Given) -> Result<Resolved, DeepSpeedError> {
        let Outcome { plan, autos, problems, .. } = outcome(self, given);
        if problems.is_empty() {
            return Ok(Resolved { plan, autos });
        }
        Err(DeepSpeedError::Problems { file: self.name().to_owned(), problems })
    }
}

/// The plan as far as it can be made, and all mistakes in the order of the file.
pub(super) fn outcome(config: &DeepSpeedConfig, given: &Given) -> Outcome {
    let problems = config.settings().iter().filter_map(|setting| setting.problem(given.is_strict)).collect();
    let mut resolver = Resolver { config, given, autos: Vec::new(), problems, inactive: Vec::new() };
    let plan = resolver.plan();
    let Resolver { autos, mut problems, inactive, .. } = resolver;
    problems.sort_by_key(|problem| (problem.at.is_none(), problem.at));
    Outcome { plan, autos, problems, inactive }
}

impl Resolver<'_> {
    fn plan(&mut self) -> DeepSpeedPlan {
        let batch = self.batch();
        let precision = self.precision();
        let clip_norm = self.clip_norm();
        let optimizer = self.optimizer();
        let scheduler = self.scheduler(optimizer.as_ref());
        let zero = self.zero();
        let offload = self.offload(zero);
        let plan = DeepSpeedPlan {
            batch,
            precision,
            clip_norm,
            optimizer,
            scheduler,
            zero,
            offload,
            activations: self.activations(),
            monitors: self.monitors(),
            checkpoint: self.checkpoint(),
            reduce_in: self.reduce_in(zero),
            steps_per_print: self.steps_per_print(),
            wall_clock_breakdown: self.is_on("wall_clock_breakdown"),
            dump_state: self.is_on("dump_state"),
            drop_last: self.config.bool("dataloader_drop_last").value(),
        };
        self.fill_rest();
        plan
    }

    fn clip_norm(&mut self) -> Option<f64> {
        const KEY: &str = "gradient_clipping";
        let norm = self.filled(KEY, self.config.number(KEY), self.given.clip_norm.as_ref());
        let norm = norm.or_else(|| self.config.number(KEY).is_auto().then(|| self.by_default(KEY, 0.0)));
        if norm.is_some_and(|norm| norm < 0.0) {
            self.problem(KEY, "is negative; try 1.0, or 0 for no clipping");
        }
        norm
    }
}
