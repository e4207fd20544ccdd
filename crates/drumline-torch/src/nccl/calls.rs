//! NCCL's calls, on memory of the communicator's GPU. They are made between `ncclGroupStart` and `ncclGroupEnd`, and
//! queued.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use drumline_comm::DType;

use super::library::{Code, Nccl, RawComm};
use super::plan::{Element, Reduction, element};
use crate::error::TorchError;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// A tensor's memory on the GPU: `count` elements at `data`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) data: *mut c_void,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

impl Span {
    fn element(self) -> (usize, c_int) {
        let Element { code, lanes } = element(self.dtype);
        (self.count * lanes, code)
    }

    /// `count` elements, starting with the `start`-th.
    pub(crate) fn part(self, start: usize, count: usize) -> Self {
        assert!(start + count <= self.count, "{start}+{count} of {} elements", self.count);
        Self { data: self.data.wrapping_byte_add(start * self.dtype.size()), count, ..self }
    }
}

/// Makes calls between `ncclGroupStart` and `ncclGroupEnd`.
pub(crate) struct Calls {
    nccl: &'static Nccl,
    comm: RawComm,
    stream: *mut c_void,
    made_ops: Vec<c_int>,
}

impl Calls {
    /// Calls on a stream of the communicator's GPU. The communicator stays open until this is dropped.
    pub(super) fn new(nccl: &'static Nccl, comm: RawComm, stream: *mut c_void) -> Self {
        Self { nccl, comm, stream, made_ops: Vec::new() }
    }
}

/// The calls. The memory is on the communicator's GPU and is valid until the current stream is past the call: if a
/// tensor is dropped before that, only later work on that stream reuses its memory.
impl Calls {
    pub(crate) fn all_reduce(&mut self, input: Span, output: Span, how: Reduction) -> Result {
        let ((count, code), op) = (input.element(), self.op(how, input.dtype)?);
        let Self { nccl, comm, .. } = *self;
        // SAFETY: see the comment of the block; the communicator is open.
        self.made(unsafe { (nccl.all_reduce)(input.data, output.data, count, code, op, comm, self.stream) })
    }

    pub(crate) fn reduce(&mut self, input: Span, output: Span, how: Reduction, root: usize) -> Result {
        let ((count, code), op, root) = (input.element(), self.op(how, input.dtype)?, index(root)?);
        let Self { nccl, comm, .. } = *self;
        // SAFETY: as above.
        self.made(unsafe { (nccl.reduce)(input.data, output.data, count, code, op, root, comm, self.stream) })
    }

    pub(crate) fn reduce_scatter(&mut self, input: Span, output: Span, how: Reduction) -> Result {
        let ((count, code), op) = (output.element(), self.op(how, input.dtype)?);
        let Self { nccl, comm, .. } = *self;
        // SAFETY: as above.
        self.made(unsafe {
            (nccl.reduce_scatter)(input.data, output.data, count, code, op, comm, self.stream)
        })
    }

    pub(crate) fn broadcast(&mut self, input: Span, output: Span, root: usize) -> Result {
        let ((count, code), root) = (output.element(), index(root)?);
        let Self { nccl, comm, .. } = *self;
        // SAFETY: as above.
        self.made(unsafe { (nccl.broadcast)(input.data, output.data, count, code, root, comm, self.stream) })
    }

    pub(crate) fn all_gather(&mut self, input: Span, output: Span) -> Result {
        let ((count, code), nccl) = (input.element(), self.nccl);
        // SAFETY: as above.
        self.made(unsafe { (nccl.all_gather)(input.data, output.data, count, code, self.comm, self.stream) })
    }

    pub(crate) fn send(&mut self, data: Span, to: usize) -> Result {
        let ((count, code), to, nccl) = (data.element(), index(to)?, self.nccl);
        if count == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        self.made(unsafe { (nccl.send)(data.data, count, code, to, self.comm, self.stream) })
    }

    pub(crate) fn recv(&mut self, data: Span, from: usize) -> Result {
        let ((count, code), from, nccl) = (data.element(), index(from)?, self.nccl);
        if count == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        self.made(unsafe { (nccl.recv)(data.data, count, code, from, self.comm, self.stream) })
    }

    fn op(&mut self, how: Reduction, dtype: DType) -> Result<c_int> {
        let factor = match how {
            Reduction::Ready(code) => return Ok(code),
            Reduction::ScaledSum(factor) => factor,
        };
        let (mut op, mut bytes) = (0, scalar(factor, dtype));
        let (data, code) = (bytes.as_mut_ptr().cast(), element(dtype).code);
        let nccl = self.nccl;
        // SAFETY: reads the factor at once (1: it is in host memory), and writes one number.
        self.made(unsafe { (nccl.create_scaled_sum)(&mut op, data, code, 1, self.comm) })?;
        self.made_ops.push(op);
        Ok(op)
    }

    fn made(&self, code: Code) -> Result {
        self.nccl.check(code, "a collective from GPU to GPU was refused")
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        for op in &self.made_ops {
            // SAFETY: made for this communicator; NCCL keeps it as long as calls need it.
            unsafe { (self.nccl.destroy_op)(*op, self.comm) };
        }
    }
}

/// The bytes of a factor in the type of the elements.
fn scalar(factor: f64, dtype: DType) -> [u8; 8] {
    let mut bytes = [0; 8];
    let mut put = |value: &[u8]| bytes[..value.len()].copy_from_slice(value);
    match dtype {
        DType::F64 => put(&factor.to_ne_bytes()),
        DType::F32 => put(&(factor as f32).to_ne_bytes()),
        DType::F16 => put(&half::f16::from_f64(factor).to_ne_bytes()),
        // No other type is scaled: see `plan`.
        _ => put(&half::bf16::from_f64(factor).to_ne_bytes()),
    }
    bytes
}

pub(super) fn index(rank: usize) -> Result<c_int> {
    c_int::try_from(rank).map_err(|_| TorchError::value("a rank of NCCL", rank, "less than 2^31"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_begin_where_the_elements_before_them_end() {
        let span = Span { data: std::ptr::without_provenance_mut(64), count: 10, dtype: DType::Bf16 };
        let part = span.part(3, 4);
        assert_eq!((part.data.addr(), part.count), (70, 4));
        assert_eq!(Span { dtype: DType::I16, ..span }.element(), (20, 1), "as bytes");
    }

    #[test]
    fn a_factor_has_the_type_of_the_elements() {
        assert_eq!(scalar(0.5, DType::F64), 0.5f64.to_ne_bytes());
        assert_eq!(scalar(0.5, DType::F32)[..4], 0.5f32.to_ne_bytes());
        assert_eq!(scalar(0.5, DType::Bf16)[..2], half::bf16::from_f32(0.5).to_ne_bytes());
    }
}
