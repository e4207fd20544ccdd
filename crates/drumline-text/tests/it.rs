//! From files to a score, through the public API only.

#![allow(clippy::unwrap_used)]

#[path = "it/flow.rs"]
mod flow;
