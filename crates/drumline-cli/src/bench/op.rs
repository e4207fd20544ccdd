//! What can be measured, and what each operation counts as moved.

use std::fmt;

/// An operation of a process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Op {
    #[value(alias = "all_reduce")]
    AllReduce,
    #[value(alias = "all_gather")]
    AllGather,
    #[value(alias = "reduce_scatter")]
    ReduceScatter,
    Broadcast,
    #[value(alias = "all_to_all")]
    AllToAll,
    Reduce,
    Gather,
    Scatter,
    Barrier,
    #[value(alias = "send_recv")]
    SendRecv,
}

impl Op {
    /// Whether the result takes the place of the input.
    pub(super) fn is_in_place(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::Broadcast)
    }

    /// Whether the bytes are dealt out among the ranks, and so must be divisible by their number.
    pub(super) fn is_dealt_out(self) -> bool {
        use Op::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, AllGather | AllToAll | Gather | ReduceScatter | Scatter)
    }

    /// Bus rate over algorithm rate, as nccl-tests defines it: what makes rates comparable between operations and worlds.
    pub(super) fn bus_factor(self, world: usize) -> f64 {
        let n = world as f64;
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::Reduce | Self::Broadcast | Self::SendRecv => 1.0,
            _ => (n - 1.0) / n,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Barrier => "barrier",
            Self::SendRecv => "send-recv",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn names_are_those_of_the_command_line() {
        for op in Op::value_variants() {
            assert_eq!(op.to_possible_value().unwrap().get_name(), op.to_string());
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let of = |op: Op| [op.bus_factor(2), op.bus_factor(4)];
        assert_eq!(of(Op::AllReduce), [1.0, 1.5]);
        for op in [Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter] {
            assert_eq!(of(op), [0.5, 0.75], "{op}");
        }
        for op in [Op::Broadcast, Op::Reduce, Op::SendRecv] {
            assert_eq!(of(op), [1.0, 1.0], "{op}");
        }
        assert_eq!(Op::AllReduce.bus_factor(1), 0.0);
    }
}
