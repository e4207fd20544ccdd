//! Something to look at while a job runs, and after it: what reads and shows the files of a run's folder.
//!
//! | module | what it is |
//! |---|---|
//! | [`page`] | `drumline watch`: a page on loopback with curves, ranks and the log's tail |
//! | [`fake`] | a run that is none: writes the files as a job would, for tests and trials |
#![forbid(unsafe_code)]

pub mod fake;
pub mod page;
