//! The collectives of a step, and the elements that each rank sends in them, derived from placements.

use crate::placement::{Placement, Placements, Stage};
use crate::unit::UnitLayout;

/// A kind of collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the sum of all.
    AllReduce,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// Every rank gets the parts of all.
    AllGather,
}

/// How often a collective is called in a step, and how many elements a rank sends in all calls together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTraffic {
    /// The kind.
    pub collective: Collective,
    /// The number of calls.
    pub calls: usize,
    /// The elements that each rank sends, with ring or direct algorithms.
    pub sent: usize,
}

impl StepTraffic {
    /// The collectives of a step of `micro_batches`, whose gradients are reduced in each of them where they are sharded,
    /// and in the last one where they are not. A forward gathers sharded parameters, and so does a backward.
    pub fn of(unit: &UnitLayout, stage: Stage, micro_batches: usize) -> Vec<Self> {
        if unit.num_ranks() == 1 {
            return Vec::new();
        }
        let Placements { parameters, gradients, optimizer } = stage.placements();
        let calls = unit.segments().len();
        let part = unit.flat_len() - unit.shard_len();
        let times = |collective, times: usize| Self { collective, calls: calls * times, sent: part * times };
        let reduction = match (optimizer, gradients) {
            (Placement::Replicated, _) => Self { collective: Collective::AllReduce, calls, sent: 2 * part },
            (Placement::Sharded, Placement::Replicated) => times(Collective::ReduceScatter, 1),
            (Placement::Sharded, Placement::Sharded) => times(Collective::ReduceScatter, micro_batches),
        };
        let gathers = match (optimizer, parameters) {
            (Placement::Replicated, _) => 0,
            (Placement::Sharded, Placement::Replicated) => 1,
            (Placement::Sharded, Placement::Sharded) => 2 * micro_batches,
        };
        let gather = (gathers > 0).then(|| times(Collective::AllGather, gathers));
        std::iter::once(reduction).chain(gather).collect()
    }

    /// The same for stage 3, if the ranks of one machine have one copy of the parameters together: nothing is gathered.
    pub fn of_node_shared(unit: &UnitLayout, micro_batches: usize) -> Vec<Self> {
        let is_reduction = |traffic: &Self| traffic.collective == Collective::ReduceScatter;
        Self::of(unit, Stage::Zero3, micro_batches).into_iter().filter(is_reduction).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Parameter;

    #[test]
    fn a_step_sends_what_the_formulas_of_zero_say() {
        let num_ranks = 4;
        let unit = UnitLayout::new(vec![Parameter::new("w", &[1024, 256])], num_ranks);
        // In units of the parameters times (ranks - 1) / ranks.
        let volume = |stage, micro_batches| {
            let sent: usize = StepTraffic::of(&unit, stage, micro_batches).iter().map(|one| one.sent).sum();
            sent * num_ranks / (num_ranks - 1) / unit.num_elements()
        };
        assert_eq!(Stage::ALL.map(|stage| volume(stage, 1)), [2, 2, 2, 3]);
        assert_eq!(Stage::ALL.map(|stage| volume(stage, 4)), [2, 2, 5, 12]);
        let calls = |stage| StepTraffic::of(&unit, stage, 1).iter().map(|one| one.calls).sum::<usize>();
        assert_eq!(Stage::ALL.map(calls), [1, 2, 2, 3]);
        let shared = StepTraffic::of_node_shared(&unit, 1);
        let [ddp] = StepTraffic::of(&unit, Stage::Zero0, 1)[..] else { panic!("one all-reduce") };
        assert_eq!(shared.iter().map(|one| 2 * one.sent).sum::<usize>(), ddp.sent, "half of DDP's");
        let alone = UnitLayout::new(vec![Parameter::new("w", &[4])], 1);
        assert_eq!(StepTraffic::of(&alone, Stage::Zero3, 1), []);
    }
}
