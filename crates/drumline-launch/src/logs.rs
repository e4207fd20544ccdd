//! Where the workers' output goes: files, the console, both or neither.
//!
//! ```text
//!   LogPlan: settings ─▶ LogFolder: one per run ─▶ AttemptLogs: one per start of the workers ─▶ Sink: one per stream
//!
//!   pump ─bytes─▶ Sink ─┬▶ stdout.log, unchanged
//!                       ├▶ Lines ─▶ Console; bars ─▶ its Region on a terminal, Paced elsewhere
//!                       └▶ Lines that contain a filter's text ─▶ filtered_stdout.log, shared by all workers
//! ```
//!
//! A file gets exactly the bytes that the worker wrote. The console gets whole lines behind a prefix. On a terminal,
//! nothing in them can move the cursor or control the terminal.

mod bars;
mod console;
mod consoles;
mod folder;
mod plan;
mod prefix;
mod region;
mod sink;
mod visible;

pub(crate) use consoles::Consoles;
pub use folder::{AttemptLogs, LogError, LogFolder};
pub(crate) use plan::Channel;
pub use plan::{Bars, LineFilters, LogPlan, Std, StdOf, StdOfError};
pub(crate) use sink::Sink;
pub(crate) use visible::visible;
