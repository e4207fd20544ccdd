//! Work that ranks take piece by piece, so that who is quick does more and nobody waits.

use std::fmt;
use std::sync::Arc;

use drumline_rendezvous::{Member, Store, StoreError};

/// More than any queue has pieces.
const CLOSED: i64 = 1 << 48;

/// Pieces of work, numbered from 0, each given to one rank: the one that asks first. For pieces that take unequal time, as where sentences are translated; put
/// the longest first. What a rank makes of its pieces is its own until it is gathered.
///
/// ```no_run
/// use drumline::{GroupOptions, ProcessGroup, WorkQueue};
///
/// let member = drumline::from_env()?;
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
    /// A queue of `len` pieces, known by its name to all ranks; each queue of a run needs a name of its own.
    pub fn new(member: &Member, name: &str, len: usize) -> Self {
        // A run that was restarted begins anew.
        let key = format!("work/{}/{}/{name}", member.round, member.incarnation);
        Self { store: Arc::clone(&member.store), key, len }
    }

    /// The same queue with another number of pieces; the same on all ranks.
    #[must_use]
    pub fn of_len(self, len: usize) -> Self {
        Self { len, ..self }
    }

    /// The next piece, if there is one; nobody else gets it.
    pub fn take(&self) -> Result<Option<usize>, StoreError> {
        let taken = self.store.add(&self.key, 1)?;
        let piece = usize::try_from(taken - 1).unwrap_or(usize::MAX);
        Ok(Some(piece).filter(|piece| *piece < self.len))
    }

    /// Nobody gets a further piece: for a rank that cannot go on, so that the others do not work for nothing before they hear of it.
    pub fn close(&self) -> Result<(), StoreError> {
        self.store.add(&self.key, CLOSED).map(drop)
    }

    /// How many pieces there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to do at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue").field("key", &self.key).field("len", &self.len).finish_non_exhaustive()
    }
}
