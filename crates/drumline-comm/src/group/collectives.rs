//! The collective calls: they check the arguments and pass them to the tiers.

use super::tiers::CellLengths;
use super::{ProcessGroup, check_reduction};
use crate::call::{Call, Op};
use crate::element::Element;
use crate::error::CommError;
use crate::reduce::ReduceOp;
use crate::slices::{Cells, CellsMut, total};

type Result<T = ()> = std::result::Result<T, CommError>;

/// Collectives. All ranks of the group pass equal lengths, types and options. An invalid argument is
/// [`CommError::Invalid`], and nothing is sent.
impl ProcessGroup {
    /// `data` becomes the reduction of all ranks' `data`, the same bits on all ranks.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result {
        check_reduction(op, T::DTYPE)?;
        let call = Call::new(Op::AllReduce).of(T::DTYPE, data.len()).reduce(op);
        self.run(call, |tiers, cx| tiers.all_reduce(cx, data, op))
    }

    /// On the root, `data` becomes the reduction of all ranks' `data`; on the other ranks it is unchanged.
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], root: usize, op: ReduceOp) -> Result {
        check_reduction(op, T::DTYPE)?;
        self.check_root(root)?;
        let call = Call::new(Op::Reduce).of(T::DTYPE, data.len()).reduce(op).root(root);
        self.run(call, |tiers, cx| tiers.reduce(cx, data, op, root))
    }

    /// The root's `data` is copied to all ranks.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result {
        self.check_root(root)?;
        let call = Call::new(Op::Broadcast).of(T::DTYPE, data.len()).root(root);
        self.run(call, |tiers, cx| tiers.broadcast(cx, data, root))
    }

    /// All ranks' inputs, laid end to end in rank order, become every rank's `output`.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result {
        let counts = vec![input.len(); self.size()];
        check_len("output", output, &counts)?;
        let call = Call::new(Op::AllGather).of(T::DTYPE, input.len());
        self.run(call, |tiers, cx| tiers.gather_all(cx, input, output, &counts))
    }

    /// `data` is divided into as many equal parts as there are ranks; part `i` of every rank's `data` becomes rank
    /// `i`'s. An [`all_gather`](Self::all_gather) whose input is already where it belongs.
    #[track_caller]
    pub fn all_gather_in_place<T: Element>(&self, data: &mut [T]) -> Result {
        self.check_divisible(data, "all_gather_uneven")?;
        // The fingerprint differs from that of `all_gather`, in which data may be anywhere.
        let call = Call::new(Op::AllGather).of(T::DTYPE, data.len()).extra([0]);
        self.run(call, |tiers, cx| tiers.gather_all_in_place(cx, data))
    }

    /// As [`all_gather`](Self::all_gather), with `counts[i]` elements from rank `i`.
    #[track_caller]
    pub fn all_gather_uneven<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result {
        self.check_counts::<T>("counts", counts)?;
        check_len("output", output, counts)?;
        self.check_own("input", input.len(), counts)?;
        let call = Call::new(Op::AllGather).of(T::DTYPE, output.len()).extra(counts.iter().copied());
        self.run(call, |tiers, cx| tiers.gather_all(cx, input, output, counts))
    }

    /// All ranks' inputs, laid end to end in rank order, become the root's `output`. Only the root passes an output.
    #[track_caller]
    pub fn gather<T: Element>(&self, input: &[T], output: Option<&mut [T]>, root: usize) -> Result {
        let counts = vec![input.len(); self.size()];
        self.check_root(root)?;
        self.check_for_root("output", output.as_deref(), root, &counts)?;
        let call = Call::new(Op::Gather).of(T::DTYPE, input.len()).root(root);
        self.run(call, |tiers, cx| tiers.gather(cx, input, output, &counts, root))
    }

    /// As [`gather`](Self::gather), with `counts[i]` elements from rank `i`.
    #[track_caller]
    pub fn gather_uneven<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result {
        self.check_root(root)?;
        self.check_counts::<T>("counts", counts)?;
        self.check_own("input", input.len(), counts)?;
        self.check_for_root("output", output.as_deref(), root, counts)?;
        let call = Call::new(Op::Gather).of(T::DTYPE, 0).root(root).extra(counts.iter().copied());
        self.run(call, |tiers, cx| tiers.gather(cx, input, output, counts, root))
    }

    /// Part `i` of the root's `input` becomes rank `i`'s `output`. Only the root passes an input.
    #[track_caller]
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result {
        self.check_root(root)?;
        self.check_for_root("input", input, root, &vec![output.len(); self.size()])?;
        let call = Call::new(Op::Scatter).of(T::DTYPE, output.len()).root(root);
        self.run(call, |tiers, cx| tiers.scatter(cx, input, output, root))
    }

    /// Part `i` of the reduction of all ranks' inputs becomes rank `i`'s `output`.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result {
        let counts = vec![output.len(); self.size()];
        self.reduce_scatter_uneven_as(Call::new(Op::ReduceScatter), input, output, &counts, op)
    }

    /// `data` is divided into as many equal parts as there are ranks; rank `i`'s part `i` becomes part `i` of the
    /// reduction, and its other parts are unchanged. A [`reduce_scatter`](Self::reduce_scatter) without an output.
    #[track_caller]
    pub fn reduce_scatter_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result {
        check_reduction(op, T::DTYPE)?;
        self.check_divisible(data, "reduce_scatter_uneven")?;
        let call = Call::new(Op::ReduceScatter).of(T::DTYPE, data.len()).reduce(op).extra([0]);
        self.run(call, |tiers, cx| tiers.reduce_scatter_in_place(cx, data, op))
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with `counts[i]` elements for rank `i`.
    #[track_caller]
    pub fn reduce_scatter_uneven<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result {
        self.check_counts::<T>("counts", counts)?;
        let call = Call::new(Op::ReduceScatter).extra(counts.iter().copied());
        self.reduce_scatter_uneven_as(call, input, output, counts, op)
    }

    #[track_caller]
    fn reduce_scatter_uneven_as<T: Element>(
        &self,
        call: Call,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result {
        check_reduction(op, T::DTYPE)?;
        check_len("input", input, counts)?;
        self.check_own("output", output.len(), counts)?;
        let call = call.of(T::DTYPE, input.len()).reduce(op);
        self.run(call, |tiers, cx| tiers.reduce_scatter(cx, input, output, counts, op))
    }

    /// Part `i` of `input` goes to rank `i`; part `i` of `output` comes from rank `i`. All parts are equally long.
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result {
        let size = self.size();
        if !input.len().is_multiple_of(size) || output.len() != input.len() {
            return Err(CommError::invalid(format!(
                "all_to_all over {size} ranks needs input and output of one length that {size} divides, \
                 got {} and {}; try all_to_all_uneven",
                input.len(),
                output.len()
            )));
        }
        let counts = vec![input.len() / size; size];
        let call = Call::new(Op::AllToAll).of(T::DTYPE, input.len());
        let sends = Cells { data: input, counts: &counts };
        let receives = CellsMut { data: output, counts: &counts };
        self.run(call, |tiers, cx| tiers.all_to_all(cx, sends, receives, CellLengths::Equal))
    }

    /// As [`all_to_all`](Self::all_to_all), with parts of any length: `sends[i]` elements go to rank `i`, `receives[i]`
    /// come from it. Every rank knows only its own counts; those of all ranks must fit together.
    #[track_caller]
    pub fn all_to_all_uneven<T: Element>(
        &self,
        input: &[T],
        sends: &[usize],
        output: &mut [T],
        receives: &[usize],
    ) -> Result {
        self.check_counts::<T>("sends", sends)?;
        self.check_counts::<T>("receives", receives)?;
        check_len("input", input, sends)?;
        check_len("output", output, receives)?;
        let me = self.rank();
        let given = sends[me];
        let taken = receives[me];
        if given != taken {
            return Err(CommError::invalid(format!(
                "rank {me} sends itself {given} elements, but expects {taken} from itself"
            )));
        }
        let call = Call::new(Op::AllToAll).of(T::DTYPE, 0).extra([self.size()]);
        let sends = Cells { data: input, counts: sends };
        let receives = CellsMut { data: output, counts: receives };
        self.run(call, |tiers, cx| tiers.all_to_all(cx, sends, receives, CellLengths::PerRank))
    }

    /// Returns when all ranks have called it.
    #[track_caller]
    pub fn barrier(&self) -> Result {
        self.run(Call::new(Op::Barrier), |tiers, cx| tiers.barrier(cx))
    }

    /// A barrier with its own deadline. Its error names every rank that did not arrive.
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: std::time::Duration) -> Result {
        self.run_within(timeout, Call::new(Op::MonitoredBarrier), |tiers, cx| tiers.barrier(cx))
    }

    #[track_caller]
    fn check_divisible<T>(&self, data: &[T], otherwise: &str) -> Result {
        if data.len().is_multiple_of(self.size()) {
            return Ok(());
        }
        Err(CommError::invalid(format!(
            "{} elements cannot be divided into equal parts of {} ranks; try {otherwise}",
            data.len(),
            self.size()
        )))
    }

    /// Checks that there are as many counts as ranks, and that their sum fits memory.
    #[track_caller]
    fn check_counts<T: Element>(&self, what: &str, counts: &[usize]) -> Result {
        if counts.len() != self.size() {
            return Err(CommError::invalid(format!(
                "`{what}` has {} entries, the group has {} ranks",
                counts.len(),
                self.size()
            )));
        }
        check_total::<T>(what, counts).map(drop)
    }

    #[track_caller]
    fn check_own(&self, what: &str, len: usize, counts: &[usize]) -> Result {
        let expected = counts[self.rank()];
        if len == expected {
            return Ok(());
        }
        Err(CommError::invalid(format!(
            "`{what}` of rank {} has {len} elements, counts say {expected}",
            self.rank()
        )))
    }

    #[track_caller]
    fn check_for_root<T: Element>(
        &self,
        what: &str,
        slice: Option<&[T]>,
        root: usize,
        counts: &[usize],
    ) -> Result {
        match slice {
            None if self.rank() == root => Err(CommError::invalid(format!(
                "rank {root} is the root and must give `{what}`; try Some(..)"
            ))),
            Some(slice) if self.rank() == root => check_len(what, slice, counts),
            _ => Ok(()),
        }
    }
}

/// The sum of `counts`, which are numbers of elements of type `T`.
#[track_caller]
fn check_total<T: Element>(what: &str, counts: &[usize]) -> Result<usize> {
    let Some(total) = total(counts.iter().copied(), size_of::<T>()) else {
        let largest = counts.iter().max().unwrap_or(&0);
        return Err(CommError::invalid(format!(
            "`{what}` adds up to more {} than memory can hold; the largest is {largest}",
            T::DTYPE
        )));
    };
    Ok(total)
}

#[track_caller]
fn check_len<T: Element>(what: &str, slice: &[T], counts: &[usize]) -> Result {
    let (len, expected) = (slice.len(), check_total::<T>("counts", counts)?);
    if len == expected {
        return Ok(());
    }
    Err(CommError::invalid(format!(
        "`{what}` has {len} elements, expected {expected} for {} ranks",
        counts.len()
    )))
}
