//! A contest: contenders take turns at the same cases, in one run.
//!
//! ```text
//!   block n: case 1: A B C, case 2: A B C, …      the order rotates from block to block (schedule)
//!                    └ wait for a quiet machine ─▶ measure ─▶ check ─▶ tally
//! ```
//! A *case* is what is measured, a *contender* who is measured, a *unit* one contender at one case, and a *turn* one
//! unit in one block. In: a [`Contest`]. Out: a [`Tally`] of its turns. Not here: reports, which each contest writes.

use super::contender::Contender;
use super::pace::Pace;
use super::progress::Progress;
use super::tally::{Tally, Turn};
use super::{quiet, schedule};
use std::fmt;
use std::time::Duration;

/// A contender that failed this often at one place is left out of the rest of it.
const MOST_FAILURES: usize = 2;

/// One contender at one case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Unit<C, K> {
    pub(crate) case: C,
    pub(crate) contender: Contender<K>,
}

impl<C: fmt::Display, K> fmt::Display for Unit<C, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.contender, self.case)
    }
}

/// The unit of a contest.
pub(crate) type UnitOf<T> = Unit<<T as Contest>::Case, <T as Contest>::Kind>;
/// The tally of a contest.
pub(crate) type TallyOf<T> = Tally<UnitOf<T>, <T as Contest>::Figures>;

/// What a unit gave.
#[derive(Debug)]
pub(crate) struct Taken<F> {
    pub(crate) figures: F,
    /// The machine did nothing else.
    pub(crate) steady: bool,
}

/// Who takes part, and how one of them is measured.
pub(crate) trait Contest {
    type Case: Copy + PartialEq + fmt::Display;
    /// Tells the contenders of this contest apart.
    type Kind: Copy + PartialEq;
    type Figures;

    /// Who takes part in a case.
    fn contenders(&self, case: Self::Case) -> Vec<Contender<Self::Kind>>;

    /// Runs a unit once.
    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Self::Figures>;

    /// Waits for a quiet machine, `patience` at most, and measures.
    fn take(&mut self, unit: &UnitOf<Self>, patience: Duration) -> anyhow::Result<Taken<Self::Figures>> {
        let steady = quiet::wait(patience);
        Ok(Taken { figures: self.measure(unit)?, steady })
    }

    /// Returns an error if the figures cannot be compared with those of the other turns.
    fn check(
        &self,
        _unit: &UnitOf<Self>,
        _figures: &Self::Figures,
        _tally: &TallyOf<Self>,
    ) -> anyhow::Result<()> {
        Ok(())
    }

    /// How often a case is repeated, where `blocks` are asked for.
    fn blocks(&self, _case: Self::Case, blocks: usize) -> usize {
        blocks
    }

    /// Failures are counted by place: cases that fail for the same reason share one.
    fn place(&self, case: Self::Case) -> String {
        case.to_string()
    }
}

/// Holds a contest: every contender at every case, block by block. A failure is shown and kept, and the rest continues.
pub(crate) fn hold<T: Contest, const BLOCKS: usize>(
    contest: &mut T,
    cases: &[T::Case],
    pace: &Pace<BLOCKS>,
) -> TallyOf<T> {
    let plan = plan(contest, cases, pace.blocks());
    let mut tally = Tally::default();
    let mut progress = Progress::new(plan.len());
    for (done, (block, unit)) in plan.into_iter().enumerate() {
        progress.show(done, block, &unit);
        let place = format!("{} at {}", unit.contender, contest.place(unit.case));
        if tally.failures_at(&place) >= MOST_FAILURES {
            continue;
        }
        let taken = contest.take(&unit, pace.patience()).and_then(|taken| {
            contest.check(&unit, &taken.figures, &tally)?;
            Ok(taken)
        });
        match taken {
            Ok(Taken { figures, steady }) => tally.add(Turn { unit, block, figures, steady }),
            Err(error) => tally.fail(place, format!("{unit}: {error:#}")),
        }
    }
    progress.clear();
    tally
}

/// Every turn in the order of running: block by block, case by case, contenders side by side.
fn plan<T: Contest>(contest: &T, cases: &[T::Case], blocks: usize) -> Vec<(usize, UnitOf<T>)> {
    let mut plan = Vec::new();
    for block in 0..blocks {
        for &case in cases.iter().filter(|case| block < contest.blocks(**case, blocks)) {
            let contenders = contest.contenders(case);
            let in_order = schedule::order(contenders.len(), block).into_iter();
            plan.extend(in_order.map(|index| (block, Unit { case, contender: contenders[index] })));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;

    /// Contender `b` fails at case 2, and what it gives at case 3 cannot be compared.
    struct Fake {
        taken: Vec<String>,
    }

    impl Contest for Fake {
        type Case = usize;
        type Kind = ();
        type Figures = f64;

        fn contenders(&self, _case: usize) -> Vec<Contender<()>> {
            vec![Contender::new("a", ()), Contender::new("b", ())]
        }

        fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<f64> {
            ensure!(unit.contender.name != "b" || unit.case != 2, "no");
            Ok(unit.case as f64)
        }

        fn take(&mut self, unit: &UnitOf<Self>, _patience: Duration) -> anyhow::Result<Taken<f64>> {
            self.taken.push(format!("{}{}", unit.contender, unit.case));
            Ok(Taken { figures: self.measure(unit)?, steady: true })
        }

        fn check(&self, unit: &UnitOf<Self>, figures: &f64, _tally: &TallyOf<Self>) -> anyhow::Result<()> {
            ensure!(unit.contender.name != "b" || *figures < 3.0, "differs");
            Ok(())
        }

        fn blocks(&self, case: usize, blocks: usize) -> usize {
            if case == 3 { 1 } else { blocks }
        }
    }

    #[test]
    fn blocks_rotate_and_what_fails_twice_is_left_out() {
        let mut contest = Fake { taken: Vec::new() };
        let tally = hold(&mut contest, &[1, 2, 3], &Pace::<3>::default());
        assert_eq!(contest.taken.join(" "), "a1 b1 a2 b2 a3 b3 b1 a1 b2 a2 b1 a1 a2");
        assert_eq!(tally.all().count(), 10);
        let failures = "- failed: b, 2: no\n- failed: b, 3: differs\n";
        assert_eq!(tally.failures(), failures);
    }
}
