//! The flag protocol: how ranks that share memory tell each other that data is ready.
//!
//! A **round** is numbered by its **epoch**, counted from 1 over the life of the group. In round `k` a rank fills its own
//! places of parity `k & 1` (a staging buffer, and the few bytes beside the flag), **publishes** the epoch, waits until
//! every peer has published `k`, and reads the peers' places of that parity.
//!
//! ```text
//!   rank 0   fill[0] publish 2 ──wait all 2── read[0]   fill[1] publish 3 ──wait all 3── read[1]   fill[0] publish 4 …
//!   rank 1       fill[0] publish 2 ──wait── read[0]         fill[1] publish 3 …
//! ```
//!
//! Why two places are enough: a rank fills parity `k & 1` for round `k + 2` only after it has seen every peer publish
//! `k + 1`, and a peer publishes `k + 1` only after it has read everything of round `k`. So no trailing barrier is
//! needed, a small message costs one transfer of one cache line each way, and flags have a single writer.
//!
//! Sleeping: a waiter that has run out of patience raises `asleep`, looks once more, and sleeps on its `bell`; a publisher
//! looks at `asleep` some time after publishing. The fence on both sides makes it impossible that each misses the other.
//!
//! In: epochs in order. Out: happens-before from filling to reading. Not here: what is filled (`node`), patience (`wait`).
//! The types are those of loom under `--cfg loom`, where the tests below try every interleaving.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes that fit beside the flag, in its cache line.
pub(crate) const INLINE: usize = 48;

/// One flag: the epoch, what the call is, and a few bytes of data, all in one cache line.
#[repr(C, align(128))]
pub(crate) struct Line {
    epoch: AtomicU64,
    fingerprint: AtomicU64,
    words: [AtomicU64; INLINE / 8],
}

/// Where one rank sleeps.
#[repr(C, align(128))]
pub(crate) struct Bell {
    asleep: AtomicU32,
    ring: AtomicU32,
}

/// What a rank shows to its peers; it alone writes the lines.
#[repr(C)]
pub(crate) struct Flags {
    lines: [Line; 2],
    pub(crate) bell: Bell,
}

impl Flags {
    /// Publishes round `epoch`; `words` are the bytes beside the flag. Wakes nobody: see `wait::wake`.
    #[inline]
    pub(crate) fn publish(&self, epoch: u64, fingerprint: u64, words: &[u64]) {
        let line = &self.lines[(epoch & 1) as usize];
        line.fingerprint.store(fingerprint, Ordering::Relaxed);
        for (slot, &word) in line.words.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        line.epoch.store(epoch, Ordering::Release);
    }

    /// For the owner, after round `epoch`: asks for the line of the next round, which a peer read last, so that it is here
    /// when it is written.
    #[inline]
    pub(crate) fn fetch_next(&self, epoch: u64) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        super::prefetch_for_writing(&self.lines[((epoch + 1) & 1) as usize]);
        let _ = epoch;
    }

    /// Whether this rank has published round `epoch`. If so, all it wrote before is visible.
    #[inline]
    pub(crate) fn arrived(&self, epoch: u64) -> bool {
        self.lines[(epoch & 1) as usize].epoch.load(Ordering::Acquire) >= epoch
    }

    /// The fingerprint this rank published with round `epoch`; call after [`arrived`](Self::arrived).
    #[inline]
    pub(crate) fn fingerprint(&self, epoch: u64) -> u64 {
        self.lines[(epoch & 1) as usize].fingerprint.load(Ordering::Relaxed)
    }

    /// Copies the bytes beside the flag of round `epoch`; call after [`arrived`](Self::arrived).
    #[inline]
    pub(crate) fn read_words(&self, epoch: u64, into: &mut [u64]) {
        for (word, slot) in into.iter_mut().zip(&self.lines[(epoch & 1) as usize].words) {
            *word = slot.load(Ordering::Relaxed);
        }
    }
}

impl Bell {
    /// For a publisher, after it published: whether this bell's owner sleeps (or is about to) and must be woken.
    #[inline]
    pub(crate) fn wanted(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) != 0
    }

    /// Orders a publication before the look at `wanted` (and, in the sleeper, `asleep` before its last look).
    #[inline]
    pub(crate) fn order() {
        fence(Ordering::SeqCst);
    }

    /// Rings: the owner's sleep ends or does not begin. The caller then wakes the futex.
    pub(crate) fn strike(&self) {
        self.ring.fetch_add(1, Ordering::Release);
    }

    /// The word a sleeper's futex lives on.
    #[cfg(not(loom))]
    pub(crate) fn word(&self) -> &AtomicU32 {
        &self.ring
    }

    /// One try to sleep: raises the flag, looks once more, and if still not ready calls `sleep(ring, value)`, which
    /// returns at once where `ring` no longer holds `value`.
    pub(crate) fn doze(&self, ready: impl Fn() -> bool, sleep: impl FnOnce(&AtomicU32, u32)) {
        let value = self.ring.load(Ordering::Acquire);
        self.asleep.store(1, Ordering::Relaxed);
        Self::order();
        if !ready() {
            sleep(&self.ring, value);
        }
        self.asleep.store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    fn flags() -> Flags {
        let line = || Line {
            epoch: AtomicU64::new(0),
            fingerprint: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Flags { lines: [line(), line()], bell: Bell { asleep: AtomicU32::new(0), ring: AtomicU32::new(0) } }
    }

    /// What one rank owns: its flags and two staging places. loom reports any unordered access to a place.
    struct Rank {
        flags: Flags,
        places: [UnsafeCell<u64>; 2],
    }

    fn ranks(n: usize) -> Arc<Vec<Rank>> {
        Arc::new(
            (0..n)
                .map(|_| Rank { flags: flags(), places: [UnsafeCell::new(0), UnsafeCell::new(0)] })
                .collect(),
        )
    }

    fn take_part(ranks: &[Rank], me: usize, rounds: u64) {
        for epoch in 1..=rounds {
            let parity = (epoch & 1) as usize;
            // SAFETY: loom checks exactly this: that nobody reads the place while it is filled.
            ranks[me].places[parity].with_mut(|place| unsafe { *place = epoch * 10 + me as u64 });
            ranks[me].flags.publish(epoch, 7, &[epoch]);
            for (rank, peer) in ranks.iter().enumerate().filter(|(rank, _)| *rank != me) {
                spin(&peer.flags, epoch);
                // SAFETY: as above, for reading.
                let seen = peer.places[parity].with(|place| unsafe { *place });
                assert_eq!(seen, epoch * 10 + rank as u64);
                let mut words = [0];
                peer.flags.read_words(epoch, &mut words);
                assert_eq!((words, peer.flags.fingerprint(epoch)), ([epoch], 7));
            }
        }
    }

    fn spin(flags: &Flags, epoch: u64) {
        while !flags.arrived(epoch) {
            loom::thread::yield_now();
        }
    }

    #[test]
    fn loom_two_ranks_four_rounds() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let ranks = ranks(2);
            let theirs = ranks.clone();
            let other = loom::thread::spawn(move || take_part(&theirs, 1, 4));
            take_part(&ranks, 0, 4);
            other.join().unwrap();
        });
    }

    /// The control: with one place instead of two, loom must find the overwrite.
    #[test]
    #[should_panic]
    fn loom_finds_a_single_place_unsafe() {
        loom::model(|| {
            let ranks = ranks(2);
            let both = |ranks: &[Rank], me: usize| {
                for epoch in 1..=2 {
                    // SAFETY: deliberately wrong; loom panics.
                    ranks[me].places[0].with_mut(|place| unsafe { *place = epoch });
                    ranks[me].flags.publish(epoch, 7, &[]);
                    spin(&ranks[1 - me].flags, epoch);
                    // SAFETY: as above.
                    ranks[1 - me].places[0].with(|place| unsafe { *place });
                }
            };
            let other = ranks.clone();
            let thread = loom::thread::spawn(move || both(&other, 1));
            both(&ranks, 0);
            thread.join().unwrap();
        });
    }

    /// A sleeper is always woken: the futex is modelled as "returns once the word differs", and a lost wake-up would be
    /// a thread that never ends, which loom reports.
    #[test]
    fn loom_no_wake_up_is_lost() {
        loom::model(|| {
            let ranks = ranks(2);
            let other = ranks.clone();
            let sleeper = loom::thread::spawn(move || {
                let mine = &other[1].flags;
                while !other[0].flags.arrived(1) {
                    mine.bell.doze(
                        || other[0].flags.arrived(1),
                        |ring, value| {
                            while ring.load(Ordering::Acquire) == value {
                                loom::thread::yield_now();
                            }
                        },
                    );
                }
            });
            ranks[0].flags.publish(1, 0, &[]);
            Bell::order();
            if ranks[1].flags.bell.wanted() {
                ranks[1].flags.bell.strike();
            }
            sleeper.join().unwrap();
        });
    }
}
