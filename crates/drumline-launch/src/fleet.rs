//! Starts agents on other hosts, as DeepSpeed does, and leads them until the job ends.
//!
//! ```text
//!   LaunchPlan + Site ─commands.rs─▶ a command for each host ─leader.rs─▶ ssh | srun | mpirun, or the program itself
//!                                                                          │ stdin: order, key, signals; EOF = stop
//!   this terminal ◀──────────── whole lines, exit code ◀───────────────────┘
//!
//!   on the host: `drumline on-host` reads its order (`order.rs`) and becomes `drumline run --led …` (`led`)
//! ```
//! Promises: the key and the environment variables never appear on a command line. When the leader dies, even by
//! SIGKILL, every agent sees the end of its stdin. An unreachable host is named in the error, and the other hosts are
//! stopped. Every wait has a time limit.

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
