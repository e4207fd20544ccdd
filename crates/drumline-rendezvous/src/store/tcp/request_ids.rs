//! The ids of a client's requests: the next one, and the oldest one that has no reply yet.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(super) struct RequestIds(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    open: BTreeSet<u64>,
}

/// A pending request; it is answered or given up when this is dropped.
#[derive(Debug)]
pub(super) struct PendingRequest<'a> {
    pub(super) id: u64,
    ids: &'a RequestIds,
}

impl RequestIds {
    /// The id of the next request.
    pub(super) fn next(&self) -> PendingRequest<'_> {
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        state.open.insert(id);
        PendingRequest { id, ids: self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PendingRequest<'_> {
    /// The oldest pending request of the client: this one or an earlier one.
    pub(super) fn oldest(&self) -> u64 {
        self.ids.state().open.first().copied().unwrap_or(self.id)
    }
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.ids.state().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_the_first_that_is_still_pending() {
        let ids = RequestIds::default();
        let (one, two, three) = (ids.next(), ids.next(), ids.next());
        assert_eq!([one.id, two.id, three.id], [1, 2, 3]);
        drop(two);
        assert_eq!(three.oldest(), 1);
        drop(one);
        assert_eq!((three.oldest(), ids.next().id), (3, 4));
    }
}
