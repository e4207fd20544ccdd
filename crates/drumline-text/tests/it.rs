//! From files to a score, by the public door only.

#![allow(clippy::unwrap_used)]

#[path = "it/flow.rs"]
mod flow;
