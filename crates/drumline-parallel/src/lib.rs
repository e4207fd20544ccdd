//! The ways of data parallelism.
//!
//! - `sync_batch_norm`, `sync_group`: batch normalisation over the batch of all ranks

#![forbid(unsafe_code)]

mod sync_batch_norm;
mod sync_group;

pub use sync_batch_norm::SyncBatchNorm;
pub use sync_group::{SyncCall, SyncGroup};
