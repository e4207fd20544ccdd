//! Coalesced calls: several collectives of one kind become one call and one message instead of many small ones.
//!
//! ```text
//!   rank 0  [a0] [b0 b0]  ─▶  a0 b0 b0          all_gather: everybody gets  a0 b0 b0 a1 b1 b1,
//!   rank 1  [a1] [b1 b1]  ─▶  a1 b1 b1                      taken apart into  [a0 a1] [b0 b0 b1 b1]
//! ```

use super::{ProcessGroup, check_reduction};
use crate::call::{Call, Op};
use crate::element::Element;
use crate::error::CommError;
use crate::reduce::ReduceOp;
use crate::slices::total;

type Result<T = ()> = std::result::Result<T, CommError>;

/// Precedes the lengths in the fingerprint, so that they are not mistaken for the counts of an uneven call.
const COALESCED: usize = usize::MAX;

/// Coalesced collectives. Every rank passes the same number of buffers with the same lengths, in the same order.
impl ProcessGroup {
    /// As [`all_reduce`](Self::all_reduce) of each buffer.
    #[track_caller]
    pub fn all_reduce_coalesced<T: Element>(&self, buffers: &mut [&mut [T]], op: ReduceOp) -> Result {
        check_reduction(op, T::DTYPE)?;
        let call = of_all::<T>(Call::new(Op::AllReduce), &lens(buffers)).reduce(op);
        joined(buffers, |data| self.run(call, |tiers, cx| tiers.all_reduce(cx, data, op)))
    }

    /// As [`broadcast`](Self::broadcast) of each buffer.
    #[track_caller]
    pub fn broadcast_coalesced<T: Element>(&self, buffers: &mut [&mut [T]], root: usize) -> Result {
        self.check_root(root)?;
        let call = of_all::<T>(Call::new(Op::Broadcast), &lens(buffers)).root(root);
        joined(buffers, |data| self.run(call, |tiers, cx| tiers.broadcast(cx, data, root)))
    }

    /// As [`all_gather`](Self::all_gather) of each input into the output with the same index.
    ///
    /// ```
    /// use drumline_comm::LocalGroup;
    ///
    /// LocalGroup::run(2, |group| {
    ///     let me = group.rank() as f32;
    ///     let (mut weights, mut biases) = ([0.0; 4], [0.0; 2]);
    ///     group.all_gather_coalesced(&[&[me, me], &[me + 0.5]], &mut [&mut weights, &mut biases])?;
    ///     assert_eq!((weights, biases), ([0.0, 0.0, 1.0, 1.0], [0.5, 1.5]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced<T: Element>(&self, inputs: &[&[T]], outputs: &mut [&mut [T]]) -> Result {
        let lens = lens(inputs);
        let sizes = self::lens(outputs);
        self.check_pairs::<T>(
            Named { name: "inputs", lens: &lens },
            Named { name: "outputs", lens: &sizes },
        )?;
        let call = of_all::<T>(Call::new(Op::AllGather), &lens);
        let input = inputs.concat();
        let mut all = vec![T::zeroed(); input.len() * self.size()];
        let counts = vec![input.len(); self.size()];
        self.run(call, |tiers, cx| tiers.gather_all(cx, &input, &mut all, &counts))?;
        let mut rest = &all[..];
        for rank in 0..self.size() {
            for (input, output) in inputs.iter().zip(outputs.iter_mut()) {
                let (cell, after) = rest.split_at(input.len());
                output[rank * cell.len()..][..cell.len()].copy_from_slice(cell);
                rest = after;
            }
        }
        Ok(())
    }

    /// As [`reduce_scatter`](Self::reduce_scatter) of each input into the output with the same index.
    ///
    /// ```
    /// use drumline_comm::{LocalGroup, ReduceOp};
    ///
    /// LocalGroup::run(2, |group| {
    ///     let (mut weight, mut bias) = ([0; 2], [0]);
    ///     group.reduce_scatter_coalesced(
    ///         &[&[1, 2, 3, 4], &[5, 6]],
    ///         &mut [&mut weight, &mut bias],
    ///         ReduceOp::Sum,
    ///     )?;
    ///     assert_eq!((weight, bias), if group.rank() == 0 { ([2, 4], [10]) } else { ([6, 8], [12]) });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter_coalesced<T: Element>(
        &self,
        inputs: &[&[T]],
        outputs: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result {
        check_reduction(op, T::DTYPE)?;
        let lens = lens(outputs);
        let sizes = self::lens(inputs);
        self.check_pairs::<T>(
            Named { name: "outputs", lens: &lens },
            Named { name: "inputs", lens: &sizes },
        )?;
        let call = of_all::<T>(Call::new(Op::ReduceScatter), &lens).reduce(op);
        let cell = |rank: usize, i: usize| &inputs[i][rank * lens[i]..][..lens[i]];
        let cells = (0..self.size()).flat_map(|rank| (0..inputs.len()).map(move |i| cell(rank, i)));
        let input = cells.collect::<Vec<_>>().concat();
        joined(outputs, |output| {
            let counts = vec![output.len(); self.size()];
            self.run(call, |tiers, cx| tiers.reduce_scatter(cx, &input, output, &counts, op))
        })
    }

    /// Checks that there is a longer buffer for each shorter one, with room for the shorter one's data of all ranks.
    #[track_caller]
    fn check_pairs<T: Element>(&self, shorter: Named<'_>, longer: Named<'_>) -> Result {
        let Named { name: short, lens } = shorter;
        let Named { name: long, lens: sizes } = longer;
        if lens.len() != sizes.len() {
            let what =
                format!("{} `{short}` and {} `{long}`, expected equally many", lens.len(), sizes.len());
            return Err(CommError::invalid(what));
        }
        for (i, (&len, &size)) in lens.iter().zip(sizes).enumerate() {
            if len.checked_mul(self.size()) != Some(size) {
                return Err(CommError::invalid(format!(
                    "`{long}[{i}]` has {size} elements, expected {} ranks times the {len} of `{short}[{i}]`",
                    self.size()
                )));
            }
        }
        // One buffer may be passed several times, so the lengths may add up to more than memory can hold.
        match total(sizes.iter().copied(), size_of::<T>()) {
            Some(_) => Ok(()),
            None => Err(CommError::invalid(format!("`{long}` are together longer than memory can hold"))),
        }
    }
}

/// An argument's name and the lengths of its buffers.
#[derive(Clone, Copy)]
struct Named<'a> {
    name: &'a str,
    lens: &'a [usize],
}

/// The call for all buffers of these lengths together.
fn of_all<T: Element>(call: Call, lens: &[usize]) -> Call {
    let count = lens.iter().sum();
    call.of(T::DTYPE, count).extra(std::iter::once(COALESCED).chain(lens.iter().copied()))
}

fn lens<T>(buffers: &[impl std::ops::Deref<Target = [T]>]) -> Vec<usize> {
    buffers.iter().map(|buffer| buffer.len()).collect()
}

/// Runs `act` on one buffer that holds the data of all, and copies the result back.
fn joined<T: Element>(buffers: &mut [&mut [T]], act: impl FnOnce(&mut [T]) -> Result) -> Result {
    let mut joined = buffers.concat();
    act(&mut joined)?;
    let mut rest = &joined[..];
    for buffer in buffers {
        let (mine, after) = rest.split_at(buffer.len());
        buffer.copy_from_slice(mine);
        rest = after;
    }
    Ok(())
}
