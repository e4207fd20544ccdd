//! Communication hooks of [`Ddp`](crate::Ddp) that send fewer bytes.
//!
//! ```text
//!   bucket ─▶ Compressed     16 bits each                        half the bytes
//!          ─▶ PowerSgd       two thin matrices for each wide one rank · (n + m) for n · m
//!          ─▶ PostLocalSgd   only inside a subgroup              nothing between subgroups; see `averaging.rs`
//! ```
//! The guide is `docs/ddp-hooks.md`.

mod compress;
mod local_sgd;
mod normal;
mod orthogonal;
mod power_sgd;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use compress::Compressed;
pub use local_sgd::{PostLocalSgd, subgroup};
pub use power_sgd::{PowerSgd, PowerSgdOptions};

/// Counts the bytes of a hook. It is a handle: a clone still counts after [`Ddp`](crate::Ddp) has taken the hook.
#[derive(Debug, Clone, Default)]
pub struct Traffic(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    given: AtomicU64,
    reduced: AtomicU64,
}

impl Traffic {
    /// Bytes of all buckets that the hook has reduced.
    pub fn given(&self) -> u64 {
        self.0.given.load(Ordering::Relaxed)
    }

    /// Bytes that it sent to all-reduce for them.
    pub fn reduced(&self) -> u64 {
        self.0.reduced.load(Ordering::Relaxed)
    }

    fn add(&self, given: usize, reduced: usize) {
        self.0.given.fetch_add(given as u64, Ordering::Relaxed);
        self.0.reduced.fetch_add(reduced as u64, Ordering::Relaxed);
    }
}
