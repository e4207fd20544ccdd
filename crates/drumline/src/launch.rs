//! Starting ranks, and ending them.
//!
//! - [`spawn()`](crate::spawn) and [`Spawn`]: runs this program again, once for each rank
//! - [`init_logging`](crate::init_logging), [`main_first`](crate::main_first): log lines of rank 0, and work that rank
//!   0 does first
//! - [`StopRequest`](crate::StopRequest): SIGTERM means "save a checkpoint, then stop"
//! - [`exit_code`](crate::exit_code): shows an error once, and records it for the launcher's report
//! - [`Faults`]: failures on purpose, to test recovery

pub(crate) mod ending;
pub(crate) mod logging;
pub(crate) mod main_first;
pub(crate) mod spawn;
pub(crate) mod stop_request;

pub use drumline_launch::{Exit, Failure, FailureReport, LaunchError, Output, Signal, signal_name};
pub use drumline_rendezvous::error_file::{install_panic_file, record_error};
pub use drumline_rendezvous::fault::{FaultError, Faults, LinkFault};
pub use logging::LoggingError;
pub use main_first::MainFirstError;
pub use spawn::{LaunchedError, Outcome, Spawn, WorkerEnvError, WorkerError, is_spawned};
