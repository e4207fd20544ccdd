//! What is aimed at, as data: who, where, against whom, by how much; and the verdict on what was measured.
//!
//! `Times(r)`: the better of the peers takes at least r times as long as ours. Within 1.2x of the floor is thus
//! `Times(1 / 1.2)`, and 80 % of a socket pair's rate is `Times(0.8)`.

use super::contender::{Case, OURS_HEAP, OURS_PRIVATE, OURS_TCP, Op};
use super::tally::Tally;

/// One line of the goals.
#[derive(Debug)]
pub(crate) struct Goal {
    pub(crate) ours: &'static str,
    ops: &'static [Op],
    world: usize,
    /// First and last size, both included.
    bytes: (u64, u64),
    pub(crate) against: &'static [&'static str],
    pub(crate) need: Need,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Need {
    Times(f64),
    MicrosAtMost(f64),
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BELOW_64K: (u64, u64) = (1, 64 * KIB - 1);
const FROM_64K: (u64, u64) = (64 * KIB, u64::MAX);
const ALL: (u64, u64) = (1, u64::MAX);

const AR: &[Op] = &[Op::AllReduce];
const OTHERS: &[Op] = &[Op::Broadcast, Op::ReduceScatter, Op::AllGather, Op::AllToAll];
const MPI: &[&str] = &["openmpi", "mpich"];
const OPEN_MPI: &[&str] = &["openmpi"];
const GLOO: &[&str] = &["gloo"];
const FLOOR: &[&str] = &["floor"];
const SOCKET: &[&str] = &["socket", "socket-duplex"];

const fn times(
    ours: &'static str,
    (ops, world): (&'static [Op], usize),
    bytes: (u64, u64),
    (against, ratio): (&'static [&'static str], f64),
) -> Goal {
    Goal { ours, ops, world, bytes, against, need: Need::Times(ratio) }
}

const fn at(bytes: u64) -> (u64, u64) {
    (bytes, bytes)
}

/// The goals of the collectives.
pub(crate) const GOALS: &[Goal] = &[
    // Two ranks on two cores, buffers in the symmetric heap.
    times(OURS_HEAP, (AR, 2), (64 * KIB, 64 * MIB), (FLOOR, 1.0 / 1.2)),
    times(OURS_HEAP, (AR, 2), (64 * KIB, 64 * MIB), (MPI, 4.0)),
    times(OURS_HEAP, (AR, 2), (MIB, 64 * MIB), (GLOO, 10.0)),
    // The same with private buffers.
    Goal {
        ours: OURS_PRIVATE,
        ops: AR,
        world: 2,
        bytes: at(16),
        against: &[],
        need: Need::MicrosAtMost(0.3),
    },
    times(OURS_PRIVATE, (AR, 2), at(16), (OPEN_MPI, 1.4)),
    times(OURS_PRIVATE, (AR, 2), at(4 * KIB), (MPI, 2.0)),
    times(OURS_PRIVATE, (AR, 2), at(64 * KIB), (MPI, 2.0)),
    times(OURS_PRIVATE, (AR, 2), at(MIB), (MPI, 1.4)),
    times(OURS_PRIVATE, (AR, 2), at(4 * MIB), (MPI, 1.1)),
    times(OURS_PRIVATE, (AR, 2), at(16 * MIB), (MPI, 1.7)),
    times(OURS_PRIVATE, (AR, 2), at(64 * MIB), (MPI, 2.5)),
    times(OURS_PRIVATE, (AR, 2), (1, 4 * KIB), (GLOO, 100.0)),
    times(OURS_PRIVATE, (AR, 2), ALL, (GLOO, 5.0)),
    // The other operations.
    times(OURS_PRIVATE, (OTHERS, 2), FROM_64K, (MPI, 1.2)),
    times(OURS_PRIVATE, (OTHERS, 2), BELOW_64K, (MPI, 1.0)),
    // More ranks than cores.
    times(OURS_HEAP, (AR, 4), FROM_64K, (OPEN_MPI, 4.0)),
    times(OURS_PRIVATE, (AR, 4), FROM_64K, (OPEN_MPI, 1.5)),
    times(OURS_HEAP, (AR, 4), BELOW_64K, (OPEN_MPI, 1.0)),
    times(OURS_PRIVATE, (AR, 4), BELOW_64K, (OPEN_MPI, 1.0)),
    times(OURS_HEAP, (AR, 4), (1, 64 * KIB), (GLOO, 50.0)),
    times(OURS_PRIVATE, (AR, 4), (1, 64 * KIB), (GLOO, 50.0)),
    // TCP on loopback, shared memory switched off.
    times(OURS_TCP, (AR, 2), ALL, (GLOO, 1.5)),
    times(OURS_TCP, (AR, 2), (MIB, u64::MAX), (SOCKET, 0.8)),
];

/// What the measurement says about one goal at one case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    /// The ratio, or the microseconds, reached.
    Pass(f64),
    Miss(f64),
    /// These were not measured.
    Missing(Vec<String>),
}

impl Goal {
    pub(crate) fn covers(&self, case: Case) -> bool {
        let (from, to) = self.bytes;
        self.ops.contains(&case.op) && self.world == case.world && (from..=to).contains(&case.bytes)
    }

    /// Whether a figure that the verdict rests on was taken on an unsteady machine only.
    pub(crate) fn is_doubtful(&self, case: Case, tally: &Tally) -> bool {
        let mut named = std::iter::once(&self.ours).chain(self.against);
        named.any(|series| tally.figure(case, series).is_some_and(|figure| figure.doubtful))
    }

    /// Holds the goal against the figures of a case. A peer that is missing might have been the better one, so then
    /// nothing is claimed.
    pub(crate) fn judge(&self, case: Case, tally: &Tally) -> Verdict {
        let named = std::iter::once(&self.ours).chain(self.against);
        let missing: Vec<_> =
            named.filter(|s| tally.figure(case, s).is_none()).map(|s| (*s).to_owned()).collect();
        let micros = |series: &&str| tally.figure(case, series).map(|figure| figure.median_us);
        let Some(ours) = micros(&self.ours).filter(|_| missing.is_empty()) else {
            return Verdict::Missing(missing);
        };
        let best = self.against.iter().filter_map(micros).fold(f64::INFINITY, f64::min);
        let (value, reached) = match self.need {
            Need::Times(ratio) => (best / ours, best / ours >= ratio),
            Need::MicrosAtMost(limit) => (ours, ours <= limit),
        };
        if reached { Verdict::Pass(value) } else { Verdict::Miss(value) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tally::{Key, Sample};
    use super::*;

    fn measured(case: Case, figures: &[(&str, f64)]) -> Tally {
        let mut tally = Tally::default();
        for (series, median_us) in figures {
            let key = Key { case, series: (*series).to_owned(), setting: String::new() };
            tally.add(key, Sample { block: 0, median_us: *median_us, p99_us: *median_us, steady: true });
        }
        tally
    }

    fn verdicts(case: Case, figures: &[(&str, f64)]) -> Vec<Verdict> {
        let tally = measured(case, figures);
        GOALS.iter().filter(|goal| goal.covers(case)).map(|goal| goal.judge(case, &tally)).collect()
    }

    fn all_reduce(world: usize, bytes: u64) -> Case {
        Case { op: Op::AllReduce, world, bytes }
    }

    const PEERS_AT_1M: [(&str, f64); 5] =
        [("floor", 31.0), ("openmpi", 180.0), ("mpich", 184.0), ("gloo", 1270.0), ("socket", 300.0)];

    fn at_1m(heap: f64, private: f64, tcp: f64) -> Vec<Verdict> {
        let ours =
            [("ours-heap", heap), ("ours-private", private), ("ours-tcp", tcp), ("socket-duplex", 310.0)];
        verdicts(all_reduce(2, MIB), &[&PEERS_AT_1M[..], &ours[..]].concat())
    }

    #[test]
    fn good_figures_pass_everywhere() {
        let verdicts = at_1m(32.0, 120.0, 370.0);
        assert_eq!(verdicts.len(), 7);
        assert!(verdicts.iter().all(|v| matches!(v, Verdict::Pass(_))), "{verdicts:?}");
    }

    #[test]
    fn slow_figures_miss_everywhere() {
        // The control of the test above.
        let verdicts = at_1m(130.0, 260.0, 900.0);
        assert!(verdicts.iter().all(|v| matches!(v, Verdict::Miss(_))), "{verdicts:?}");
    }

    #[test]
    fn the_better_peer_decides() {
        let case = all_reduce(2, 4 * KIB);
        let goal = GOALS.iter().find(|g| g.covers(case) && g.against == MPI).unwrap();
        let judge = |openmpi, mpich| {
            let figures = [("ours-private", 1.0), ("openmpi", openmpi), ("mpich", mpich)];
            goal.judge(case, &measured(case, &figures))
        };
        assert_eq!(judge(2.5, 9.0), Verdict::Pass(2.5));
        assert_eq!(judge(9.0, 1.9), Verdict::Miss(1.9));
    }

    #[test]
    fn nothing_is_claimed_against_one_who_is_missing() {
        let case = all_reduce(2, 4 * KIB);
        let goal = GOALS.iter().find(|g| g.covers(case) && g.against == MPI).unwrap();
        let tally = measured(case, &[("ours-private", 1.0), ("openmpi", 9.0)]);
        assert_eq!(goal.judge(case, &tally), Verdict::Missing(vec!["mpich".into()]));
    }

    #[test]
    fn small_calls_have_a_limit_of_their_own() {
        let case = all_reduce(2, 16);
        let goal = GOALS.iter().find(|g| matches!(g.need, Need::MicrosAtMost(_))).unwrap();
        assert!(goal.covers(case) && !goal.covers(all_reduce(4, 16)) && !goal.covers(all_reduce(2, 32)));
        assert_eq!(goal.judge(case, &measured(case, &[("ours-private", 0.26)])), Verdict::Pass(0.26));
        assert_eq!(goal.judge(case, &measured(case, &[("ours-private", 0.31)])), Verdict::Miss(0.31));
    }
}
