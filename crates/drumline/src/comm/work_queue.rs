//! Work that ranks take piece by piece, so that fast ranks do more and no rank waits.

use std::fmt;
use std::sync::Arc;

use drumline_rendezvous::{Member, Store, StoreError};

/// Larger than the length of any queue.
const CLOSED: i64 = 1 << 48;

/// Pieces of work, numbered from 0. Each goes to the rank that asks first. Use it for pieces that take different times,
/// such as sentences to translate, and put the longest first. Each rank keeps its results until they are gathered.
///
/// ```no_run
/// use drumline::ProcessGroup;
/// use drumline::comm::{GroupOptions, WorkQueue};
///
/// let member = drumline::comm::from_env()?;
/// let queue = WorkQueue::new(&member, "files", 1000);
/// let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
/// let mut done = Vec::new();
/// while let Some(file) = queue.take()? {
///     done.push(file); // work on it
/// }
/// let all = group.gather_object(&done, 0)?;
/// # let _ = all;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct WorkQueue {
    store: Arc<dyn Store>,
    key: String,
    len: usize,
}

impl WorkQueue {
    /// A queue of `len` pieces. All ranks use the same name, and each queue of a run has a name of its own.
    pub fn new(member: &Member, name: &str, len: usize) -> Self {
        // A restarted run begins with a new queue.
        let key = format!("work/{}/{}/{name}", member.round, member.incarnation);
        Self { store: Arc::clone(&member.store), key, len }
    }

    /// Sets another number of pieces, the same on all ranks.
    #[must_use]
    pub fn of_len(self, len: usize) -> Self {
        Self { len, ..self }
    }

    /// Takes the next piece, if there is one. No other rank gets it.
    pub fn take(&self) -> Result<Option<usize>, StoreError> {
        let taken = self.store.add(&self.key, 1)?;
        let piece = usize::try_from(taken - 1).unwrap_or(usize::MAX);
        Ok(Some(piece).filter(|piece| *piece < self.len))
    }

    /// Closes the queue, so that no rank gets another piece. Call it on a rank that fails, so that the others stop
    /// early.
    pub fn close(&self) -> Result<(), StoreError> {
        self.store.add(&self.key, CLOSED).map(drop)
    }

    /// The number of pieces.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the queue has no pieces at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue").field("key", &self.key).field("len", &self.len).finish_non_exhaustive()
    }
}
