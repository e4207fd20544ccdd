//! Where the workers' output goes: what was asked for.

mod plan;

pub use plan::{LogPlan, Std, StdOf, StdOfError};
