//! Collectives on tensors, as methods of a process group.
//!
//! ```text
//!   tensor ─┬─▶ Host (its own memory, or a contiguous copy) ─▶ the group's collective on a slice ─▶ a copy is copied back
//!           └─▶ on a GPU ─┬─ a GPU for each rank ─▶ `over_nccl`: queued on a stream; the host does not wait
//!                         ├─ all share one GPU ───▶ `windows`: queued, through memory of that GPU; others are `Host`
//!                         └─ some share a GPU ────▶ `staged`: in pieces through host memory, or `Host`
//! ```
//! All ranks pass tensors of the same type and size. Elements are sent in the order of their indices, so that ranks may
//! differ in strides. If one tensor of a call is on a GPU, all its tensors take the GPU route, so that a rank that has
//! some of them on the CPU still joins the others. Messages (`send_tensor`, `recv_tensor`), 16-bit integers and
//! reductions that NCCL does not have go through host memory.
//!
//! Types: all of `drumline-comm`. For `bool` a sum is "any" and a product "all". Complex numbers are pairs of reals:
//! sums and averages work, other reductions are errors. `float8` can be sent but not reduced. Sparse tensors are
//! errors.
//!
//! Gradients do not flow through a collective: results have no autograd history. A leaf that requires a gradient may be
//! written; writing a tensor within an autograd graph is an error. Each write is reported to autograd.

mod carried;
mod coalesced;
mod facts;
mod gpu;
mod host;
mod over_nccl;
mod pieces;
mod places;
mod resident;
mod staged;
#[cfg(test)]
mod tests;
mod windows;

use drumline_comm::{Element, ProcessGroup, ReduceOp, Source};
use tch::Tensor;

use crate::error::TorchError;
use crate::recordable::NotRecordable;
use carried::{Carried, with_elements};
use coalesced::{batches, dtype_of};
use facts::facts;
use gpu::Gpu;
use host::{Host, overlap};
use over_nccl::same_type as same_resident;
use resident::Resident;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Collectives on tensors. See [`ProcessGroup`] for their guarantees.
///
/// ```
/// use drumline_comm::{LocalGroup, ReduceOp};
/// use drumline_torch::TensorCollectives;
/// use tch::Tensor;
///
/// LocalGroup::run(2, |group| {
///     let mut x = Tensor::from_slice(&[1f32, 2.0]) * (group.rank() as f64 + 1.0);
///     group.all_reduce_tensor(&mut x, ReduceOp::Avg).expect("both ranks call");
///     assert_eq!(x, Tensor::from_slice(&[1.5f32, 3.0]));
///     let all = group.all_gather_tensor(&Tensor::from(group.rank() as i64)).expect("both ranks call");
///     assert_eq!(all[1].int64_value(&[]), 1);
///     Ok(())
/// })?;
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
pub trait TensorCollectives {
    /// `tensor` becomes the reduction of all ranks' tensors, with the same bits on all ranks.
    #[track_caller]
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result;

    /// Like [`all_reduce_tensor`](Self::all_reduce_tensor) for each tensor, of any types, in few calls.
    #[track_caller]
    fn all_reduce_tensors(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result;

    /// The root's `tensor` is copied to all ranks.
    #[track_caller]
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result;

    /// Like [`broadcast_tensor`](Self::broadcast_tensor) for each tensor, of any types, in few calls.
    #[track_caller]
    fn broadcast_tensors(&self, tensors: &mut [Tensor], root: usize) -> Result;

    /// On the root, `tensor` becomes the reduction of all ranks' tensors; elsewhere it does not change.
    #[track_caller]
    fn reduce_tensor(&self, tensor: &mut Tensor, root: usize, op: ReduceOp) -> Result;

    /// Every rank's tensor, in rank order.
    #[track_caller]
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;

    /// Every rank's tensor, in rank order. Tensors may differ in the size of dim 0.
    #[track_caller]
    fn all_gather_uneven_tensor(&self, tensor: &Tensor) -> Result<Vec<Tensor>>;

    /// `output` becomes the concatenation of all ranks' `input`, in rank order.
    #[track_caller]
    fn all_gather_into_tensor(&self, output: &mut Tensor, input: &Tensor) -> Result;

    /// Every rank's tensor, in rank order, on the root; `None` elsewhere.
    #[track_caller]
    fn gather_tensor(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>>;

    /// The `i`-th of the root's tensors, which only the root passes, becomes rank `i`'s `output`.
    #[track_caller]
    fn scatter_tensor(&self, output: &mut Tensor, inputs: Option<&[Tensor]>, root: usize) -> Result;

    /// `input` has the elements of as many `output`s as there are ranks; the `i`-th part of the reduction of all ranks'
    /// inputs becomes rank `i`'s `output`.
    #[track_caller]
    fn reduce_scatter_tensor(&self, output: &mut Tensor, input: &Tensor, op: ReduceOp) -> Result;

    /// `inputs[i]` goes to rank `i`; `outputs[i]` comes from rank `i`. They may differ in size.
    #[track_caller]
    fn all_to_all_tensors(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result;

    /// The `i`-th part of `input` goes to rank `i`; the `i`-th part of `output` comes from rank `i`. All parts are
    /// equally long.
    #[track_caller]
    fn all_to_all_tensor(&self, output: &mut Tensor, input: &Tensor) -> Result;

    /// Sends a tensor's elements to rank `to`.
    #[track_caller]
    fn send_tensor(&self, tensor: &Tensor, to: usize, tag: u64) -> Result;

    /// Receives the elements of a tensor of this type and size. Returns the rank that sent them.
    #[track_caller]
    fn recv_tensor(&self, tensor: &mut Tensor, from: Source, tag: u64) -> Result<usize>;

    /// An error that says why, if collectives on a GPU's tensors cannot be recorded in a CUDA graph. Known once the
    /// group has made one.
    fn is_recordable(&self) -> std::result::Result<(), NotRecordable>;
}

impl TensorCollectives for ProcessGroup {
    #[track_caller]
    fn all_reduce_tensor(&self, tensor: &mut Tensor, op: ReduceOp) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*tensor])?
            && gpu.all_reduce(self, std::slice::from_ref(tensor), op)?
        {
            return Ok(());
        }
        let mut data = Host::write(tensor)?;
        data.carried.check(op)?;
        with_elements!(data.carried.dtype, T => self.all_reduce::<T>(data.elements_mut(), op)?);
        data.finish()
    }

    #[track_caller]
    fn all_reduce_tensors(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result {
        if let Some(gpu) = Gpu::of(self, &*tensors)?
            && gpu.all_reduce(self, tensors, op)?
        {
            return Ok(());
        }
        let batches = batches(tensors)?;
        batches.iter().flatten().try_for_each(|data| data.carried.check(op))?;
        for mut batch in batches {
            with_elements!(dtype_of(&batch), T => match &mut batch[..] {
                [one] => self.all_reduce::<T>(one.elements_mut(), op)?,
                all => {
                    let mut all: Vec<&mut [T]> = all.iter_mut().map(Host::elements_mut).collect();
                    self.all_reduce_coalesced(&mut all, op)?;
                }
            });
            batch.into_iter().try_for_each(Host::finish)?;
        }
        Ok(())
    }

    #[track_caller]
    fn broadcast_tensor(&self, tensor: &mut Tensor, root: usize) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*tensor])?
            && gpu.broadcast(self, std::slice::from_ref(tensor), root)?
        {
            return Ok(());
        }
        let mut data = Host::write(tensor)?;
        with_elements!(data.carried.dtype, T => self.broadcast::<T>(data.elements_mut(), root)?);
        data.finish()
    }

    #[track_caller]
    fn broadcast_tensors(&self, tensors: &mut [Tensor], root: usize) -> Result {
        if let Some(gpu) = Gpu::of(self, &*tensors)?
            && gpu.broadcast(self, tensors, root)?
        {
            return Ok(());
        }
        for mut batch in batches(tensors)? {
            with_elements!(dtype_of(&batch), T => match &mut batch[..] {
                [one] => self.broadcast::<T>(one.elements_mut(), root)?,
                all => {
                    let mut all: Vec<&mut [T]> = all.iter_mut().map(Host::elements_mut).collect();
                    self.broadcast_coalesced(&mut all, root)?;
                }
            });
            batch.into_iter().try_for_each(Host::finish)?;
        }
        Ok(())
    }

    #[track_caller]
    fn reduce_tensor(&self, tensor: &mut Tensor, root: usize, op: ReduceOp) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*tensor])?
            && let Some(nccl) = gpu.nccl(self)
            && nccl.reduce(tensor, root, op)?
        {
            return Ok(());
        }
        let mut data = Host::write(tensor)?;
        data.carried.check(op)?;
        with_elements!(data.carried.dtype, T => self.reduce::<T>(data.elements_mut(), root, op)?);
        if self.rank() == root { data.finish() } else { Ok(()) }
    }

    #[track_caller]
    fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        if let Some(gpu) = Gpu::of(self, [tensor])? {
            let all = gpu.room(tensor, &stacked(tensor, self.size()))?;
            if gpu.all_gather(self, &all, tensor)? {
                return parts(&all);
            }
        }
        let input = Host::read(tensor)?;
        let mut room = Host::room(tensor, &stacked(tensor, self.size()))?;
        with_elements!(input.carried.dtype, T => {
            self.all_gather::<T>(input.elements(), room.elements_mut())?;
        });
        unstacked(room, tensor)
    }

    #[track_caller]
    fn all_gather_uneven_tensor(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let Some(&rows) = tensor.size().first() else {
            return Err(TorchError::Unsupported {
                operation: "gather tensors of different lengths",
                reason: "a tensor without dimensions has no length; try all_gather_tensor",
            });
        };
        let lanes = facts(tensor)?.carried()?.lanes();
        let mut all_rows = vec![0; self.size()];
        self.all_gather(&[rows], &mut all_rows)?;
        let mut sizes = tensor.size();
        let row: i64 = sizes[1..].iter().product();
        let counts: Vec<usize> = all_rows.iter().map(|rows| (rows * row) as usize * lanes).collect();
        sizes[0] = all_rows.iter().sum();
        if let Some(gpu) = Gpu::of(self, [tensor])?
            && let Some(nccl) = gpu.nccl(self)
        {
            let room = Resident::room(tensor, &sizes, nccl.gpu)?;
            let all = nccl.all_gather_uneven(room, &Resident::read(tensor, nccl.gpu)?, &counts)?;
            return Ok(all.into_tensor().f_split_with_sizes(&all_rows, 0)?);
        }
        let (input, mut room) = (Host::read(tensor)?, Host::room(tensor, &sizes)?);
        with_elements!(input.carried.dtype, T => {
            self.all_gather_uneven::<T>(input.elements(), room.elements_mut(), &counts)?;
        });
        Ok(room.into_tensor(tensor.device())?.f_split_with_sizes(&all_rows, 0)?)
    }

    #[track_caller]
    fn all_gather_into_tensor(&self, output: &mut Tensor, input: &Tensor) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*output, input])?
            && gpu.all_gather(self, output, input)?
        {
            return Ok(());
        }
        let (mut output, input) = pair(output, input)?;
        with_elements!(input.carried.dtype, T => {
            self.all_gather::<T>(input.elements(), output.elements_mut())?;
        });
        output.finish()
    }

    #[track_caller]
    fn gather_tensor(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>> {
        if let Some(gpu) = Gpu::of(self, [tensor])?
            && let Some(nccl) = gpu.nccl(self)
        {
            let make = || Resident::room(tensor, &stacked(tensor, self.size()), nccl.gpu);
            let room = (self.rank() == root).then(make).transpose()?;
            nccl.gather(room.as_ref(), &Resident::read(tensor, nccl.gpu)?, root)?;
            return room.map(|room| parts(&room.into_tensor())).transpose();
        }
        let input = Host::read(tensor)?;
        let mut room =
            (self.rank() == root).then(|| Host::room(tensor, &stacked(tensor, self.size()))).transpose()?;
        with_elements!(input.carried.dtype, T => {
            self.gather::<T>(input.elements(), room.as_mut().map(Host::elements_mut), root)?;
        });
        room.map(|room| unstacked(room, tensor)).transpose()
    }

    #[track_caller]
    fn scatter_tensor(&self, output: &mut Tensor, inputs: Option<&[Tensor]>, root: usize) -> Result {
        // Only the output decides, because every rank has it.
        if let Some(gpu) = Gpu::of(self, [&*output])?
            && let Some(nccl) = gpu.nccl(self)
        {
            let inputs = inputs.filter(|_| self.rank() == root);
            gpu.check(self, inputs.unwrap_or_default())?;
            let output = Resident::write(output, nccl.gpu)?;
            let inputs = inputs.map(|inputs| residents(inputs, &output, nccl.gpu)).transpose()?;
            nccl.scatter(&output, inputs.as_deref(), root)?;
            return nccl.finish([output]);
        }
        let mut data = Host::write(output)?;
        let inputs = inputs.filter(|_| self.rank() == root).map(|inputs| all(inputs, &data)).transpose()?;
        with_elements!(data.carried.dtype, T => {
            let inputs = inputs.as_ref().map(|inputs| end_to_end::<T>(inputs));
            self.scatter::<T>(inputs.as_deref(), data.elements_mut(), root)?;
        });
        data.finish()
    }

    #[track_caller]
    fn reduce_scatter_tensor(&self, output: &mut Tensor, input: &Tensor, op: ReduceOp) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*output, input])?
            && gpu.reduce_scatter(self, output, input, op)?
        {
            return Ok(());
        }
        let (mut output, input) = pair(output, input)?;
        output.carried.check(op)?;
        with_elements!(input.carried.dtype, T => {
            self.reduce_scatter::<T>(input.elements(), output.elements_mut(), op)?;
        });
        output.finish()
    }

    #[track_caller]
    fn all_to_all_tensors(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result {
        if let Some(gpu) = Gpu::of(self, outputs.iter().chain(inputs))?
            && let Some(nccl) = gpu.nccl(self)
            && !outputs.is_empty()
        {
            let write = |output| Resident::write(output, nccl.gpu);
            let outputs = outputs.iter().map(write).collect::<Result<Vec<_>>>()?;
            outputs.iter().try_for_each(|output| same_resident(output, &outputs[0]))?;
            nccl.all_to_all(&outputs, &residents(inputs, &outputs[0], nccl.gpu)?)?;
            return nccl.finish(outputs);
        }
        let outputs = outputs.iter().map(Host::write).collect::<Result<Vec<_>>>()?;
        let Some(first) = outputs.first() else {
            let expected = format!("one for each of {} ranks", self.size());
            return Err(TorchError::value("the number of outputs", 0, expected));
        };
        let inputs = all(inputs, first)?;
        outputs.iter().try_for_each(|output| same_type(output, first))?;
        with_elements!(first.carried.dtype, T => {
            let (sends, receives) = (lens(&inputs), lens(&outputs));
            let mut received = vec![T::default(); receives.iter().sum()];
            self.all_to_all_uneven::<T>(&end_to_end(&inputs), &sends, &mut received, &receives)?;
            let mut rest = &received[..];
            for mut output in outputs {
                let (part, after) = rest.split_at(output.len());
                output.elements_mut().copy_from_slice(part);
                output.finish()?;
                rest = after;
            }
        });
        Ok(())
    }

    #[track_caller]
    fn all_to_all_tensor(&self, output: &mut Tensor, input: &Tensor) -> Result {
        if let Some(gpu) = Gpu::of(self, [&*output, input])?
            && let Some(nccl) = gpu.nccl(self)
        {
            return nccl.all_to_all_parts(output, input);
        }
        let (mut output, input) = pair(output, input)?;
        with_elements!(input.carried.dtype, T => {
            self.all_to_all::<T>(input.elements(), output.elements_mut())?;
        });
        output.finish()
    }

    #[track_caller]
    fn send_tensor(&self, tensor: &Tensor, to: usize, tag: u64) -> Result {
        let data = Host::read(tensor)?;
        with_elements!(data.carried.dtype, T => Ok(self.send::<T>(data.elements(), to, tag)?))
    }

    #[track_caller]
    fn recv_tensor(&self, tensor: &mut Tensor, from: Source, tag: u64) -> Result<usize> {
        let mut data = Host::write(tensor)?;
        let rank = with_elements!(data.carried.dtype, T => self.recv::<T>(data.elements_mut(), from, tag)?);
        data.finish()?;
        Ok(rank)
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        gpu::is_recordable(self)
    }
}

/// An output and an input of the same type, whose memory does not overlap.
fn pair(output: &Tensor, input: &Tensor) -> Result<(Host, Host)> {
    let (output, mut input) = (Host::write(output)?, Host::read(input)?);
    same_type(&input, &output)?;
    if overlap(&output.span(), &input.span()) {
        input.stage()?;
    }
    Ok((output, input))
}

/// All tensors, which must be of the type of `like`.
fn all(tensors: &[Tensor], like: &Host) -> Result<Vec<Host>> {
    let tensors = tensors.iter().map(Host::read).collect::<Result<Vec<_>>>()?;
    tensors.iter().try_for_each(|tensor| same_type(tensor, like))?;
    Ok(tensors)
}

/// All tensors on a GPU, which must be of the type of `like`.
fn residents(tensors: &[Tensor], like: &Resident, gpu: usize) -> Result<Vec<Resident>> {
    let read = |tensor| Resident::read(tensor, gpu);
    let tensors = tensors.iter().map(read).collect::<Result<Vec<_>>>()?;
    tensors.iter().try_for_each(|tensor| same_resident(tensor, like))?;
    Ok(tensors)
}

fn same_type(input: &Host, output: &Host) -> Result {
    same_carried(input.carried, output.carried)
}

fn same_carried(input: Carried, output: Carried) -> Result {
    if input == output {
        return Ok(());
    }
    Err(TorchError::Kind {
        what: "the input of a collective".to_owned(),
        expected: format!("{output}, as the output; try to_kind(..)"),
        got: input.to_string(),
    })
}

fn lens(tensors: &[Host]) -> Vec<usize> {
    tensors.iter().map(Host::len).collect()
}

fn end_to_end<T: Element>(tensors: &[Host]) -> Vec<T> {
    tensors.iter().flat_map(|tensor| tensor.elements::<T>()).copied().collect()
}

/// The size of the stack of all ranks' tensors.
fn stacked(tensor: &Tensor, ranks: usize) -> Vec<i64> {
    [&[ranks as i64], &tensor.size()[..]].concat()
}

/// The gathered tensor of each rank, on the device of `like`.
fn unstacked(room: Host, like: &Tensor) -> Result<Vec<Tensor>> {
    parts(&room.into_tensor(like.device())?)
}

fn parts(all: &Tensor) -> Result<Vec<Tensor>> {
    (0..all.size()[0]).map(|part| Ok(all.f_select(0, part)?)).collect()
}
