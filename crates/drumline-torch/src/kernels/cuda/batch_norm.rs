//! Batch normalisation on a GPU, together with the sum and the ReLU that follow it: two passes forward and two backward, where separate
//! operations make nine.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Source, counters, multiprocessors};
use crate::cuda::{Argument, Grid, Kernels};
use crate::error::TorchError;
use crate::function::autograd_function;

static SOURCE: Source = Source::new(include_str!("batch_norm.cu"));

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Rows that a thread can count, with some to spare.
const MOST_ROWS: i64 = 1 << 30;
/// Up to so many rows one block goes through all of them.
const FEW_ROWS: i32 = 2048;
/// Numbers kept for each channel, as in the source.
const PER_CHANNEL: i64 = 7;

/// What follows the normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// Negative numbers become zero.
    Relu,
}

/// A layer: its parameters and what it remembers of the batches it has seen.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormLayer<'a> {
    /// What each channel is multiplied with.
    pub weight: &'a Tensor,
    /// What is added to it.
    pub bias: &'a Tensor,
    /// Means so far.
    pub running_mean: &'a Tensor,
    /// Variances so far.
    pub running_var: &'a Tensor,
    /// How many batches were seen, if that is counted.
    pub batches: Option<&'a Tensor>,
    /// How much a new batch counts.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

/// In training: `activation(norm(xs) + other)`. `None` where these kernels do not fit, so that libtorch's operations must do it: tensors of
/// the processor, channels that do not lie side by side or do not fill 16 bytes, parameters that are not f32.
pub fn batch_norm_cuda(
    xs: &Tensor,
    layer: BatchNormLayer<'_>,
    other: Option<&Tensor>,
    activation: Activation,
) -> Result<Option<Tensor>, TorchError> {
    let Some(shape) = Shape::of(xs, &layer, other)? else { return Ok(None) };
    let shape = Shape { mode: shape.mode | if activation == Activation::Relu { 2 } else { 0 }, ..shape };
    let kernels = SOURCE.on(shape.device)?;
    let none = Tensor::new();
    let inputs = [xs, layer.weight, layer.bias, other.unwrap_or(&none)];
    let inputs = if other.is_some() { &inputs[..] } else { &inputs[..3] };
    let backward_kernels = kernels.clone();
    let outputs = autograd_function(
        inputs,
        |cx, inputs| {
            let (y, kept) = shape.forward(&kernels, inputs[0], &layer, inputs.get(3).copied())?;
            cx.save(inputs[0]);
            cx.save(inputs[1]);
            cx.save(&kept);
            if shape.mode == 3 {
                cx.save(&y);
            }
            Ok(vec![y])
        },
        move |cx, grads| {
            let Some(grad) = &grads[0] else { return Ok((0..inputs_of(shape.mode)).map(|_| None).collect()) };
            Ok(shape.backward(&backward_kernels, cx.saved(), grad)?)
        },
    )?;
    Ok(outputs.into_iter().next())
}

fn inputs_of(mode: i32) -> usize {
    if mode & 1 == 1 { 4 } else { 3 }
}

/// What the kernels must know of their tensors.
#[derive(Debug, Clone, Copy)]
struct Shape {
    device: usize,
    /// Name of the element type in the source.
    kind: &'static str,
    rows: i32,
    channels: i32,
    /// Threads side by side in a block.
    lanes: i32,
    /// 1: another tensor is added; 2: a ReLU follows.
    mode: i32,
}

impl Shape {
    fn of(
        xs: &Tensor,
        layer: &BatchNormLayer<'_>,
        other: Option<&Tensor>,
    ) -> Result<Option<Self>, TorchError> {
        let (Device::Cuda(device), size) = (xs.device(), xs.size()) else { return Ok(None) };
        let (kind, per_vector) = match xs.kind() {
            Kind::BFloat16 => ("bf16", 8),
            Kind::Half => ("f16", 8),
            Kind::Float => ("float", 4),
            _ => return Ok(None),
        };
        let tensors = [layer.weight, layer.bias, layer.running_mean, layer.running_var];
        let fits = size.len() == 4
            && size[1] % per_vector == 0
            && size[1] <= 16384
            && size.iter().all(|extent| *extent > 0)
            && size[0] * size[2] * size[3] <= MOST_ROWS
            && is_channels_last(xs)
            && tensors.iter().all(|tensor| tensor.kind() == Kind::Float && tensor.device() == xs.device())
            && other.is_none_or(|other| {
                other.size() == size && other.kind() == xs.kind() && is_channels_last(other)
            });
        let vectors = size.get(1).map_or(1, |channels| channels / per_vector);
        Ok(fits.then(|| Self {
            device,
            kind,
            rows: (size[0] * size[2] * size[3]) as i32,
            channels: size[1] as i32,
            lanes: (vectors as u32).next_power_of_two().min(32) as i32,
            mode: i32::from(other.is_some()),
        }))
    }

    fn per_vector(&self) -> u32 {
        if self.kind == "float" { 4 } else { 8 }
    }

    /// As many blocks as keep the GPU busy, with at least a few rows for each thread.
    fn grid(&self, blocks_each: u32) -> Result<Grid, TorchError> {
        let columns = (self.channels as u32 / self.per_vector()).div_ceil(self.lanes as u32);
        let rows_of_block = u64::from(THREADS / self.lanes as u32) * 2;
        let most = (multiprocessors(self.device)? * blocks_each).div_ceil(columns).max(1);
        let high = (self.rows as u64).div_ceil(rows_of_block).clamp(1, u64::from(most));
        Ok(Grid { blocks: (columns, high as u32), threads: THREADS, shared: 0 })
    }

    fn floats(&self, count: i64) -> Result<Tensor, TorchError> {
        Ok(Tensor::f_empty([count], (Kind::Float, Device::Cuda(self.device)))?)
    }

    /// Launches the kernel of this name and of this element type.
    fn launch(
        &self,
        kernels: &Kernels,
        name: &str,
        grid: Grid,
        mut arguments: Vec<Argument>,
    ) -> Result<(), TorchError> {
        let kernel = kernels.get(&format!("{name}_{}", self.kind))?;
        // SAFETY: each caller lists the arguments as the source does, of tensors whose shapes `of` has checked; memory that is freed
        // afterwards is used again by the same stream only, after the kernel.
        unsafe { kernel.launch(self.device, grid, &mut arguments) }
    }

    /// For small tensors: narrow blocks, so that there are many of them, each with all rows.
    fn whole(&self) -> Option<(Grid, i32)> {
        (self.rows <= FEW_ROWS).then(|| {
            let vectors = self.channels as u32 / self.per_vector();
            let lanes = self.lanes.min(2);
            (Grid { blocks: (vectors.div_ceil(lanes as u32), 1), threads: THREADS, shared: 0 }, lanes)
        })
    }

    fn forward(
        &self,
        kernels: &Kernels,
        xs: &Tensor,
        layer: &BatchNormLayer<'_>,
        other: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor), TorchError> {
        let Self { rows, channels, lanes, mode, .. } = *self;
        let kept = self.floats(PER_CHANNEL * i64::from(channels))?;
        let y = xs.f_empty_like()?;
        let (momentum, eps) = (layer.momentum as f32, layer.eps as f32);
        let other = pointer(other);
        let running = [layer.running_mean.into(), layer.running_var.into(), pointer(layer.batches)];
        let parameters =
            [layer.weight.into(), layer.bias.into(), running[0], running[1], running[2], (&kept).into()];
        if let Some((grid, lanes)) = self.whole() {
            let rest = [rows.into(), channels.into(), lanes.into(), mode.into(), momentum.into(), eps.into()];
            let arguments = [&[xs.into(), other, (&y).into()], &parameters[..], &rest].concat();
            self.launch(kernels, "whole_forward", grid, arguments)?;
            return Ok((y, kept));
        }
        let grid = self.grid(2)?;
        let partial = self.partial(grid)?;
        let counters = counters(self.device)?;
        let rest = [rows.into(), channels.into(), lanes.into(), momentum.into(), eps.into()];
        let arguments =
            [&[xs.into()], &parameters[..], &[(&partial).into(), (&counters).into()], &rest].concat();
        self.launch(kernels, "stats", grid, arguments)?;
        let rest = [rows.into(), channels.into(), lanes.into(), mode.into()];
        let arguments = [&[xs.into(), other, (&y).into(), (&kept).into()], &rest[..]].concat();
        self.launch(kernels, "apply", self.grid(6)?, arguments)?;
        Ok((y, kept))
    }

    fn backward(
        &self,
        kernels: &Kernels,
        saved: &[Tensor],
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, TorchError> {
        let Self { rows, channels, lanes, mode, .. } = *self;
        let (xs, weight, kept) = (&saved[0], &saved[1], &saved[2]);
        let grad = laid_out_as(grad, xs)?;
        let (dx, dweight, dbias) = (xs.f_empty_like()?, weight.f_empty_like()?, weight.f_empty_like()?);
        let behind = if mode == 3 { Some(xs.f_empty_like()?) } else { None };
        let given = [(&grad).into(), xs.into(), pointer(saved.get(3)), pointer(behind.as_ref())];
        let parameters = [weight.into(), (&dweight).into(), (&dbias).into(), kept.into()];
        if let Some((grid, lanes)) = self.whole() {
            let rest = [rows.into(), channels.into(), lanes.into(), mode.into()];
            let arguments = [&given[..], &[(&dx).into()], &parameters, &rest].concat();
            self.launch(kernels, "whole_backward", grid, arguments)?;
        } else {
            let grid = self.grid(2)?;
            let partial = self.partial(grid)?;
            let counters = counters(self.device)?;
            let rest = [rows.into(), channels.into(), lanes.into(), mode.into()];
            let arguments =
                [&given[..], &parameters, &[(&partial).into(), (&counters).into()], &rest].concat();
            self.launch(kernels, "sums", grid, arguments)?;
            let masked = behind.as_ref().unwrap_or(&grad);
            let arguments = [&[masked.into(), xs.into(), (&dx).into(), kept.into()], &rest[..]].concat();
            self.launch(kernels, "input", self.grid(6)?, arguments)?;
        }
        let mut grads = vec![Some(dx), Some(dweight), Some(dbias)];
        if mode & 1 == 1 {
            grads.push(Some(behind.unwrap_or(grad)));
        }
        Ok(grads)
    }

    /// Room for the sums of each block.
    fn partial(&self, grid: Grid) -> Result<Tensor, TorchError> {
        let width = i64::from(self.lanes) * i64::from(self.per_vector());
        self.floats(i64::from(grid.blocks.0) * i64::from(grid.blocks.1) * 2 * width)
    }
}

/// A tensor's memory, or null.
fn pointer(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or_else(|| std::ptr::null_mut::<u8>().into(), Argument::from)
}

/// The gradient in the memory layout and type of its tensor.
fn laid_out_as(grad: &Tensor, like: &Tensor) -> Result<Tensor, TorchError> {
    if grad.kind() == like.kind() && is_channels_last(grad) {
        return Ok(grad.shallow_clone());
    }
    let mut copy = like.f_empty_like()?;
    copy.f_copy_(grad)?;
    Ok(copy)
}

/// Whether a pixel's channels lie side by side, and pixels without gaps after each other.
fn is_channels_last(tensor: &Tensor) -> bool {
    let (size, stride) = (tensor.size(), tensor.stride());
    let [_, channels, height, width] = size[..] else { return false };
    let expected = [height * width * channels, 1, width * channels, channels];
    // The stride of an extent of 1 is never used.
    size.iter()
        .zip(&stride)
        .zip(expected)
        .all(|((extent, stride), expected)| *extent == 1 || *stride == expected)
}
