//! Injected faults: broken connections and delayed data. Each fabric of the process applies them when it next sends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use drumline_rendezvous::fault::LinkFault;

/// All faults that were injected into the process so far.
#[derive(Debug, Default)]
pub(crate) struct LinkFaults {
    count: AtomicUsize,
    all: Mutex<Vec<LinkFault>>,
}

/// The faults that one fabric has applied.
#[derive(Debug, Default)]
pub(super) struct AppliedFaults {
    seen: usize,
    /// By rank of the job.
    delays: HashMap<usize, Duration>,
}

impl LinkFaults {
    pub(crate) fn add(&self, fault: LinkFault) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(fault);
        self.count.store(all.len(), Ordering::Release);
    }
}

impl AppliedFaults {
    /// Adds what is new, and returns the ranks whose connections are to be broken. Costs one load if there is nothing new.
    pub(super) fn catch_up(&mut self, faults: &LinkFaults) -> Vec<usize> {
        if faults.count.load(Ordering::Acquire) == self.seen {
            return Vec::new();
        }
        let all = faults.all.lock().unwrap_or_else(PoisonError::into_inner);
        let mut dropped = Vec::new();
        for fault in &all[self.seen..] {
            match *fault {
                LinkFault::Drop(peer) => dropped.push(peer),
                LinkFault::Delay { peer, by } => drop(self.delays.insert(peer, by)),
            }
        }
        self.seen = all.len();
        dropped
    }

    /// Waits as long as data for this rank of the job is delayed.
    pub(super) fn delay(&self, peer: usize) {
        if let Some(by) = self.delays.get(&peer) {
            std::thread::sleep(*by);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fabric_applies_each_fault_once() {
        let faults = LinkFaults::default();
        let (mut one, mut other) = (AppliedFaults::default(), AppliedFaults::default());
        assert!(one.catch_up(&faults).is_empty());
        faults.add(LinkFault::Drop(3));
        assert_eq!(one.catch_up(&faults), [3]);
        faults.add(LinkFault::Delay { peer: 1, by: Duration::from_millis(30) });
        faults.add(LinkFault::Drop(2));
        assert_eq!((one.catch_up(&faults), other.catch_up(&faults)), (vec![2], vec![3, 2]));
        assert!(one.catch_up(&faults).is_empty());
        let begin = std::time::Instant::now();
        one.delay(0);
        assert!(begin.elapsed() < Duration::from_millis(25), "no other rank is delayed");
        one.delay(1);
        assert!(begin.elapsed() >= Duration::from_millis(30));
    }
}
