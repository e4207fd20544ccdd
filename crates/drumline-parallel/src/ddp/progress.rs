//! Which gradients of a step are ready, and which buckets can be sent. Buckets are sent in the agreed order on all
//! ranks; otherwise ranks would wait for each other forever.

use std::ops::Range;

use crate::layout::Layout;

/// The progress of one step. Pure: returns which buckets to send, and sends nothing.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// For each bucket, how many of its gradients are missing.
    missing: Vec<usize>,
    /// The next bucket to send.
    next: usize,
    is_ready: Vec<bool>,
    /// Parameters in the order in which their gradients became ready.
    order: Vec<usize>,
}

impl Progress {
    /// A new step.
    pub(super) fn begin(&mut self, layout: &Layout) {
        self.missing.clear();
        self.missing.extend(layout.buckets.iter().map(|bucket| bucket.params.len()));
        self.is_ready.clear();
        self.is_ready.resize(layout.offset.len(), false);
        self.next = 0;
        self.order.clear();
    }

    /// The gradient of `param` is ready. Returns the buckets to send now; `None` if it was ready before, because its
    /// bucket may have been sent already.
    pub(super) fn ready(&mut self, param: usize, layout: &Layout) -> Option<Range<usize>> {
        let from = self.next;
        if std::mem::replace(&mut self.is_ready[param], true) {
            return None;
        }
        self.order.push(param);
        self.missing[layout.bucket_of[param]] -= 1;
        while self.missing.get(self.next) == Some(&0) {
            self.next += 1;
        }
        Some(from..self.next)
    }

    /// Whether the gradient of `param` is ready.
    pub(super) fn is_ready(&self, param: usize) -> bool {
        self.is_ready[param]
    }

    /// All parameters in the order in which their gradients became ready. Those without a gradient follow in their old
    /// order.
    pub(super) fn order(&self, before: &[usize]) -> Vec<usize> {
        let late = before.iter().copied().filter(|param| !self.is_ready[*param]);
        self.order.iter().copied().chain(late).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Caps, Item};
    use tch::Kind;

    /// Four parameters, a bucket each, sent in the order 3, 2, 1, 0.
    fn layout() -> Layout {
        let items = [Item { len: 16, kind: Kind::Float }; 4];
        Layout::new(&items, &[3, 2, 1, 0], Caps { first: 1, others: 1 })
    }

    #[test]
    fn buckets_are_sent_in_the_agreed_order() {
        let (layout, mut progress) = (layout(), Progress::default());
        progress.begin(&layout);
        assert_eq!(progress.ready(1, &layout), Some(0..0));
        assert_eq!(progress.ready(3, &layout), Some(0..1));
        assert_eq!(progress.ready(3, &layout), None, "its bucket was sent without the second");
        assert_eq!(progress.ready(2, &layout), Some(1..3));
        assert_eq!(progress.order(&[3, 2, 1, 0]), [1, 3, 2, 0]);
        assert!(!progress.is_ready(0));
        assert_eq!(progress.ready(0, &layout), Some(3..4));
        progress.begin(&layout);
        assert_eq!(progress.ready(3, &layout), Some(0..1), "a new step starts over");
        assert_eq!(progress.order(&[0, 1, 2, 3]), [3, 0, 1, 2]);
    }
}
