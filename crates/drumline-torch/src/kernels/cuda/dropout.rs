//! Dropout by position on a GPU: alone, of a ReLU, or added to something, in one pass and without a stored mask.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, is_aligned, multiprocessors, pointer};
use crate::cuda::Grid;
use crate::error::TorchError;
use crate::kernels::Rate;
use crate::masks::{DevicePosition, DrawnStep, Position};

/// The source of the bits, for all kernels that drop.
pub(super) const MASK: &str = include_str!("mask.cu");

static SOURCE: Source = Source::new(&[MASK, include_str!("dropout.cu")]);

const THREADS: u32 = 256;
/// Blocks per multiprocessor.
const RESIDENT: u32 = 8;
/// The maximum of blocks in the second dimension.
const MOST_ROWS: u64 = 65535;

/// The layout is that of `Mask` in the source.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RawMask {
    step: u64,
    per_sample: i64,
    first: i64,
    stride: i64,
    keys: [u32; 2],
    below: u32,
    scale: f32,
}

/// The mask of tensors of one size on a GPU.
#[derive(Debug)]
pub(in crate::kernels) struct CudaMask {
    raw: RawMask,
    /// The step of the forward.
    drawn: DrawnStep,
    /// Keeps the memory of the step.
    step: Tensor,
    samples: u64,
    device: usize,
}

/// What a kernel does with the elements.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernels) enum Dropped<'a> {
    Alone,
    /// Added to a tensor of the same size, in the same type or in f32.
    Onto(&'a Tensor),
    OfRelu,
    /// Gradients of [`OfRelu`](Self::OfRelu), whose result is this.
    WherePositive(&'a Tensor),
}

/// Whether the kernels support tensors of this type.
pub(in crate::kernels) fn drops_on(device: Device, kind: Kind) -> bool {
    matches!(device, Device::Cuda(device) if Element::on(device, kind).is_some())
}

impl CudaMask {
    /// The mask of tensors of the size of `xs`; `None` if the step is not on its GPU.
    pub(in crate::kernels) fn new(position: Position, xs: &Tensor, rate: Rate) -> Option<Self> {
        let Device::Cuda(device) = xs.device() else { return None };
        let DevicePosition { keys, drawn, step, first, stride, count } =
            position.on_device(xs.device(), &xs.size())?;
        let per_sample = xs.numel() as i64 / (count as i64).max(1);
        let (first, stride) = (first as i64, stride as i64);
        let raw = RawMask {
            step: step.data_ptr() as u64,
            per_sample,
            first,
            stride,
            keys,
            below: rate.below,
            scale: rate.scale,
        };
        Some(Self { raw, drawn, step, samples: count, device })
    }

    pub(in crate::kernels) fn shared(&self) -> Self {
        let Self { raw, samples, device, .. } = *self;
        Self { raw, drawn: self.drawn.clone(), step: self.step.shallow_clone(), samples, device }
    }

    /// For a kernel that is launched now. An error if another step has begun since the forward, whose masks it would draw.
    pub(super) fn raw(&self) -> Result<&RawMask, TorchError> {
        self.drawn.check()?;
        Ok(&self.raw)
    }

    pub(in crate::kernels) fn run(&self, xs: &Tensor, how: Dropped<'_>) -> Result<Tensor, TorchError> {
        let xs = xs.f_contiguous()?;
        let other = match how {
            Dropped::Onto(other) | Dropped::WherePositive(other) => Some(other.f_contiguous()?),
            Dropped::Alone | Dropped::OfRelu => None,
        };
        let out = match &other {
            Some(other) => other.f_empty_like()?,
            None => xs.f_empty_like()?,
        };
        if xs.numel() == 0 {
            return Ok(out);
        }
        let unsupported = || TorchError::Internal { what: "dropout has no kernel for this type" };
        let element = Element::on(self.device, xs.kind()).ok_or_else(unsupported)?;
        let is_vector = self.raw.per_sample % element.per_vector() == 0
            && [Some(&xs), other.as_ref(), Some(&out)].into_iter().flatten().all(is_aligned);
        let name = match how {
            Dropped::Onto(other) if other.kind() != xs.kind() => "drop_float",
            Dropped::Alone | Dropped::Onto(_) => "drop_same",
            Dropped::OfRelu => "relu_drop",
            Dropped::WherePositive(_) => "where_positive",
        };
        let (name, width) =
            if is_vector { (name.to_owned(), element.per_vector()) } else { (format!("{name}_one"), 1) };
        let rows = self.samples.clamp(1, MOST_ROWS) as u32;
        let most = (multiprocessors(self.device)? * RESIDENT).div_ceil(rows).max(1);
        let columns = (self.raw.per_sample / width) as u64;
        let blocks = (columns.div_ceil(u64::from(THREADS)).min(u64::from(most)) as u32, rows);
        let arguments = [(&xs).into(), pointer(other.as_ref()), (&out).into(), (self.samples as i32).into()];
        let kernels = SOURCE.with(self.device, element, &[("THREADS", i64::from(THREADS))])?;
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        let raw = match how {
            // The result of the forward says what was dropped.
            Dropped::WherePositive(_) => &self.raw,
            Dropped::Alone | Dropped::Onto(_) | Dropped::OfRelu => self.raw()?,
        };
        // SAFETY: the arguments are listed as in the source; all tensors are contiguous, of one size, and on this GPU.
        unsafe { kernels.get(&name)?.launch_with(self.device, grid, raw, &arguments)? };
        Ok(out)
    }
}
