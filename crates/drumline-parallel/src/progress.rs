//! Which gradients of a step are ready, and which buckets can be sent. Buckets are sent in the agreed order on all
//! ranks; otherwise ranks would wait for each other forever.

use std::ops::Range;

/// The progress of one step. Pure: returns which buckets to send, and sends nothing.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// For each bucket, how many of its gradients are missing.
    missing: Vec<usize>,
    /// The next bucket to send.
    next: usize,
    is_ready: Vec<bool>,
    /// Parameters in the order in which their gradients became ready.
    order: Vec<usize>,
}

impl Progress {
    /// A new step. `bucket_of` has the bucket of each parameter; buckets are counted in the order of sending.
    pub(crate) fn begin(&mut self, bucket_of: &[usize]) {
        self.missing.clear();
        self.missing.resize(bucket_of.iter().max().map_or(0, |last| last + 1), 0);
        bucket_of.iter().for_each(|&bucket| self.missing[bucket] += 1);
        self.is_ready.clear();
        self.is_ready.resize(bucket_of.len(), false);
        self.next = 0;
        self.order.clear();
    }

    /// The gradient of `param` is ready. Returns the buckets to send now; `None` if it was ready before, because its
    /// bucket may have been sent already.
    pub(crate) fn ready(&mut self, param: usize, bucket_of: &[usize]) -> Option<Range<usize>> {
        let from = self.next;
        if std::mem::replace(&mut self.is_ready[param], true) {
            return None;
        }
        self.order.push(param);
        self.missing[bucket_of[param]] -= 1;
        while self.missing.get(self.next) == Some(&0) {
            self.next += 1;
        }
        Some(from..self.next)
    }

    /// Whether the gradient of `param` is ready.
    pub(crate) fn is_ready(&self, param: usize) -> bool {
        self.is_ready[param]
    }

    /// All parameters in the order in which their gradients became ready. Those without a gradient follow in their old
    /// order.
    pub(crate) fn order(&self, before: &[usize]) -> Vec<usize> {
        let late = before.iter().copied().filter(|param| !self.is_ready[*param]);
        self.order.iter().copied().chain(late).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four parameters, a bucket each, sent in the order 3, 2, 1, 0.
    const BUCKET_OF: [usize; 4] = [3, 2, 1, 0];

    #[test]
    fn buckets_are_sent_in_the_agreed_order() {
        let mut progress = Progress::default();
        progress.begin(&BUCKET_OF);
        assert_eq!(progress.ready(1, &BUCKET_OF), Some(0..0));
        assert_eq!(progress.ready(3, &BUCKET_OF), Some(0..1));
        assert_eq!(progress.ready(3, &BUCKET_OF), None, "its bucket was sent without the second");
        assert_eq!(progress.ready(2, &BUCKET_OF), Some(1..3));
        assert_eq!(progress.order(&[3, 2, 1, 0]), [1, 3, 2, 0]);
        assert!(!progress.is_ready(0));
        assert_eq!(progress.ready(0, &BUCKET_OF), Some(3..4));
        progress.begin(&BUCKET_OF);
        assert_eq!(progress.ready(3, &BUCKET_OF), Some(0..1), "a new step starts over");
        assert_eq!(progress.order(&[0, 1, 2, 3]), [3, 0, 1, 2]);
    }
}
