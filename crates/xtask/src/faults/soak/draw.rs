//! Which faults a run has: a pure function of the seed and the run's number, so that a run can be had again.
//!
//! The faults are drawn in the order of their steps. Some are *fatal*: they end the ranks, and the faults after them are
//! for the ranks of one restart more. So each finds the job where it is; where chance comes in between, it does not happen.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use rand_mt::Mt64;
use rank_test::fault::{Fault, FaultKind, Restarts, When};

/// Faults of a run.
const NUM_FAULTS: RangeInclusive<u64> = 4..=9;
/// Five quick failures of one rank in a row would end a job, and each makes the pause before a restart longer.
pub(super) const MOST_FATAL: usize = 3;

/// What a run is to live through.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Draw {
    /// What `drumline run --fault` is given.
    pub(super) faults: Vec<Fault>,
    /// What is done from outside, in the order of the steps.
    pub(super) acts: Vec<Act>,
}

/// Something done from outside when the training has come to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Act {
    pub(super) step: usize,
    pub(super) kind: ActKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ActKind {
    /// A host's cable is pulled for a while.
    Outage { host: usize, span: Duration },
    /// The agent on the second host dies of SIGKILL, and is started again after a while. The first one hosts the store:
    /// its end would be the job's.
    KillAgent { away: Duration },
}

/// One a line.
impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.faults.iter().try_for_each(|fault| writeln!(f, "{fault}"))?;
        self.acts.iter().try_for_each(|act| writeln!(f, "{act:?}"))
    }
}

/// What a training offers to faults.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ground {
    pub(super) num_steps: usize,
    pub(super) ranks_per_host: usize,
}

/// The faults of a run.
pub(super) fn draw(seed: u64, run: u64, ground: Ground) -> Draw {
    let mut dice = Dice { numbers: Mt64::new_with_key([seed, run]), ground };
    let num_faults = dice.within(NUM_FAULTS);
    let last = ground.num_steps as u64 - 1;
    let mut steps: Vec<_> = (0..num_faults).map(|_| dice.within(1..=last)).collect();
    steps.sort_unstable();
    let (mut draw, mut restarts) = (Draw::default(), 0);
    for step in steps {
        let is_fatal = restarts < MOST_FATAL && dice.within(0..=9) < 4;
        match if is_fatal { dice.fatal(step) } else { dice.harmless(step) } {
            Drawn::Act(kind) => draw.acts.push(Act { step: step as usize, kind }),
            Drawn::Fault { rank, when, kind } => {
                draw.faults.push(Fault { rank, when, kind, restarts: Restarts::Exactly(restarts) });
            }
        }
        restarts += usize::from(is_fatal);
    }
    draw
}

enum Drawn {
    Fault { rank: usize, when: When, kind: FaultKind },
    Act(ActKind),
}

struct Dice {
    numbers: Mt64,
    ground: Ground,
}

impl Dice {
    /// A number of a range. That the first ones are a little likelier does not matter here.
    fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.numbers.next_u64() % (range.end() - range.start() + 1)
    }

    fn millis(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    fn host(&mut self) -> usize {
        self.within(0..=1) as usize
    }

    fn rank_on(&mut self, host: usize) -> usize {
        let per_host = self.ground.ranks_per_host;
        host * per_host + self.within(0..=per_host as u64 - 1) as usize
    }

    /// Ends the ranks.
    fn fatal(&mut self, step: u64) -> Drawn {
        let host = self.host();
        let (rank, at_step) = (self.rank_on(host), When::Step(step));
        let (when, kind) = match self.within(0..=9) {
            0..=2 => (at_step, FaultKind::Kill),
            3..=4 => (at_step, FaultKind::Exit(self.within(1..=125) as i32)),
            5..=6 => (at_step, FaultKind::Panic),
            7..=8 => (When::After(self.millis(100..=2500)), FaultKind::Kill),
            _ => return Drawn::Act(ActKind::KillAgent { away: self.millis(0..=1500) }),
        };
        Drawn::Fault { rank, when, kind }
    }

    /// Is waited for, or mended without a restart.
    fn harmless(&mut self, step: u64) -> Drawn {
        let host = self.host();
        let (rank, peer, at_step) = (self.rank_on(host), self.rank_on(1 - host), When::Step(step));
        let (when, kind) = match self.within(0..=9) {
            0..=1 => (at_step, FaultKind::Drop(peer)),
            2 => (at_step, FaultKind::Delay { peer, by: self.millis(1..=20) }),
            3..=4 => (at_step, FaultKind::Stop(Some(self.millis(100..=1500)))),
            5 => (When::After(self.millis(100..=2500)), FaultKind::Stop(Some(self.millis(100..=1500)))),
            6 => (at_step, FaultKind::Sleep(self.millis(10..=800))),
            7 => (at_step, FaultKind::Slow(self.within(1100..=3000) as u32)),
            _ => return Drawn::Act(ActKind::Outage { host, span: self.millis(200..=3000) }),
        };
        Drawn::Fault { rank, when, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const GROUND: Ground = Ground { num_steps: 40, ranks_per_host: 2 };

    fn is_fatal(fault: &Fault) -> bool {
        matches!(fault.kind, FaultKind::Kill | FaultKind::Exit(_) | FaultKind::Panic)
    }

    fn restarts(fault: &Fault) -> usize {
        (0..=MOST_FATAL).find(|number| fault.restarts.includes(*number)).unwrap()
    }

    #[test]
    fn the_same_seed_and_run_give_the_same_faults_and_others_do_not() {
        assert_eq!(draw(1, 7, GROUND), draw(1, 7, GROUND));
        let all: BTreeSet<_> =
            (0..20).map(|number| format!("{:?}", draw(number % 4, number / 4, GROUND))).collect();
        assert_eq!(all.len(), 20);
    }

    #[test]
    fn every_fault_can_be_met_and_no_run_ends_for_too_many() {
        for number in 0..2000 {
            let Draw { faults, acts } = draw(3, number, GROUND);
            let agents = acts.iter().filter(|act| matches!(act.kind, ActKind::KillAgent { .. })).count();
            let fatal = faults.iter().filter(|fault| is_fatal(fault)).count() + agents;
            assert!(fatal <= MOST_FATAL && NUM_FAULTS.contains(&((faults.len() + acts.len()) as u64)));
            assert!(faults.iter().all(|fault| restarts(fault) <= fatal), "{faults:?}");
            assert!(faults.iter().all(|fault| fault.rank < 4 && fault.to_string().parse() == Ok(*fault)));
            let is_met = |fault: &Fault| match fault.when {
                When::Step(step) => (1..40).contains(&step),
                When::After(_) => matches!(fault.kind, FaultKind::Kill | FaultKind::Stop(Some(_))),
            };
            assert!(faults.iter().all(is_met) && acts.iter().all(|act| (1..40).contains(&act.step)));
            let links = faults.iter().filter_map(|fault| match fault.kind {
                FaultKind::Drop(peer) | FaultKind::Delay { peer, .. } => Some((fault.rank, peer)),
                _ => None,
            });
            links.for_each(|(rank, peer)| assert_ne!(rank / 2, peer / 2, "on one host there is no link"));
        }
    }

    #[test]
    fn later_steps_come_after_more_restarts_and_each_restart_has_its_cause() {
        for number in 0..2000 {
            let Draw { faults, .. } = draw(5, number, GROUND);
            let at = |fault: &Fault| matches!(fault.when, When::Step(_)).then(|| restarts(fault));
            let order: Vec<_> = faults.iter().filter_map(at).collect();
            assert!(order.is_sorted(), "{faults:?}");
            let fatal: Vec<_> = faults.iter().filter(|fault| is_fatal(fault)).map(restarts).collect();
            assert!(fatal.windows(2).all(|pair| pair[0] < pair[1]), "one for each restart: {faults:?}");
        }
    }

    #[test]
    fn every_kind_comes() {
        let mut kinds = BTreeSet::new();
        for number in 0..100 {
            let Draw { faults, acts } = draw(0, number, GROUND);
            kinds.extend(
                faults
                    .iter()
                    .map(|fault| std::mem::discriminant(&fault.kind))
                    .map(|kind| format!("{kind:?}")),
            );
            kinds.extend(
                acts.iter().map(|act| std::mem::discriminant(&act.kind)).map(|kind| format!("act {kind:?}")),
            );
        }
        assert_eq!(kinds.len(), 8 + 2, "{kinds:?}");
    }
}
