//! A training over two hosts, for commands that disturb it and compare what it computes.
//!
//! ```text
//!   Programs ─▶ Recipe (data, key, words of the command line) ─┐
//!   Launcher (by hand, fixed, elastic) ────────────────────────┴▶ TrainingRun on `Hosts` ─▶ steps, logs, weights, leftovers
//! ```
//!
//! The hosts are network namespaces (`rank_test::netns`). Every rank has one thread: the bits of a step do not depend
//! on the machine's load. Not here: what is done to a run (`outages`, `soak`).

mod launcher;
mod losses;
mod recipe;
mod run;

pub(crate) use launcher::Launcher;
pub(crate) use losses::Losses;
pub(crate) use recipe::{Programs, Recipe, Size};
pub(crate) use run::{How, NodeEnd, Start, TrainingRun};
