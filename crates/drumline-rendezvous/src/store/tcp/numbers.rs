//! The numbers of a client's requests: the next one, and the oldest one that has no reply yet.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(super) struct Numbers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: u64,
    open: BTreeSet<u64>,
}

/// A pending request; it is answered or given up when this is dropped.
#[derive(Debug)]
pub(super) struct Number<'a> {
    pub(super) id: u64,
    numbers: &'a Numbers,
}

impl Numbers {
    /// The number of the next request.
    pub(super) fn next(&self) -> Number<'_> {
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        state.open.insert(id);
        Number { id, numbers: self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Number<'_> {
    /// The oldest pending request of the client: this one or an earlier one.
    pub(super) fn oldest(&self) -> u64 {
        self.numbers.state().open.first().copied().unwrap_or(self.id)
    }
}

impl Drop for Number<'_> {
    fn drop(&mut self) {
        self.numbers.state().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_the_first_that_is_still_pending() {
        let numbers = Numbers::default();
        let (one, two, three) = (numbers.next(), numbers.next(), numbers.next());
        assert_eq!([one.id, two.id, three.id], [1, 2, 3]);
        drop(two);
        assert_eq!(three.oldest(), 1);
        drop(one);
        assert_eq!((three.oldest(), numbers.next().id), (3, 4));
    }
}
