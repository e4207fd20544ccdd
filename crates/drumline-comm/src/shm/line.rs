//! The flag protocol: how ranks that share memory tell each other that data is ready.
//!
//! A **round** is numbered by its **epoch**, counted from 1 over the life of the group. In round `k` a rank fills its own
//! buffers of parity `k & 1` (a staging buffer, and the few bytes beside the flag), **publishes** the epoch, waits until every
//! peer has published `k`, and reads the peers' buffers of that parity.
//!
//! ```text
//!   rank 0   fill[0] publish 2 ──wait all 2── read[0]   fill[1] publish 3 ──wait all 3── read[1]   fill[0] publish 4 …
//!   rank 1       fill[0] publish 2 ──wait── read[0]         fill[1] publish 3 …
//! ```
//!
//! Why two buffers are enough: a rank fills parity `k & 1` for round `k + 2` only after it has seen every peer publish
//! `k + 1`, and a peer publishes `k + 1` only after it has read everything of round `k`. So no trailing barrier is
//! needed, a small message costs one transfer of one cache line each way, and each flag has a single writer.
//!
//! Sleeping: a rank that has waited for some time sets `asleep`, checks once more, and sleeps on its `bell`. A publisher
//! checks `asleep` some time after publishing. The fence on both sides makes it impossible that each misses the other.
//!
//! In: epochs in order. Out: happens-before from filling to reading. Not here: what is filled (`node`), how to wait (`wait`).
//! The types are those of loom under `--cfg loom`, where the tests below try every interleaving.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes that fit beside the flag, in its cache line.
pub(crate) const INLINE: usize = 48;

/// One flag: the epoch, the call's fingerprint, and a few bytes of data, all in one cache line.
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

/// What a rank publishes to its peers. Only this rank writes the lines.
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

    /// For the owner, after round `epoch`: prefetches the line of the next round, which a peer read last, so that it is in the
    /// cache when it is written.
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
    /// For a publisher, after it has published: whether this bell's owner sleeps (or is about to) and must be woken.
    #[inline]
    pub(crate) fn wanted(&self) -> bool {
        self.asleep.load(Ordering::Relaxed) != 0
    }

    /// Orders a publication before the check of `wanted`; in the sleeper, `asleep` before its last check.
    #[inline]
    pub(crate) fn order() {
        fence(Ordering::SeqCst);
    }

    /// Rings: the owner's sleep ends, or does not begin. The caller then wakes the futex.
    pub(crate) fn strike(&self) {
        self.ring.fetch_add(1, Ordering::Release);
    }

    /// The word that the sleeper's futex is on.
    #[cfg(not(loom))]
    pub(crate) fn word(&self) -> &AtomicU32 {
        &self.ring
    }

    /// One attempt to sleep: sets the flag, checks once more, and if still not ready calls `sleep(ring, value)`, which returns
    /// at once if `ring` no longer holds `value`.
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

/// Memory for loom's tests. It reports any access that is not ordered after the one before.
#[cfg(all(test, loom))]
pub(super) mod loom_cells {
    use loom::cell::UnsafeCell;

    pub(crate) struct Cell(UnsafeCell<u64>);

    // SAFETY: unordered access from two threads is what loom is to find, and it panics then.
    unsafe impl Sync for Cell {}

    impl Cell {
        pub(crate) fn write(&self, value: u64) {
            // SAFETY: loom panics first if another thread may use it now.
            self.0.with_mut(|place| unsafe { *place = value });
        }

        pub(crate) fn read(&self) -> u64 {
            // SAFETY: loom panics first if another thread may write it now.
            self.0.with(|place| unsafe { *place })
        }
    }

    /// Tries all orders with at most this many preemptions, or as many as `LOOM_MAX_PREEMPTIONS` says.
    pub(crate) fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
        builder.max_branches = 50_000;
        builder.check(body);
    }

    pub(crate) fn cells(count: usize) -> Vec<Cell> {
        (0..count).map(|_| Cell(UnsafeCell::new(0))).collect()
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::loom_cells::{Cell, cells};
    use super::*;
    use loom::sync::Arc;

    fn flags() -> Flags {
        let line = || Line {
            epoch: AtomicU64::new(0),
            fingerprint: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Flags { lines: [line(), line()], bell: Bell { asleep: AtomicU32::new(0), ring: AtomicU32::new(0) } }
    }

    /// What one rank owns: its flags and, for each parity, a staging buffer of one cell for each rank.
    struct Rank {
        flags: Flags,
        places: [Vec<Cell>; 2],
    }

    fn ranks(n: usize) -> Arc<Vec<Rank>> {
        Arc::new((0..n).map(|_| Rank { flags: flags(), places: [cells(n), cells(n)] }).collect())
    }

    /// Runs `part` as each of `n` ranks, in all orders with a limited number of preemptions.
    fn run(n: usize, part: impl Fn(&[Rank], usize) + Copy + Send + Sync + 'static) {
        // Three ranks have too many orders; they are switched wherever one waits, and read old values where they may.
        super::loom_cells::model(if n == 2 { 3 } else { 0 }, move || {
            let ranks = ranks(n);
            let others: Vec<_> = (1..n)
                .map(|me| {
                    let ranks = ranks.clone();
                    loom::thread::spawn(move || part(&ranks, me))
                })
                .collect();
            part(&ranks, 0);
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    fn peers(ranks: &[Rank], me: usize) -> impl Iterator<Item = (usize, &Rank)> {
        ranks.iter().enumerate().filter(move |(rank, _)| *rank != me)
    }

    fn take_part(ranks: &[Rank], me: usize, rounds: u64) {
        for epoch in 1..=rounds {
            let parity = (epoch & 1) as usize;
            ranks[me].places[parity][0].write(epoch * 10 + me as u64);
            ranks[me].flags.publish(epoch, 7, &[epoch]);
            for (rank, peer) in peers(ranks, me) {
                spin(&peer.flags, epoch);
                assert_eq!(peer.places[parity][0].read(), epoch * 10 + rank as u64);
                let mut words = [0];
                peer.flags.read_words(epoch, &mut words);
                assert_eq!((words, peer.flags.fingerprint(epoch)), ([epoch], 7));
            }
        }
    }

    /// As `Node::reduce_my_part`: in its peers' places a rank reads the cell that is its own part, and then takes it over
    /// by writing to it.
    fn take_over(ranks: &[Rank], me: usize, rounds: u64) {
        for epoch in 1..=rounds {
            let parity = (epoch & 1) as usize;
            ranks[me].places[parity].iter().for_each(|cell| cell.write(epoch * 10 + me as u64));
            ranks[me].flags.publish(epoch, 7, &[]);
            for (rank, peer) in peers(ranks, me) {
                spin(&peer.flags, epoch);
                assert_eq!(peer.places[parity][me].read(), epoch * 10 + rank as u64);
                peer.places[parity][me].write(0);
            }
        }
    }

    /// Waits as `Backoff::wait` does when it goes to sleep. The futex is modelled as "returns once the word differs"; a lost
    /// wake-up would be a thread that never ends, which loom reports.
    fn sleep_until(bell: &Bell, ready: impl Fn() -> bool) {
        while !ready() {
            bell.doze(&ready, |ring, value| {
                while ring.load(Ordering::Acquire) == value {
                    loom::thread::yield_now();
                }
            });
        }
    }

    fn spin(flags: &Flags, epoch: u64) {
        while !flags.arrived(epoch) {
            loom::thread::yield_now();
        }
    }

    #[test]
    fn loom_two_ranks_four_rounds() {
        run(2, |ranks, me| take_part(ranks, me, 4));
    }

    #[test]
    fn loom_three_ranks_three_rounds() {
        run(3, |ranks, me| take_part(ranks, me, 3));
    }

    /// With one buffer instead of two.
    fn overwrite(ranks: &[Rank], me: usize) {
        for epoch in 1..=2 {
            ranks[me].places[0][0].write(epoch);
            ranks[me].flags.publish(epoch, 7, &[]);
            for (_, peer) in peers(ranks, me) {
                spin(&peer.flags, epoch);
                peer.places[0][0].read();
            }
        }
    }

    /// The control: loom must find the overwrite.
    #[test]
    #[should_panic]
    fn loom_finds_a_single_buffer_unsafe() {
        run(2, overwrite);
    }

    #[test]
    #[should_panic]
    fn loom_finds_a_single_buffer_unsafe_among_three() {
        run(3, overwrite);
    }

    #[test]
    fn loom_lines_taken_over_return_to_their_owner() {
        run(2, |ranks, me| take_over(ranks, me, 4));
        run(3, |ranks, me| take_over(ranks, me, 3));
    }

    /// The control: the owner must not read in the same round what a peer takes over.
    #[test]
    #[should_panic]
    fn loom_finds_an_owner_that_reads_what_is_taken_over() {
        run(2, |ranks, me| {
            take_over(ranks, me, 1);
            ranks[me].places[1][1 - me].read();
        });
    }

    #[test]
    #[should_panic]
    fn loom_finds_three_ranks_that_take_over_the_same_line() {
        run(3, |ranks, me| {
            ranks[me].flags.publish(1, 7, &[]);
            for (_, peer) in peers(ranks, me) {
                spin(&peer.flags, 1);
                peer.places[1][0].write(0);
            }
        });
    }

    #[test]
    fn loom_no_wake_up_is_lost() {
        run(2, |ranks, me| match me {
            0 => {
                ranks[0].flags.publish(1, 0, &[]);
                Bell::order();
                if ranks[1].flags.bell.wanted() {
                    ranks[1].flags.bell.strike();
                }
            }
            _ => sleep_until(&ranks[1].flags.bell, || ranks[0].flags.arrived(1)),
        });
    }

    /// As `Node::round`: a rank checks for sleepers only after it has waited itself, since the last to arrive wakes all.
    fn round(ranks: &[Rank], me: usize) {
        ranks[me].flags.publish(1, 0, &[]);
        for (_, peer) in peers(ranks, me) {
            sleep_until(&ranks[me].flags.bell, || peer.flags.arrived(1));
        }
        Bell::order();
        for (_, peer) in peers(ranks, me).filter(|(_, peer)| peer.flags.bell.wanted()) {
            peer.flags.bell.strike();
        }
    }

    #[test]
    fn loom_the_last_to_arrive_wakes_all() {
        run(2, round);
        run(3, round);
    }
}
