//! What is aimed at, as data: who, where, against whom, by how much; and the verdict on what was measured.
//!
//! `Times(r)`: the better of the peers takes at least r times as long as ours. Within 1.2x of the floor is thus
//! `Times(1 / 1.2)`, and 80 % of a socket pair's rate is `Times(0.8)`.

use super::contenders::{ALL_REDUCE, Case, OURS_HEAP, OURS_PRIVATE, OURS_TCP, Op};
use super::contest::Calls;
use super::figures::figure;
use crate::bench::contest::TallyOf;
use std::ops::RangeInclusive;

/// One line of the goals.
#[derive(Debug)]
pub(crate) struct Goal {
    pub(crate) ours: &'static str,
    ops: &'static [Op],
    world: usize,
    bytes: RangeInclusive<u64>,
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
const BELOW_64K: RangeInclusive<u64> = 1..=64 * KIB - 1;
const FROM_64K: RangeInclusive<u64> = 64 * KIB..=u64::MAX;
const ALL: RangeInclusive<u64> = 1..=u64::MAX;

const AR: &[Op] = &[ALL_REDUCE];
const OTHERS: &[Op] = &[Op("broadcast"), Op("reduce-scatter"), Op("all-gather"), Op("all-to-all")];
const MPI: &[&str] = &["openmpi", "mpich"];
const OPEN_MPI: &[&str] = &["openmpi"];
const GLOO: &[&str] = &["gloo"];
const FLOOR: &[&str] = &["floor"];
const SOCKET: &[&str] = &["socket", "socket-duplex"];

/// Ours at these operations with so many ranks; what is asked of it follows.
const fn ours(ours: &'static str, ops: &'static [Op], world: usize) -> Aim {
    Aim { ours, ops, world, bytes: ALL }
}

/// A goal before it says against whom.
struct Aim {
    ours: &'static str,
    ops: &'static [Op],
    world: usize,
    bytes: RangeInclusive<u64>,
}

impl Aim {
    const fn at(self, bytes: RangeInclusive<u64>) -> Self {
        Self { bytes, ..self }
    }

    const fn times(self, against: &'static [&'static str], ratio: f64) -> Goal {
        let Self { ours, ops, world, bytes } = self;
        Goal { ours, ops, world, bytes, against, need: Need::Times(ratio) }
    }

    const fn micros(self, limit: f64) -> Goal {
        let Self { ours, ops, world, bytes } = self;
        Goal { ours, ops, world, bytes, against: &[], need: Need::MicrosAtMost(limit) }
    }
}

const fn only(bytes: u64) -> RangeInclusive<u64> {
    bytes..=bytes
}

/// The goals of the collectives.
pub(crate) const GOALS: &[Goal] = &[
    // Two ranks on two cores, buffers in the symmetric heap.
    ours(OURS_HEAP, AR, 2).at(64 * KIB..=64 * MIB).times(FLOOR, 1.0 / 1.2),
    ours(OURS_HEAP, AR, 2).at(64 * KIB..=64 * MIB).times(MPI, 4.0),
    ours(OURS_HEAP, AR, 2).at(MIB..=64 * MIB).times(GLOO, 10.0),
    // The same with private buffers.
    ours(OURS_PRIVATE, AR, 2).at(only(16)).micros(0.3),
    ours(OURS_PRIVATE, AR, 2).at(only(16)).times(OPEN_MPI, 1.4),
    ours(OURS_PRIVATE, AR, 2).at(only(4 * KIB)).times(MPI, 2.0),
    ours(OURS_PRIVATE, AR, 2).at(only(64 * KIB)).times(MPI, 2.0),
    ours(OURS_PRIVATE, AR, 2).at(only(MIB)).times(MPI, 1.4),
    ours(OURS_PRIVATE, AR, 2).at(only(4 * MIB)).times(MPI, 1.1),
    ours(OURS_PRIVATE, AR, 2).at(only(16 * MIB)).times(MPI, 1.7),
    ours(OURS_PRIVATE, AR, 2).at(only(64 * MIB)).times(MPI, 2.5),
    ours(OURS_PRIVATE, AR, 2).at(1..=4 * KIB).times(GLOO, 100.0),
    ours(OURS_PRIVATE, AR, 2).times(GLOO, 5.0),
    // The other operations.
    ours(OURS_PRIVATE, OTHERS, 2).at(FROM_64K).times(MPI, 1.2),
    ours(OURS_PRIVATE, OTHERS, 2).at(BELOW_64K).times(MPI, 1.0),
    // More ranks than cores.
    ours(OURS_HEAP, AR, 4).at(FROM_64K).times(OPEN_MPI, 4.0),
    ours(OURS_PRIVATE, AR, 4).at(FROM_64K).times(OPEN_MPI, 1.5),
    ours(OURS_HEAP, AR, 4).at(BELOW_64K).times(OPEN_MPI, 1.0),
    ours(OURS_PRIVATE, AR, 4).at(BELOW_64K).times(OPEN_MPI, 1.0),
    ours(OURS_HEAP, AR, 4).at(1..=64 * KIB).times(GLOO, 50.0),
    ours(OURS_PRIVATE, AR, 4).at(1..=64 * KIB).times(GLOO, 50.0),
    // TCP on loopback, shared memory switched off.
    ours(OURS_TCP, AR, 2).times(GLOO, 1.5),
    ours(OURS_TCP, AR, 2).at(MIB..=u64::MAX).times(SOCKET, 0.8),
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
        self.ops.contains(&case.op) && self.world == case.world && self.bytes.contains(&case.bytes)
    }

    /// Whether a figure that the verdict rests on was taken on an unsteady machine only.
    pub(crate) fn is_doubtful(&self, case: Case, tally: &TallyOf<Calls>) -> bool {
        let mut named = std::iter::once(&self.ours).chain(self.against);
        named.any(|series| figure(tally, case, series).is_some_and(|figure| figure.doubtful))
    }

    /// Holds the goal against the figures of a case. A peer that is missing might have been the better one, so then
    /// nothing is claimed.
    pub(crate) fn judge(&self, case: Case, tally: &TallyOf<Calls>) -> Verdict {
        let named = std::iter::once(&self.ours).chain(self.against);
        let missing: Vec<_> =
            named.filter(|s| figure(tally, case, s).is_none()).map(|s| (*s).to_owned()).collect();
        let micros = |series: &&str| figure(tally, case, series).map(|figure| figure.median_us);
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
    use super::super::contenders::Kind;
    use super::super::contest::Sample;
    use super::*;
    use crate::bench::contender::Contender;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};

    fn measured(case: Case, figures: &[(&str, f64)]) -> TallyOf<Calls> {
        let mut tally = Tally::default();
        let sample = |(series, median): &(&str, f64)| Sample {
            series: (*series).to_owned(),
            median_us: *median,
            p99_us: *median,
        };
        let figures = figures.iter().map(sample).collect();
        let unit = Unit { case, contender: Contender::new("all", Kind::Floor) };
        tally.add(Turn { unit, block: 0, figures, steady: true });
        tally
    }

    fn verdicts(case: Case, figures: &[(&str, f64)]) -> Vec<Verdict> {
        let tally = measured(case, figures);
        GOALS.iter().filter(|goal| goal.covers(case)).map(|goal| goal.judge(case, &tally)).collect()
    }

    fn all_reduce(world: usize, bytes: u64) -> Case {
        Case { op: ALL_REDUCE, world, bytes }
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
