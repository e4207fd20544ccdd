//! Starting agents on other hosts, as DeepSpeed does, and leading them to the job's end.
//!
//! ```text
//!   LaunchPlan + Site ─commands.rs─▶ a command for each host ─leader.rs─▶ ssh | srun | mpirun, or the program itself
//!                                                                          │ stdin: order, key, signals; its end = end
//!   this terminal ◀──────────── whole lines, exit code ◀───────────────────┘
//!
//!   on the host: `drumline on-host` reads its order (`order.rs`) and becomes `drumline run --led …` (`led`)
//! ```
//! Promises: the key and the variables never stand on a command line; the death of the leader, even by SIGKILL, is seen
//! by every agent as the end of its stdin; a host that cannot be reached is named, and the others are stopped; every
//! wait has an end.

mod agent_args;
#[cfg(test)]
mod command_table;
mod commands;
mod exported;
mod leader;
mod order;
mod outcome;

pub use commands::{HostCommand, Site};
pub use exported::{EnvFileError, is_exported, parse_env_file};
pub use leader::{Leader, LeaderError, LeaderHandle};
pub use order::{Order, OrderError};
pub use outcome::{FleetEnd, HostProblem};
