//! Max pooling of 3 × 3 pixels with stride 2, as at the beginning of ResNets. Forward saves a byte per output, where
//! libtorch saves eight.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, is_aligned, launch};
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::function::autograd_function;
use crate::memory_format::{channels_last, is_channels_last};

static SOURCE: Source = Source::new(&[include_str!("max_pool.cu")]);

const THREADS: u32 = 256;

/// Max pooling with a 3 × 3 window, stride 2 and padding 1. Returns `None` if the kernels do not support the tensor, so
/// that libtorch is the fallback: tensors on the CPU, tensors that are not channels last, channels that do not fill 16
/// bytes.
pub fn max_pool_cuda(xs: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let Some(pool) = Pool::of(xs) else { return Ok(None) };
    let outputs = autograd_function(
        &[xs],
        |cx, inputs| {
            let (y, which) = pool.forward(inputs[0])?;
            cx.save(&which);
            Ok(vec![y])
        },
        move |cx, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            Ok(vec![Some(pool.backward(grad, &cx.saved()[0])?)])
        },
    )?;
    Ok(outputs.into_iter().next())
}

#[derive(Debug, Clone, Copy)]
struct Pool {
    device: usize,
    element: Element,
    kind: Kind,
    /// Images, channels, height and width.
    size: [i64; 4],
}

impl Pool {
    fn of(xs: &Tensor) -> Option<Self> {
        let Device::Cuda(device) = xs.device() else { return None };
        let element = Element::on(device, xs.kind())?;
        let size: [i64; 4] = xs.size().try_into().ok()?;
        let fits = size[1] % element.per_vector() == 0
            && size.iter().all(|extent| *extent > 0)
            && (xs.numel() as i64) < i64::from(u32::MAX)
            && is_channels_last(xs)
            && is_aligned(xs);
        fits.then(|| Self { device, element, kind: xs.kind(), size })
    }

    fn halved(&self) -> [i64; 4] {
        let [count, channels, height, width] = self.size;
        [count, channels, (height - 1) / 2 + 1, (width - 1) / 2 + 1]
    }

    fn empty(&self, size: [i64; 4], kind: Kind) -> Result<Tensor, TorchError> {
        let [count, channels, height, width] = size;
        let made = Tensor::f_empty([count, height, width, channels], (kind, Device::Cuda(self.device)))?;
        Ok(made.f_permute([0, 3, 1, 2])?)
    }

    /// The result, and which of the nine pixels each value came from.
    fn forward(&self, xs: &Tensor) -> Result<(Tensor, Tensor), TorchError> {
        let (y, which) = (self.empty(self.halved(), self.kind)?, self.empty(self.halved(), Kind::Uint8)?);
        self.launch("max_pool", self.halved(), [xs.into(), (&y).into(), (&which).into()])?;
        Ok((y, which))
    }

    fn backward(&self, grad: &Tensor, which: &Tensor) -> Result<Tensor, TorchError> {
        let dx = self.empty(self.size, self.kind)?;
        let grad = channels_last(&grad.f_to_kind(self.kind)?)?;
        self.launch("max_pool_backward", self.size, [(&grad).into(), which.into(), (&dx).into()])?;
        Ok(dx)
    }

    /// Launches a thread for each vector of a tensor of this size.
    fn launch(&self, name: &str, over: [i64; 4], tensors: [Argument; 3]) -> Result<(), TorchError> {
        let kernels = SOURCE.on(self.device, self.element)?;
        let vectors = self.size[1] / self.element.per_vector();
        let threads = over[0] * over[2] * over[3] * vectors;
        let [_, _, out_height, out_width] = self.halved();
        let sizes = [self.size[2], self.size[3], out_height, out_width, vectors];
        let sizes = sizes.map(|extent| Argument::from(extent as i32));
        let arguments = [&tensors[..], &[threads.into()], &sizes].concat();
        let blocks = (threads as u64).div_ceil(u64::from(THREADS)) as u32;
        let grid = Grid { blocks: (blocks, 1), threads: THREADS, shared: 0 };
        // SAFETY: the arguments are listed as in the source, and the tensors have these sizes.
        unsafe { launch(&kernels, name, self.device, grid, &arguments) }
    }
}
