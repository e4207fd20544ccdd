//! What can be measured: the call that each operation makes, what must come of it, and what it counts as moved. All that
//! `drumline bench` knows of an operation is here.

use std::fmt;

use clap::builder::PossibleValue;
use drumline_comm::{CommError, Element, Op as Call, ProcessGroup, ReduceOp, Source};

const TAG: u64 = 7;

/// Makes [`Op`] of the one list of what is measured, each with the calls of which it consists.
macro_rules! measured {
    ($($op:ident => [$($call:ident),+],)+) => {
        /// An operation of a process group. Its name is that of its calls, with hyphens.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Op {
            $($op,)+
        }

        impl Op {
            const ALL: &[Self] = &[$(Self::$op,)+];

            fn calls(self) -> &'static [Call] {
                match self {
                    $(Self::$op => &[$(Call::$call),+],)+
                }
            }
        }
    };
}

measured! {
    AllReduce => [AllReduce],
    AllGather => [AllGather],
    ReduceScatter => [ReduceScatter],
    Broadcast => [Broadcast],
    AllToAll => [AllToAll],
    Reduce => [Reduce],
    Gather => [Gather],
    Scatter => [Scatter],
    Barrier => [Barrier],
    // A message, and one back.
    SendRecv => [Send, Recv],
}

impl clap::ValueEnum for Op {
    fn value_variants<'a>() -> &'a [Self] {
        Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let name = self.to_string();
        let alias = name.replace('-', "_");
        Some(PossibleValue::new(name).alias(alias))
    }
}

// No arm `_` in a match below: the compiler then asks about a new operation everywhere.
impl Op {
    /// Whether the result replaces the input.
    pub(super) fn is_in_place(self) -> bool {
        match self {
            Self::AllReduce | Self::Reduce | Self::Broadcast => true,
            Self::AllGather | Self::Gather | Self::ReduceScatter | Self::Scatter => false,
            Self::AllToAll | Self::Barrier | Self::SendRecv => false,
        }
    }

    /// Whether the bytes are divided among the ranks, so that their number must divide them.
    pub(super) fn is_divided(self) -> bool {
        match self {
            Self::AllGather | Self::Gather | Self::ReduceScatter | Self::Scatter | Self::AllToAll => true,
            Self::AllReduce | Self::Reduce | Self::Broadcast | Self::Barrier | Self::SendRecv => false,
        }
    }

    /// Bus rate over algorithm rate, as nccl-tests defines it: it makes rates of different operations and worlds comparable.
    pub(super) fn bus_factor(self, world: usize) -> f64 {
        let n = world as f64;
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::Gather | Self::ReduceScatter | Self::Scatter => (n - 1.0) / n,
            Self::AllToAll | Self::Barrier => (n - 1.0) / n,
            Self::Reduce | Self::Broadcast | Self::SendRecv => 1.0,
        }
    }
}

/// A rank's place in the group, and the elements of the bytes that count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) len: usize,
}

/// Where an element of a result comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// There is no result.
    Nothing,
    /// The sum of all ranks' elements there.
    Sum { at: usize },
    /// One rank's element there.
    Given { rank: usize, at: usize },
}

/// What each operation does, and what must come of it.
impl Op {
    /// Makes the call once; the root is rank 0.
    #[inline]
    pub(super) fn perform<T: Element>(
        self,
        group: &ProcessGroup,
        input: &mut [T],
        output: &mut [T],
    ) -> Result<(), CommError> {
        let (is_root, part) = (group.rank() == 0, input.len() / group.size());
        match self {
            Self::AllReduce => group.all_reduce(input, ReduceOp::Sum),
            Self::Reduce => group.reduce(input, 0, ReduceOp::Sum),
            Self::Broadcast => group.broadcast(input, 0),
            Self::AllGather => group.all_gather(&input[..part], output),
            Self::Gather => group.gather(&input[..part], is_root.then_some(output), 0),
            Self::ReduceScatter => group.reduce_scatter(input, &mut output[..part], ReduceOp::Sum),
            Self::Scatter => group.scatter(is_root.then_some(&*input), &mut output[..part], 0),
            Self::AllToAll => group.all_to_all(input, output),
            Self::Barrier => group.barrier(),
            Self::SendRecv => there_and_back(group, input, output),
        }
    }

    /// Elements of the result on a rank.
    pub(super) fn result_len(self, place: Place) -> usize {
        let Place { rank, world, len } = place;
        match self {
            Self::Barrier => 0,
            Self::Reduce | Self::Gather if rank != 0 => 0,
            Self::SendRecv if rank > 1 => 0,
            Self::ReduceScatter | Self::Scatter => len / world,
            Self::AllReduce | Self::Reduce | Self::Broadcast => len,
            Self::AllGather | Self::Gather | Self::AllToAll | Self::SendRecv => len,
        }
    }

    /// Where element `i` of the result on a rank comes from.
    pub(super) fn origin(self, place: Place, i: usize) -> Origin {
        let Place { rank, world, len } = place;
        let part = (len / world).max(1);
        let mine = rank * part;
        match self {
            Self::AllReduce | Self::Reduce => Origin::Sum { at: i },
            Self::ReduceScatter => Origin::Sum { at: mine + i },
            Self::Broadcast => Origin::Given { rank: 0, at: i },
            Self::Scatter => Origin::Given { rank: 0, at: mine + i },
            Self::AllGather | Self::Gather => Origin::Given { rank: i / part, at: i % part },
            Self::AllToAll => Origin::Given { rank: i / part, at: mine + i % part },
            Self::SendRecv => Origin::Given { rank: 1 - rank, at: i },
            Self::Barrier => Origin::Nothing,
        }
    }
}

/// The other ranks have nothing to do.
fn there_and_back<T: Element>(group: &ProcessGroup, input: &[T], output: &mut [T]) -> Result<(), CommError> {
    match group.rank() {
        0 => {
            group.send(input, 1, TAG)?;
            group.recv(output, Source::Rank(1), TAG).map(drop)
        }
        1 => {
            group.recv(output, Source::Rank(0), TAG)?;
            group.send(input, 0, TAG)
        }
        _ => Ok(()),
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.calls().iter().map(|call| call.name().replace('_', "-")).collect();
        f.write_str(&names.join("-"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use clap::ValueEnum;

    /// The result of the operation on `rank`, built from the buffers of all ranks.
    pub(crate) fn result(op: Op, buffers: &[Vec<f32>], rank: usize) -> Vec<f32> {
        let (world, len) = (buffers.len(), buffers[0].len());
        let sums = (0..len).map(|i| buffers.iter().map(|buffer| buffer[i]).sum());
        let part = len / world;
        let mine = rank * part..(rank + 1) * part;
        match op {
            Op::AllReduce | Op::Reduce => sums.collect(),
            Op::ReduceScatter => sums.skip(mine.start).take(part).collect(),
            Op::Broadcast => buffers[0].clone(),
            Op::Scatter => buffers[0][mine].to_vec(),
            Op::AllGather | Op::Gather => buffers.iter().flat_map(|from| from[..part].to_vec()).collect(),
            Op::AllToAll => buffers.iter().flat_map(|from| from[mine.clone()].to_vec()).collect(),
            Op::SendRecv => buffers[1 - rank.min(1)].clone(),
            Op::Barrier => Vec::new(),
        }
    }

    #[test]
    fn names_are_those_of_the_calls_with_hyphens_or_without() {
        let names: Vec<_> = Op::value_variants().iter().map(ToString::to_string).collect();
        assert_eq!(names[..3], ["all-reduce", "all-gather", "reduce-scatter"]);
        assert_eq!(names.last().unwrap(), "send-recv");
        for (op, name) in Op::value_variants().iter().zip(&names) {
            for spelled in [name.clone(), name.replace('-', "_")] {
                assert_eq!(Op::from_str(&spelled, false), Ok(*op));
            }
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
