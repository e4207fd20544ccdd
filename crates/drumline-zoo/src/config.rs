//! The configuration of a run, read from YAML and `KEY VALUE` pairs.
//!
//! ```text
//!   a task's defaults ◀─ file (file.rs) ◀─ KEY VALUE … ─▶ table of keys (table.rs), checked ─▶ run ─▶ OUT_DIR/CFG_DEST
//!   ds_config.json ────────┘ (deepspeed.rs)
//!               the type of a key parses its value (setting.rs)                            └─ can be loaded again
//! ```
//!
//! `shared.rs` has the sections that all tasks share; each task's folder has its own. An unknown key or a value of the
//! wrong type is an error that names the file and line, and suggests the key that was probably meant.

pub(crate) mod check;
pub(crate) mod deepspeed;
mod error;
pub(crate) mod file;
mod fp16;
mod method;
mod near_file;
mod nearest;
mod parallel;
mod scheduler;
pub(crate) mod section;
pub(crate) mod setting;
pub(crate) mod shared;
pub(crate) mod table;
mod value;

pub(crate) use deepspeed::DeepSpeedFile;
pub use error::{ConfigError, Place};
pub use fp16::Fp16;
pub use method::Method;
pub(crate) use method::check_amsgrad_of;
pub(crate) use parallel::{Cuts, Heads};
pub use parallel::{Parallel, ReduceIn};
pub(crate) use scheduler::{NamedSchedule, check_scheduler};
pub(crate) use section::Entry;
pub use setting::{
    AfterWarmup, DataKind, DeviceKind, LrPolicy, MasterWeightsKind, MemoryFormat, MomentsKind, OptimizerName,
    PrecisionKind, Switch,
};
pub(crate) use shared::TaskConfig;
pub use shared::{Optim, Run, SharedKeys, Test, Train, WarmupOptim};
pub(crate) use value::Value;

/// A value for a key, and where it was given.
#[derive(Debug)]
struct Given {
    key: String,
    value: Value,
    place: Place,
}

impl Given {
    /// The value as the user wrote it, without unnecessary quotes.
    fn as_typed(&self) -> String {
        match &self.value {
            Value::Text(text) => text.clone(),
            other => other.to_string(),
        }
    }
}
