//! Tensors that ranks reduce together, over the symmetric heap or on a GPU, and tensors within tensors.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use drumline_comm::{Element, ProcessGroup, ReduceOp, bf16, f16};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::collectives::TensorCollectives;
use crate::error::TorchError;
use crate::status::{Closure, Message, check};

unsafe extern "C" {
    fn drumline_tensor_over(
        data: *mut c_void,
        sizes: *const i64,
        dims: usize,
        kind: i8,
        owner: Closure,
        out: *mut *mut C_tensor,
    ) -> Message;
    fn drumline_tensor_within(
        flat: *mut C_tensor,
        offset: i64,
        like: *mut C_tensor,
        out: *mut *mut C_tensor,
    ) -> Message;
}

/// A tensor of one dimension in the symmetric heap: the ranks of a node reduce it without copies. Or one in a GPU's memory, which is reduced as
/// [`TensorCollectives`] does it.
///
/// The memory lives until the last tensor over it is gone, also after this. As everywhere in libtorch, tensors over the same memory know
/// nothing of each other: who starts a collective on a part of it must leave that part alone until it has ended.
#[derive(Debug)]
pub struct HeapTensor {
    tensor: Tensor,
    kind: Kind,
    device: Device,
    data: usize,
    len: usize,
}

// SAFETY: a handle of libtorch may be used by several threads, as its count is atomic; what is done to the elements is up to the users,
// as with any two handles of one tensor.
unsafe impl Sync for HeapTensor {}

/// Does the same with the elements of each kind that collectives know.
macro_rules! with_elements {
    ($kind:expr, $T:ident => $body:expr) => {{
        macro_rules! of {
            ($element:ty) => {{
                type $T = $element;
                $body
            }};
        }
        match $kind {
            Kind::Float => of!(f32),
            Kind::Double => of!(f64),
            Kind::Half => of!(f16),
            Kind::BFloat16 => of!(bf16),
            Kind::Uint8 => of!(u8),
            Kind::Int8 => of!(i8),
            Kind::Int16 => of!(i16),
            Kind::Int => of!(i32),
            Kind::Int64 => of!(i64),
            Kind::Bool => of!(bool),
            other => Err(TorchError::Unfit(format!("no collective on elements of kind {other:?}"))),
        }
    }};
}

impl HeapTensor {
    /// Zeros, made by all ranks of the group together.
    pub fn zeros(group: &ProcessGroup, kind: Kind, len: usize) -> Result<Self, TorchError> {
        let mut buffer = group.heap_alloc::<u8>(len * kind.elt_size_in_bytes())?;
        let data = buffer.as_mut_ptr();
        // SAFETY: the memory has `len` elements and lives as long as the buffer, which the tensor keeps.
        let tensor = unsafe { tensor_over(data.cast(), kind, &[len as i64], Closure::keeping(buffer)) }?;
        Ok(Self { tensor, kind, device: Device::Cpu, data: data as usize, len })
    }

    /// Zeros where other tensors are: in the heap for those of the host, else on their GPU. Made by all ranks of the group together.
    pub fn zeros_on(
        group: &ProcessGroup,
        device: Device,
        kind: Kind,
        len: usize,
    ) -> Result<Self, TorchError> {
        if device == Device::Cpu {
            return Self::zeros(group, kind, len);
        }
        let tensor = Tensor::f_zeros([len as i64], (kind, device))?;
        let data = tensor.data_ptr() as usize;
        Ok(Self { tensor, kind, device, data, len })
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The kind of its elements.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether `tensor` lies in this memory.
    pub fn holds(&self, tensor: &Tensor) -> bool {
        let bytes = self.len * self.kind.elt_size_in_bytes();
        (self.data..self.data + bytes).contains(&(tensor.data_ptr() as usize))
    }

    /// All-reduces the elements of `range`.
    #[track_caller]
    pub fn all_reduce(
        &self,
        group: &ProcessGroup,
        range: Range<usize>,
        op: ReduceOp,
    ) -> Result<(), TorchError> {
        if self.device != Device::Cpu {
            return group.all_reduce_tensor(&mut self.part(range)?, op);
        }
        with_elements!(self.kind, T => Ok(group.all_reduce(self.elements::<T>(range), op)?))
    }

    /// Broadcasts the elements of `range` from `root`.
    #[track_caller]
    pub fn broadcast(
        &self,
        group: &ProcessGroup,
        range: Range<usize>,
        root: usize,
    ) -> Result<(), TorchError> {
        if self.device != Device::Cpu {
            return group.broadcast_tensor(&mut self.part(range)?, root);
        }
        with_elements!(self.kind, T => Ok(group.broadcast(self.elements::<T>(range), root)?))
    }

    fn part(&self, range: Range<usize>) -> Result<Tensor, TorchError> {
        Ok(self.tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
    }

    #[expect(clippy::mut_from_ref, reason = "memory of libtorch, which is shared by nature")]
    fn elements<T: Element>(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: the range lies within the memory, which this keeps; `T` is of the tensor's kind, as `with_elements` chose it.
        unsafe { std::slice::from_raw_parts_mut((self.data as *mut T).add(range.start), range.len()) }
    }
}

/// A tensor over a vector's memory, without a copy.
///
/// ```
/// let image = drumline_torch::tensor_from_vec(vec![1u8, 2, 3, 4, 5, 6], &[2, 3])?;
/// assert_eq!(image.size(), [2, 3]);
/// assert!(drumline_torch::tensor_from_vec(vec![1f32], &[2]).is_err());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn tensor_from_vec<T: tch::kind::Element + Send + 'static>(
    mut elements: Vec<T>,
    sizes: &[i64],
) -> Result<Tensor, TorchError> {
    if sizes.iter().product::<i64>() != elements.len() as i64 || sizes.iter().any(|size| *size < 0) {
        return Err(TorchError::Unfit(format!(
            "{} elements do not make a tensor of {sizes:?}",
            elements.len()
        )));
    }
    let data = elements.as_mut_ptr();
    // SAFETY: the vector has that many elements, stays where it is, and is kept by the tensor.
    unsafe { tensor_over(data.cast(), T::KIND, sizes, Closure::keeping(elements)) }
}

/// # Safety
/// `data` holds the elements of `sizes`, of that kind, and they live until `owner` is dropped.
unsafe fn tensor_over(
    data: *mut c_void,
    kind: Kind,
    sizes: &[i64],
    owner: Closure,
) -> Result<Tensor, TorchError> {
    // The kinds that have elements here are numbered as in libtorch.
    let (mut out, kind) = (std::ptr::null_mut(), kind as i8);
    // SAFETY: passed on to the caller; what comes back is a new handle, ours.
    unsafe {
        let message = drumline_tensor_over(data, sizes.as_ptr(), sizes.len(), kind, owner, &mut out);
        check(message, "cannot make a tensor over memory")?;
        Ok(Tensor::from_ptr(out))
    }
}

/// A tensor of `like`'s sizes and strides within `flat`, from `offset` elements on: the same memory, but no view for autograd.
pub fn tensor_within(flat: &Tensor, offset: usize, like: &Tensor) -> Result<Tensor, TorchError> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the handles are good for the call; libtorch checks that the tensor lies within the storage.
    unsafe {
        let (flat, like) = (flat.as_ptr().cast_mut(), like.as_ptr().cast_mut());
        check(
            drumline_tensor_within(flat, offset as i64, like, &mut out),
            "cannot make a tensor within another",
        )?;
        Ok(Tensor::from_ptr(out))
    }
}
