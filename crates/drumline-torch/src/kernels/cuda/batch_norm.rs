//! Batch normalisation on a GPU, fused with the sum and the ReLU that follow it: two passes forward and two backward,
//! where separate operations make nine.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{
    Element, Source, counters, generation, is_aligned, is_plain, launch, multiprocessors, pointer,
};
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::function::autograd_function;
use crate::memory_format::{is_channels_last, with_layout_of};

static LARGE: Source = Source::new(&[include_str!("batch_norm.cu"), include_str!("batch_norm_large.cu")]);
static SMALL: Source = Source::new(&[include_str!("batch_norm.cu"), include_str!("batch_norm_small.cu")]);

/// Threads per block, as in the source.
const THREADS: u32 = 256;
/// Blocks that add up their sums in the first round, as in the source.
const GROUP: u32 = 16;
/// The maximum number of rows: their index fits into 32 bits.
const MOST_ROWS: i64 = 1 << 30;
/// Values that are saved for each channel, as in the source.
const PER_CHANNEL: i64 = 7;
/// Rows that a thread of the kernels for small tensors keeps in registers, as in the source.
const KEPT: u32 = 8;
/// Tensors with more elements use the kernels for large tensors.
const SMALL_NUMEL: i64 = 1 << 23;

/// The activation after the normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// ReLU.
    Relu,
}

/// A layer: its parameters and running statistics.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormLayer<'a> {
    /// The weight of each channel.
    pub weight: &'a Tensor,
    /// The bias of each channel.
    pub bias: &'a Tensor,
    /// The running mean.
    pub running_mean: &'a Tensor,
    /// The running variance.
    pub running_var: &'a Tensor,
    /// `num_batches_tracked`, if it is counted.
    pub batches: Option<&'a Tensor>,
    /// The momentum of the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

/// In training: `activation(norm(xs))`. Returns `None` if these kernels do not support the tensors, so that libtorch is
/// the fallback: tensors on the CPU, tensors that are not channels last, channels that do not fill 16 bytes, parameters
/// that are not f32.
pub fn batch_norm_cuda(
    xs: &Tensor,
    layer: BatchNormLayer<'_>,
    activation: Activation,
) -> Result<Option<Tensor>, TorchError> {
    let follows = if activation == Activation::Relu { Follows::Relu } else { Follows::Nothing };
    Ok(run(xs, layer, follows, None)?.and_then(|outputs| outputs.into_iter().next()))
}

/// The same with a sum before the ReLU: `relu(norm(xs) + other)`. Returns it twice: if two branches of a network use
/// it, each takes one, and the backward kernel adds up their gradients.
pub fn batch_norm_sum_relu_cuda(
    xs: &Tensor,
    layer: BatchNormLayer<'_>,
    other: &Tensor,
) -> Result<Option<[Tensor; 2]>, TorchError> {
    Ok(run(xs, layer, Follows::SumRelu, Some(other))?.and_then(|outputs| outputs.try_into().ok()))
}

/// What follows the normalisation, as in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Follows {
    Nothing,
    Relu,
    SumRelu,
}

impl Follows {
    /// The suffix of the kernels' names.
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "plain",
            Self::Relu => "relu",
            Self::SumRelu => "sum",
        }
    }
}

fn run(
    xs: &Tensor,
    layer: BatchNormLayer<'_>,
    follows: Follows,
    other: Option<&Tensor>,
) -> Result<Option<Vec<Tensor>>, TorchError> {
    let Some(shape) = Shape::of(xs, &layer, follows, other) else { return Ok(None) };
    let strategy = shape.strategy()?;
    let inputs: Vec<_> = [xs, layer.weight, layer.bias].into_iter().chain(other).collect();
    let num_inputs = inputs.len();
    let outputs = autograd_function(
        &inputs,
        |cx, inputs| {
            let Made { y, kept, mask } =
                shape.forward(strategy, inputs[0], &layer, inputs.get(3).copied())?;
            for saved in [inputs[0], inputs[1], &kept].into_iter().chain(&mask) {
                cx.save(saved);
            }
            Ok(match follows {
                Follows::SumRelu => vec![y.shallow_clone(), y],
                _ => vec![y],
            })
        },
        move |cx, grads| {
            let mut grads = grads.into_iter().flatten();
            let Some(grad) = grads.next() else { return Ok((0..num_inputs).map(|_| None).collect()) };
            Ok(shape.backward(strategy, cx.saved(), &grad, grads.next().as_ref())?)
        },
    );
    outputs.map(Some)
}

/// The results of forward.
struct Made {
    y: Tensor,
    /// The saved values of each channel.
    kept: Tensor,
    /// With a sum, a byte for each vector: a bit for each element that the ReLU kept.
    mask: Option<Tensor>,
}

/// What the kernels need to know about their tensors.
#[derive(Debug, Clone, Copy)]
struct Shape {
    device: usize,
    element: Element,
    follows: Follows,
    rows: i32,
    channels: i32,
    /// Threads of a block along the channels.
    lanes: i32,
}

/// Which kernels run.
#[derive(Debug, Clone, Copy)]
enum Strategy {
    /// Two passes, each on the whole GPU.
    TwoPasses,
    /// One kernel, with clusters of this many blocks of this many threads.
    OneKernel { blocks: u32, threads: u32 },
}

impl Shape {
    fn of(xs: &Tensor, layer: &BatchNormLayer<'_>, follows: Follows, other: Option<&Tensor>) -> Option<Self> {
        let (Device::Cuda(device), size) = (xs.device(), xs.size()) else { return None };
        let element = Element::on(device, xs.kind())?;
        let tensors = [layer.weight, layer.bias, layer.running_mean, layer.running_var];
        let is_column = |tensor: &&Tensor| is_plain(tensor, Kind::Float, xs.device(), &size[1..2]);
        let is_count = |count: &Tensor| is_plain(count, Kind::Int64, xs.device(), &[]);
        let fits = size.len() == 4
            && size[1] % element.per_vector() == 0
            && size[1] <= 16384
            && size.iter().all(|extent| *extent > 0)
            && size[0] * size[2] * size[3] <= MOST_ROWS
            && is_channels_last(xs)
            && is_aligned(xs)
            && tensors.iter().all(is_column)
            && layer.batches.is_none_or(is_count)
            && other.is_none_or(|other| {
                other.size() == size
                    && (other.kind(), other.device()) == (xs.kind(), xs.device())
                    && is_channels_last(other)
                    && is_aligned(other)
            });
        fits.then(|| Self {
            device,
            element,
            follows,
            rows: (size[0] * size[2] * size[3]) as i32,
            channels: size[1] as i32,
            lanes: ((size[1] / element.per_vector()) as u32).next_power_of_two().min(32) as i32,
        })
    }

    fn vectors(&self) -> u32 {
        self.channels as u32 / self.element.per_vector() as u32
    }

    /// Clusters need compute capability 9.
    fn strategy(&self) -> Result<Strategy, TorchError> {
        let blocks = if generation(self.device)? >= 9 && self.rows > 2 * THREADS as i32 { 8 } else { 1 };
        let threads = if self.rows as u32 > KEPT * blocks * THREADS { 2 * THREADS } else { THREADS };
        let is_small = i64::from(self.rows) * i64::from(self.channels) <= SMALL_NUMEL;
        let is_whole = is_small && self.rows as u32 <= KEPT * blocks * threads;
        Ok(if is_whole { Strategy::OneKernel { blocks, threads } } else { Strategy::TwoPasses })
    }

    /// As many blocks as fill the GPU, with at least a few rows for each thread.
    fn grid(&self, blocks_each: u32) -> Result<Grid, TorchError> {
        let columns = self.vectors().div_ceil(self.lanes as u32);
        let rows_of_block = u64::from(THREADS / self.lanes as u32) * 2;
        let most = (multiprocessors(self.device)? * blocks_each).div_ceil(columns).max(1);
        let high = (self.rows as u64).div_ceil(rows_of_block).clamp(1, u64::from(most));
        Ok(Grid { blocks: (columns, high as u32), threads: THREADS, shared: 0 })
    }

    fn floats(&self, count: i64) -> Result<Tensor, TorchError> {
        Ok(Tensor::f_empty([count], (Kind::Float, Device::Cuda(self.device)))?)
    }

    /// Launches the kernel of this name.
    fn launch(
        &self,
        source: &Source,
        name: &str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), TorchError> {
        let kernels = source.on(self.device, self.element)?;
        // SAFETY: each caller lists the arguments as in the source, for tensors whose shapes `of` has checked. Memory
        // that is freed afterwards is reused only by later work on the same stream.
        unsafe { launch(&kernels, name, self.device, grid, arguments) }
    }

    /// Launches a kernel for small tensors.
    fn launch_whole(
        &self,
        name: &str,
        blocks: u32,
        threads: u32,
        arguments: &[Argument],
    ) -> Result<(), TorchError> {
        let grid = Grid { blocks: (self.vectors(), blocks), threads, shared: 0 };
        self.launch(&SMALL, &format!("{name}_{}_{blocks}", self.follows.name()), grid, arguments)
    }

    fn forward(
        &self,
        strategy: Strategy,
        xs: &Tensor,
        layer: &BatchNormLayer<'_>,
        other: Option<&Tensor>,
    ) -> Result<Made, TorchError> {
        let Self { rows, channels, lanes, .. } = *self;
        let (y, kept) = (xs.f_empty_like()?, self.floats(PER_CHANNEL * i64::from(channels))?);
        let mask = other.map(|_| {
            let bytes = i64::from(rows) * i64::from(self.vectors());
            Tensor::f_empty([bytes], (Kind::Uint8, Device::Cuda(self.device)))
        });
        let mask = mask.transpose()?;
        let applied = [xs.into(), pointer(other), (&y).into(), pointer(mask.as_ref())];
        let running = [layer.running_mean.into(), layer.running_var.into(), pointer(layer.batches)];
        let parameters =
            [&[layer.weight.into(), layer.bias.into()], &running[..], &[(&kept).into()]].concat();
        let sizes = [rows.into(), channels.into()];
        let factors = [(layer.momentum as f32).into(), (layer.eps as f32).into()];
        match strategy {
            Strategy::OneKernel { blocks, threads } => {
                let arguments = [&applied[..], &parameters, &sizes, &factors].concat();
                self.launch_whole("whole_forward", blocks, threads, &arguments)?;
            }
            Strategy::TwoPasses => {
                let grid = self.grid(4)?;
                let (partial, counters) = (self.partial(grid)?, counters(self.device)?);
                let shared = [(&partial).into(), (&counters).into()];
                let arguments =
                    [&[xs.into()], &parameters[..], &shared, &sizes, &[lanes.into()], &factors].concat();
                self.launch(&LARGE, "stats", grid, &arguments)?;
                let arguments = [&applied[..], &[(&kept).into()], &sizes, &[lanes.into()]].concat();
                self.launch(&LARGE, &format!("apply_{}", self.follows.name()), self.grid(6)?, &arguments)?;
            }
        }
        Ok(Made { y, kept, mask })
    }

    /// `again` is the gradient of the second output.
    fn backward(
        &self,
        strategy: Strategy,
        saved: &[Tensor],
        grad: &Tensor,
        again: Option<&Tensor>,
    ) -> Result<Vec<Option<Tensor>>, TorchError> {
        let Self { rows, channels, lanes, .. } = *self;
        let (xs, weight, kept) = (&saved[0], &saved[1], &saved[2]);
        let grad = with_layout_of(grad, xs)?;
        let again = again.map(|grad| with_layout_of(grad, xs)).transpose()?;
        let (dx, dweight, dbias) = (xs.f_empty_like()?, weight.f_empty_like()?, weight.f_empty_like()?);
        let has_sum = self.follows == Follows::SumRelu;
        let behind = has_sum.then(|| xs.f_empty_like()).transpose()?;
        let given = [
            (&grad).into(),
            pointer(again.as_ref()),
            xs.into(),
            pointer(saved.get(3)),
            pointer(behind.as_ref()),
        ];
        let parameters = [weight.into(), (&dweight).into(), (&dbias).into(), kept.into()];
        let sizes = [rows.into(), channels.into()];
        match strategy {
            Strategy::OneKernel { blocks, threads } => {
                let arguments = [&given[..], &[(&dx).into()], &parameters, &sizes].concat();
                self.launch_whole("whole_backward", blocks, threads, &arguments)?;
            }
            Strategy::TwoPasses => {
                let grid = self.grid(2)?;
                let (partial, counters) = (self.partial(grid)?, counters(self.device)?);
                let shared = [(&partial).into(), (&counters).into()];
                let arguments = [&given[..], &parameters, &shared, &sizes, &[lanes.into()]].concat();
                self.launch(&LARGE, &format!("sums_{}", self.follows.name()), grid, &arguments)?;
                let masked = behind.as_ref().unwrap_or(&grad);
                let arguments = [masked.into(), xs.into(), (&dx).into(), kept.into()];
                let arguments = [&arguments[..], &sizes, &[lanes.into()]].concat();
                self.launch(&LARGE, &format!("input_{}", self.follows.name()), self.grid(6)?, &arguments)?;
            }
        }
        Ok([dx, dweight, dbias].into_iter().chain(behind).map(Some).collect())
    }

    /// Memory for the sums of each block and of each group of blocks.
    fn partial(&self, grid: Grid) -> Result<Tensor, TorchError> {
        let width = i64::from(self.lanes) * self.element.per_vector();
        let (columns, high) = grid.blocks;
        self.floats(i64::from(columns) * i64::from(high + high.div_ceil(GROUP)) * 2 * width)
    }
}
