//! Tensors that ranks reduce together, in the symmetric heap or on a GPU; tensors over foreign memory and within
//! others.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use drumline_comm::{Element, ProcessGroup, ReduceOp, bf16, f16};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::bytes::bytes;
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

/// A one-dimensional tensor in the symmetric heap, which the ranks of a node reduce without copies. On a GPU it is in
/// GPU memory, and [`TensorCollectives`] reduces it.
///
/// The memory lives until the last tensor over it is dropped, even if that is after this value. As everywhere in
/// libtorch, nothing guards tensors over the same memory: a part on which a collective runs must not be used until it
/// has ended.
#[derive(Debug)]
pub struct HeapTensor {
    tensor: Tensor,
    kind: Kind,
    device: Device,
    data: usize,
    len: usize,
}

// SAFETY: threads may share a handle of libtorch, because its reference count is atomic. Access to the elements is up
// to the users, as with any two handles of one tensor.
unsafe impl Sync for HeapTensor {}

/// Runs `$body` with `$T` as the element type of the kind.
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
            other => Err(TorchError::Kind {
                what: "a tensor of a collective".to_owned(),
                expected: "an integer, a float or Bool".to_owned(),
                got: format!("{other:?}"),
            }),
        }
    }};
}

impl HeapTensor {
    /// Zeros in the symmetric heap. All ranks of the group call it together.
    pub fn zeros(group: &ProcessGroup, kind: Kind, len: usize) -> Result<Self, TorchError> {
        let mut buffer = group.heap_alloc::<u8>(len * kind.elt_size_in_bytes())?;
        let data = buffer.as_mut_ptr();
        // SAFETY: the memory has `len` elements and lives as long as the buffer, which the tensor keeps alive.
        let tensor = unsafe { tensor_over(data.cast(), kind, &[len as i64], Closure::keeping(buffer)) }?;
        Ok(Self { tensor, kind, device: Device::Cpu, data: data as usize, len })
    }

    /// Zeros in the heap for `Device::Cpu`, else on that GPU. All ranks of the group call it together.
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

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether `tensor` is in this memory.
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

    /// Divides the elements of `range` into as many equal parts as there are ranks; part `i` becomes rank `i`'s.
    #[track_caller]
    pub fn all_gather_in_place(&self, group: &ProcessGroup, range: Range<usize>) -> Result<(), TorchError> {
        if self.device != Device::Cpu {
            let count = range.len() / group.size();
            let own = range.start + group.rank() * count;
            return group.all_gather_into_tensor(&mut self.part(range)?, &self.part(own..own + count)?);
        }
        with_elements!(self.kind, T => Ok(group.all_gather_in_place(self.elements::<T>(range))?))
    }

    /// Divides the elements of `range` into as many equal parts as there are ranks; this rank's part becomes that of the
    /// reduction.
    #[track_caller]
    pub fn reduce_scatter_in_place(
        &self,
        group: &ProcessGroup,
        range: Range<usize>,
        op: ReduceOp,
    ) -> Result<(), TorchError> {
        if self.device != Device::Cpu {
            let count = range.len() / group.size();
            let own = range.start + group.rank() * count;
            return group.reduce_scatter_tensor(&mut self.part(own..own + count)?, &self.part(range)?, op);
        }
        with_elements!(self.kind, T => Ok(group.reduce_scatter_in_place(self.elements::<T>(range), op)?))
    }

    /// The elements of `range`, which share the memory.
    pub fn part(&self, range: Range<usize>) -> Result<Tensor, TorchError> {
        Ok(self.tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
    }

    #[expect(clippy::mut_from_ref, reason = "libtorch's memory is shared between handles")]
    fn elements<T: Element>(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: the range is within the memory, which this keeps alive; `with_elements` chose `T` by the tensor's
        // kind.
        unsafe { std::slice::from_raw_parts_mut((self.data as *mut T).add(range.start), range.len()) }
    }
}

/// Values for a part of a flat memory.
#[derive(Debug)]
pub struct ValuesAt {
    /// The first element.
    pub offset: usize,
    /// A contiguous tensor in host memory, of the memory's kind.
    pub values: Tensor,
}

/// A one-dimensional tensor of which the ranks of each node have one copy together. All ranks of the group call it
/// together. Each rank writes its `first` values, and what no rank writes is zero. Afterwards the program decides who
/// writes which element, and orders writes and reads by collectives.
pub fn node_shared(
    group: &ProcessGroup,
    kind: Kind,
    len: usize,
    first: &[ValuesAt],
) -> Result<Tensor, TorchError> {
    let size = kind.elt_size_in_bytes();
    let first = first.iter().map(|ValuesAt { offset, values }| Ok((offset * size, bytes_of(values, kind)?)));
    let first: Vec<(usize, &[u8])> = first.collect::<Result<_, TorchError>>()?;
    let buffer = group.shared_alloc::<u8>(len * size, &|memory| {
        first.iter().try_for_each(|(offset, bytes)| memory.write_at(*offset, bytes))
    })?;
    let data = buffer.as_ptr();
    // SAFETY: the memory has `len` elements and lives as long as the buffer, which the tensor keeps alive.
    unsafe { tensor_over(data.cast(), kind, &[len as i64], Closure::keeping(buffer)) }
}

/// The bytes of a tensor, which must be of this kind.
fn bytes_of(tensor: &Tensor, kind: Kind) -> Result<&[u8], TorchError> {
    if tensor.f_kind()? != kind {
        let (expected, got) = (format!("{kind:?}"), format!("{:?}", tensor.f_kind()?));
        return Err(TorchError::Kind { what: "a first value".to_owned(), expected, got });
    }
    bytes(tensor)
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
        let expected = format!("as many as a tensor of shape {sizes:?} has");
        return Err(TorchError::value("the number of elements", elements.len(), expected));
    }
    let data = elements.as_mut_ptr();
    // SAFETY: the vector has that many elements, does not move, and is kept alive by the tensor.
    unsafe { tensor_over(data.cast(), T::KIND, sizes, Closure::keeping(elements)) }
}

/// # Safety
/// `data` holds the elements of `sizes`, of that kind, and they live until `owner` is dropped.
pub(crate) unsafe fn tensor_over(
    data: *mut c_void,
    kind: Kind,
    sizes: &[i64],
    owner: Closure,
) -> Result<Tensor, TorchError> {
    // tch numbers these kinds as libtorch does.
    let (mut out, kind) = (std::ptr::null_mut(), kind as i8);
    // SAFETY: the caller's promise; the result is a new handle that we own.
    unsafe {
        let message = drumline_tensor_over(data, sizes.as_ptr(), sizes.len(), kind, owner, &mut out);
        check(message, "cannot make a tensor over memory")?;
        Ok(Tensor::from_ptr(out))
    }
}

/// A tensor with `like`'s sizes and strides within `flat`, starting at `offset` elements. It shares the memory, but is
/// not a view for autograd.
pub fn tensor_within(flat: &Tensor, offset: usize, like: &Tensor) -> Result<Tensor, TorchError> {
    let mut out = std::ptr::null_mut();
    // SAFETY: the handles are valid for the call; libtorch checks that the tensor is within the storage.
    unsafe {
        let (flat, like) = (flat.as_ptr().cast_mut(), like.as_ptr().cast_mut());
        check(
            drumline_tensor_within(flat, offset as i64, like, &mut out),
            "cannot make a tensor within another",
        )?;
        Ok(Tensor::from_ptr(out))
    }
}
