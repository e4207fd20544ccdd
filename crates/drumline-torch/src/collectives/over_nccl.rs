//! Collectives on GPU tensors with NCCL: asynchronous, in the order of the streams.
//!
//! Collectives that NCCL lacks are groups of sends and receives. For reductions that NCCL lacks (16-bit integers,
//! bitwise, scaled integers) methods return `false`, and the host does them.

use drumline_comm::{CommError, ExternalCall, Op, ProcessGroup, ReduceOp};
use tch::Tensor;

use super::resident::Resident;
use crate::error::TorchError;
use crate::nccl::{Communicator, Parts, Reduction, reduction};

type Result<T = ()> = std::result::Result<T, TorchError>;

/// A group and its communicator.
#[derive(Clone, Copy)]
pub(super) struct OverNccl<'a> {
    pub(super) group: &'a ProcessGroup,
    pub(super) communicator: &'a Communicator,
    /// This rank's GPU.
    pub(super) gpu: usize,
}

impl OverNccl<'_> {
    #[track_caller]
    pub(super) fn all_reduce(self, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        let residents = self.all(tensors)?;
        residents.iter().try_for_each(|resident| resident.carried.check(op))?;
        let plans: Option<Vec<_>> =
            residents.iter().map(|resident| reduction(resident.carried.dtype, op)).collect();
        let Some(mut plans) = plans else { return Ok(false) };
        let Some(call) = announced(Op::AllReduce, &residents) else { return Ok(true) };
        for (resident, plan) in residents.iter().zip(&mut plans) {
            *plan = self.scaled_if_alone(resident, *plan)?;
        }
        self.communicator.call(call.reduce(op), |calls| {
            let mut each = residents.iter().map(Resident::span).zip(plans);
            each.try_for_each(|(span, plan)| calls.all_reduce(span, span, plan))
        })?;
        self.finish(residents)?;
        Ok(true)
    }

    #[track_caller]
    pub(super) fn broadcast(self, tensors: &[Tensor], root: usize) -> Result {
        check_root(self.group, root)?;
        let residents = self.all(tensors)?;
        let Some(call) = announced(Op::Broadcast, &residents) else { return Ok(()) };
        self.communicator.call(call.root(root), |calls| {
            residents.iter().map(Resident::span).try_for_each(|span| calls.broadcast(span, span, root))
        })?;
        self.finish(residents)
    }

    #[track_caller]
    pub(super) fn reduce(self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<bool> {
        check_root(self.group, root)?;
        let data = Resident::write(tensor, self.gpu)?;
        data.carried.check(op)?;
        let (span, dtype) = (data.span(), data.carried.dtype);
        let Some(plan) = reduction(dtype, op) else { return Ok(false) };
        let plan = self.scaled_if_alone(&data, plan)?;
        let call = ExternalCall::new(Op::Reduce, dtype, span.count).reduce(op).root(root);
        self.communicator.call(call, |calls| calls.reduce(span, span, plan, root))?;
        if self.group.rank() == root {
            self.finish([data])?;
        }
        Ok(true)
    }

    #[track_caller]
    pub(super) fn all_gather(self, output: &Resident, input: &Resident) -> Result {
        let (from, to) = (input.span(), output.span());
        check_count("output", to.count, from.count * self.group.size())?;
        let call = ExternalCall::new(Op::AllGather, from.dtype, from.count);
        self.communicator.call(call, |calls| calls.all_gather(from, to))
    }

    /// Rank `i` contributes `counts[i]` elements.
    #[track_caller]
    pub(super) fn all_gather_uneven(
        self,
        output: Resident,
        input: &Resident,
        counts: &[usize],
    ) -> Result<Resident> {
        let (from, to) = (input.span(), output.span());
        check_count("output", to.count, counts.iter().sum())?;
        let call = ExternalCall::new(Op::AllGather, from.dtype, to.count).counts(counts.iter().copied());
        let me = self.group.rank();
        self.communicator.call(call, |calls| {
            let mut start = 0;
            for (rank, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                let part = to.part(start, count);
                calls.broadcast(if rank == me { from } else { part }, part, rank)?;
                start += count;
            }
            Ok(())
        })?;
        Ok(output)
    }

    /// `output` is `Some` on the root.
    #[track_caller]
    pub(super) fn gather(self, output: Option<&Resident>, input: &Resident, root: usize) -> Result {
        check_root(self.group, root)?;
        let from = input.span();
        let call = ExternalCall::new(Op::Gather, from.dtype, from.count).root(root);
        self.communicator.call(call, |calls| {
            calls.send(from, root)?;
            let Some(output) = output else { return Ok(()) };
            (0..self.group.size())
                .try_for_each(|rank| calls.recv(output.span().part(rank * from.count, from.count), rank))
        })
    }

    /// `inputs` is `Some` on the root, one for each rank.
    #[track_caller]
    pub(super) fn scatter(self, output: &Resident, inputs: Option<&[Resident]>, root: usize) -> Result {
        check_root(self.group, root)?;
        let to = output.span();
        if self.group.rank() == root {
            let inputs = inputs.unwrap_or_default();
            check_count("inputs", inputs.len(), self.group.size())?;
            inputs.iter().try_for_each(|input| check_count("an input", input.span().count, to.count))?;
        }
        let call = ExternalCall::new(Op::Scatter, to.dtype, to.count).root(root);
        self.communicator.call(call, |calls| {
            for (rank, input) in inputs.unwrap_or_default().iter().enumerate() {
                calls.send(input.span(), rank)?;
            }
            calls.recv(to, root)
        })
    }

    #[track_caller]
    pub(super) fn reduce_scatter(self, output: &Resident, mut input: Resident, op: ReduceOp) -> Result<bool> {
        let Some(mut plan) = reduction(input.carried.dtype, op) else { return Ok(false) };
        if self.group.size() == 1 {
            if matches!(plan, Reduction::ScaledSum(_)) {
                // The input is only read, so a copy is scaled.
                input.stage()?;
            }
            plan = self.scaled_if_alone(&input, plan)?;
        }
        let (from, to) = (input.span(), output.span());
        check_count("input", from.count, to.count * self.group.size())?;
        let call = ExternalCall::new(Op::ReduceScatter, from.dtype, from.count).reduce(op);
        self.communicator.call(call, |calls| calls.reduce_scatter(from, to, plan))?;
        Ok(true)
    }

    /// Parts may have any size; every rank knows only its own.
    #[track_caller]
    pub(super) fn all_to_all(self, outputs: &[Resident], inputs: &[Resident]) -> Result {
        check_count("outputs", outputs.len(), self.group.size())?;
        check_count("inputs", inputs.len(), self.group.size())?;
        let me = self.group.rank();
        check_count("this rank's output", outputs[me].span().count, inputs[me].span().count)?;
        let call = ExternalCall::new(Op::AllToAll, inputs[0].carried.dtype, 0).counts([self.group.size()]);
        let counts = |all: &[Resident]| all.iter().map(|one| one.span().count).collect();
        let parts = Parts { sends: counts(inputs), receives: counts(outputs) };
        self.communicator.call_in_parts(call, parts, |calls| {
            inputs.iter().enumerate().try_for_each(|(rank, input)| calls.send(input.span(), rank))?;
            outputs.iter().enumerate().try_for_each(|(rank, output)| calls.recv(output.span(), rank))
        })
    }

    /// Equal parts of one tensor.
    #[track_caller]
    pub(super) fn all_to_all_parts(self, output: &Tensor, input: &Tensor) -> Result {
        let (output, input) = self.pair(output, input)?;
        let (from, to, size) = (input.span(), output.span(), self.group.size());
        check_count("output", to.count, from.count)?;
        if !from.count.is_multiple_of(size) {
            return invalid(format!(
                "all_to_all over {size} ranks needs a length that {size} divides, got {}; try all_to_all_tensors",
                from.count
            ));
        }
        let part = from.count / size;
        let call = ExternalCall::new(Op::AllToAll, from.dtype, from.count);
        self.communicator.call(call, |calls| {
            (0..size).try_for_each(|rank| {
                calls.send(from.part(rank * part, part), rank)?;
                calls.recv(to.part(rank * part, part), rank)
            })
        })?;
        self.finish([output])
    }

    /// In a group of one rank NCCL does not scale the last elements (seen in 2.28.9). There this scales the elements
    /// before a plain sum.
    fn scaled_if_alone(self, resident: &Resident, plan: Reduction) -> Result<Reduction> {
        match plan {
            _ if self.group.size() > 1 => Ok(plan),
            Reduction::ScaledSum(factor) => {
                let _ = resident.flat()?.f_mul_scalar_(factor)?;
                Ok(Reduction::SUM)
            }
            // The average of one rank is itself, and NCCL would scale it by 1.
            Reduction::AVG => Ok(Reduction::SUM),
            other => Ok(other),
        }
    }

    /// Finishes the tensors that were written. If one was copied to the host, the host has waited for the call, so its
    /// errors are known and returned.
    pub(super) fn finish(self, written: impl IntoIterator<Item = Resident>) -> Result {
        let mut has_waited = false;
        for resident in written {
            has_waited |= resident.leaves_gpu();
            resident.finish()?;
        }
        if has_waited { self.communicator.check() } else { Ok(()) }
    }

    /// All tensors, for writing.
    fn all(self, tensors: &[Tensor]) -> Result<Vec<Resident>> {
        let mut residents: Vec<Resident> = Vec::new();
        for tensor in tensors {
            let mut resident = Resident::write(tensor, self.gpu)?;
            if residents.iter().any(|other| other.overlaps(&resident)) {
                resident.stage()?;
            }
            residents.push(resident);
        }
        Ok(residents)
    }

    /// An output and an input of the same type, whose memory does not overlap.
    pub(super) fn pair(self, output: &Tensor, input: &Tensor) -> Result<(Resident, Resident)> {
        let (output, mut input) = (Resident::write(output, self.gpu)?, Resident::read(input, self.gpu)?);
        same_type(&input, &output)?;
        if output.overlaps(&input) {
            input.stage()?;
        }
        Ok((output, input))
    }
}

pub(super) fn same_type(input: &Resident, output: &Resident) -> Result {
    super::same_carried(input.carried, output.carried)
}

/// The description of one call on all tensors; `None` for an empty list.
#[track_caller]
fn announced(op: Op, residents: &[Resident]) -> Option<ExternalCall> {
    let first = residents.first()?.span();
    let count = residents.iter().map(|resident| resident.span().count).sum();
    let call = ExternalCall::new(op, first.dtype, count);
    Some(match residents {
        [_] => call,
        all => call.counts(all.iter().map(Resident::span).flat_map(|span| [span.dtype as usize, span.count])),
    })
}

pub(super) fn check_root(group: &ProcessGroup, root: usize) -> Result {
    if root < group.size() {
        return Ok(());
    }
    invalid(format!("root {root} is not in group `{}` of {} ranks", group.name(), group.size()))
}

pub(super) fn check_count(what: &str, got: usize, expected: usize) -> Result {
    if got == expected {
        return Ok(());
    }
    invalid(format!("`{what}` counts {got}, expected {expected}"))
}

fn invalid<T>(what: String) -> Result<T> {
    Err(CommError::Invalid { what }.into())
}
