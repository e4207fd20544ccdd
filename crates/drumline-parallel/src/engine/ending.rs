//! When an evaluation ends early, by an agreement of ranks that must make the same forwards.
//!
//! ```text
//!   rank 0   forward ─ agree: no ─ forward ─ asks ─ agree: yes ─ ends      a rank that asked and went away by itself would
//!   rank 1   forward ─ agree: no ─ forward ──────── agree: yes ─ ends      leave the others waiting in the next forward
//! ```
//! Not here: which ranks wait for each other (`model_parts`, `shard`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drumline_comm::{ProcessGroup, ReduceOp, on_behalf_of};

use super::Result;
use crate::reduction::Site;

/// Whether this rank asks for the end; after an agreement, whether any rank does. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending(Arc<AtomicBool>);

impl Ending {
    /// An evaluation begins.
    pub(crate) fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Asks for the end.
    pub(crate) fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether a rank of these groups asks for it. If there are several groups, the ranks are all of their mesh.
    pub(crate) fn agree<'g>(
        &self,
        groups: impl IntoIterator<Item = &'g ProcessGroup>,
        site: Site,
    ) -> Result<bool> {
        let mut is_asked = [u8::from(self.0.load(Ordering::Relaxed))];
        for group in groups {
            on_behalf_of(site, || group.all_reduce(&mut is_asked, ReduceOp::Max))?;
        }
        self.0.store(is_asked[0] > 0, Ordering::Relaxed);
        Ok(is_asked[0] > 0)
    }
}
