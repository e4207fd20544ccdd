//! Layer normalisation on a GPU, alone or fused with the dropout and the residual sum before it, in one pass forward and
//! one backward.
#![allow(unsafe_code)]

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::dropout::{CudaMask, MASK};
use super::place::{Element, Source, is_aligned, is_plain, launch, multiprocessors, pointer};
use crate::autocast::autocast_kind;
use crate::cuda::{Argument, Grid, Kernels};
use crate::error::TorchError;
use crate::function::autograd_function;
use crate::kernels::Rate;
use crate::masks::{Place, Position};

static SOURCE: Source = Source::new(&[MASK, include_str!("layer_norm.cu")]);

/// Threads per block, unless a row needs more.
const THREADS: i64 = 256;
/// The maximum of threads per block.
const MOST_THREADS: i64 = 1024;

/// A layer's parameters.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormLayer<'a> {
    /// The weight of each column.
    pub weight: &'a Tensor,
    /// The bias of each column.
    pub bias: &'a Tensor,
    /// Added to the variance.
    pub eps: f64,
}

/// The end of a residual branch: its output without the bias of its last layer, and that bias.
#[derive(Debug, Clone, Copy)]
pub struct BranchEnd<'a> {
    /// The branch's output without bias, with the shape of what it is added to.
    pub branch: &'a Tensor,
    /// The bias, one value for each column.
    pub bias: &'a Tensor,
    /// The probability of dropout after it, which needs a scope of [`Masks`](crate::Masks).
    pub dropout: f64,
}

/// The layer norm of rows. With autocast the result is in 16 bits, because matrix products would cast it anyway.
/// Returns `None` if the kernels do not support the tensors, so that libtorch is the fallback: tensors on the CPU or
/// with gaps, rows of more than 8192 elements (4096 of f32), parameters that are not f32.
pub fn layer_norm_cuda(xs: &Tensor, layer: LayerNormLayer<'_>) -> Result<Option<Tensor>, TorchError> {
    let Some(norm) = Norm::of(xs, &layer, None)? else { return Ok(None) };
    let outputs = autograd_function(
        &[xs, layer.weight, layer.bias],
        |cx, inputs| {
            let (y, stats) = norm.forward(inputs[0], &layer, None, None)?;
            for saved in [inputs[0], &stats, inputs[1]] {
                cx.save(saved);
            }
            Ok(vec![y])
        },
        move |cx, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None, None, None]) };
            let Graded { of_x, of_columns, .. } = norm.backward(cx.saved(), Some(grad), None, None)?;
            let [weight, bias, _] = of_columns;
            Ok(vec![Some(of_x), Some(weight), Some(bias)])
        },
    )?;
    Ok(outputs.into_iter().next())
}

/// The sum of `xs` and the end of a branch after dropout, and the norm of that sum. Returns `None` like
/// [`layer_norm_cuda`], and for dropout outside of a scope of [`Masks`](crate::Masks).
pub fn sum_layer_norm_cuda(
    xs: &Tensor,
    end: BranchEnd<'_>,
    layer: LayerNormLayer<'_>,
) -> Result<Option<[Tensor; 2]>, TorchError> {
    let Some(norm) = Norm::of(xs, &layer, Some(&end))? else { return Ok(None) };
    let mask = if end.dropout > 0.0 {
        let rate = Rate::of(end.dropout)?;
        let mask = Position::next().and_then(|position| CudaMask::new(position, end.branch, rate));
        let Some(mask) = mask else { return Ok(None) };
        Some(mask)
    } else {
        None
    };
    let later = mask.as_ref().map(CudaMask::shared);
    let outputs = autograd_function(
        &[xs, end.branch, end.bias, layer.weight, layer.bias],
        |cx, inputs| {
            let sum = inputs[0].f_empty_like()?;
            let (y, stats) = norm.forward(inputs[0], &layer, Some((&end, &sum)), mask.as_ref())?;
            for saved in [&sum, &stats, inputs[3]] {
                cx.save(saved);
            }
            Ok(vec![sum, y])
        },
        move |cx, grads| {
            let Graded { of_x, of_branch, of_columns } =
                norm.backward(cx.saved(), grads[1].as_ref(), grads[0].as_ref(), later.as_ref())?;
            let [weight, bias, branch_bias] = of_columns;
            Ok([of_x, of_branch, branch_bias, weight, bias].into_iter().map(Some).collect())
        },
    )?;
    Ok(outputs.try_into().ok())
}

/// Whether [`sum_layer_norm_cuda`] supports `xs` together with the matrix product at the end of a branch and this dropout.
pub fn sums_with_layer_norm_cuda(
    xs: &Tensor,
    layer: LayerNormLayer<'_>,
    dropout: f64,
) -> Result<bool, TorchError> {
    Ok((dropout == 0.0 || Place::current().is_some()) && Norm::of(xs, &layer, None)?.is_some())
}

/// Gradients. Those of columns are for weight, bias and the branch's bias.
struct Graded {
    of_x: Tensor,
    of_branch: Tensor,
    of_columns: [Tensor; 3],
}

/// What the kernels need to know about their tensors.
#[derive(Debug, Clone, Copy)]
struct Norm {
    device: usize,
    /// The type of the result, which matrix products read.
    element: Element,
    kind: Kind,
    /// Whether the sum is in f32 and the rest is not.
    is_long: bool,
    rows: i64,
    size: i64,
}

impl Norm {
    fn of(
        xs: &Tensor,
        layer: &LayerNormLayer<'_>,
        end: Option<&BranchEnd<'_>>,
    ) -> Result<Option<Self>, TorchError> {
        let Device::Cuda(device) = xs.device() else { return Ok(None) };
        let kind = autocast_kind(xs.device())?.unwrap_or(xs.kind());
        let (Some(element), Some(size)) = (Element::on(device, kind), xs.size().last().copied()) else {
            return Ok(None);
        };
        let is_column = |tensor: &Tensor| is_plain(tensor, Kind::Float, xs.device(), &[size]);
        let fits = size > 0
            && size % element.per_vector() == 0
            && size / element.per_vector() <= MOST_THREADS
            && xs.numel() > 0
            && xs.is_contiguous()
            && is_aligned(xs)
            && (xs.kind() == kind || xs.kind() == Kind::Float)
            && is_column(layer.weight)
            && is_column(layer.bias)
            && end.is_none_or(|end| {
                let BranchEnd { branch, bias, dropout } = end;
                (*dropout == 0.0 || Place::current().is_some())
                    && is_plain(branch, kind, xs.device(), &xs.size())
                    && is_column(bias)
            });
        let rows = xs.numel() as i64 / size.max(1);
        let is_long = xs.kind() != kind;
        Ok((fits && rows < i64::from(i32::MAX)).then_some(Self {
            device,
            element,
            kind,
            is_long,
            rows,
            size,
        }))
    }

    /// Threads per row, and rows per block.
    fn block(&self) -> (i64, i64) {
        let width = (self.size / self.element.per_vector() + 31) / 32 * 32;
        (width, (THREADS / width).clamp(1, 4))
    }

    /// As many blocks as run at the same time with this many threads on each multiprocessor.
    fn grid(&self, threads_each: u32) -> Result<Grid, TorchError> {
        let (width, groups) = self.block();
        let threads = (width * groups) as u32;
        let most = multiprocessors(self.device)? * (threads_each / threads).max(1);
        let blocks = (self.rows as u64).div_ceil(groups as u64).min(u64::from(most)) as u32;
        Ok(Grid { blocks: (blocks, 1), threads, shared: 0 })
    }

    fn launch(
        &self,
        name: &str,
        grid: Grid,
        mask: Option<&CudaMask>,
        arguments: &[Argument],
    ) -> Result<(), TorchError> {
        let kernels = self.kernels(mask.is_some())?;
        let mask = mask.map(CudaMask::raw).transpose()?.copied().unwrap_or_default();
        // SAFETY: each caller lists the arguments as in the source, for tensors whose shapes `of` has checked.
        unsafe { kernels.get(&self.name(name))?.launch_with(self.device, grid, &mask, arguments) }
    }

    fn kernels(&self, drops: bool) -> Result<Arc<Kernels>, TorchError> {
        let (width, groups) = self.block();
        let constants = [("WIDTH", width), ("GROUPS", groups), ("DROPS", i64::from(drops))];
        SOURCE.with(self.device, self.element, &constants)
    }

    fn name(&self, name: &str) -> String {
        format!("{name}_{}", if self.is_long { "float" } else { "same" })
    }

    fn floats(&self, count: i64) -> Result<Tensor, TorchError> {
        Ok(Tensor::f_empty([count], (Kind::Float, Device::Cuda(self.device)))?)
    }

    fn sizes(&self) -> [Argument; 2] {
        [(self.rows as i32).into(), (self.size as i32).into()]
    }

    /// The norm, and each row's mean and inverse standard deviation.
    fn forward(
        &self,
        xs: &Tensor,
        layer: &LayerNormLayer<'_>,
        sum: Option<(&BranchEnd<'_>, &Tensor)>,
        mask: Option<&CudaMask>,
    ) -> Result<(Tensor, Tensor), TorchError> {
        let y = Tensor::f_empty(xs.size(), (self.kind, xs.device()))?;
        let stats = self.floats(2 * self.rows)?;
        let (end, sum) = sum.unzip();
        let branch = [pointer(end.map(|end| end.branch)), pointer(end.map(|end| end.bias)), pointer(sum)];
        let arguments = [
            &[xs.into()],
            &branch[..],
            &[(&y).into(), (&stats).into(), layer.weight.into(), layer.bias.into()],
            &self.sizes(),
            &[(layer.eps as f32).into()],
        ];
        self.launch("norm", self.grid(2048)?, mask, &arguments.concat())?;
        Ok((y, stats))
    }

    /// `by_y` is the gradient of the norm, `by_sum` the gradient of the sum from its other uses.
    fn backward(
        &self,
        saved: &[Tensor],
        by_y: Option<&Tensor>,
        by_sum: Option<&Tensor>,
        mask: Option<&CudaMask>,
    ) -> Result<Graded, TorchError> {
        let (sum, stats, weight) = (&saved[0], &saved[1], &saved[2]);
        let fitting = |grad: &Tensor, kind: Kind| grad.f_to_kind(kind)?.f_contiguous();
        let by_y = match by_y {
            Some(grad) => fitting(grad, self.kind)?,
            None => Tensor::f_zeros(sum.size(), (self.kind, sum.device()))?,
        };
        let by_sum = by_sum.map(|grad| fitting(grad, sum.kind())).transpose()?;
        let of_x = sum.f_empty_like()?;
        let has_own = self.is_long || mask.is_some();
        let short = if has_own { Some(by_y.f_empty_like()?) } else { None };
        let grid = self.grid(768)?;
        let (blocks, columns) = (grid.blocks.0, 3 * self.size);
        let (partial, totals) = (self.floats(i64::from(blocks) * columns)?, self.floats(columns)?);
        let read = [(&by_y).into(), pointer(by_sum.as_ref()), sum.into(), stats.into(), weight.into()];
        let written = [(&of_x).into(), pointer(short.as_ref()), (&partial).into()];
        let arguments = [&read[..], &written, &self.sizes()].concat();
        self.launch("norm_backward", grid, mask, &arguments)?;
        let grid = Grid { blocks: ((columns as u32).div_ceil(32), 1), threads: 1024, shared: 0 };
        let arguments =
            [(&partial).into(), (&totals).into(), (blocks as i32).into(), (columns as i32).into()];
        // SAFETY: as in `launch`.
        unsafe { launch(&*self.kernels(mask.is_some())?, "columns_total", self.device, grid, &arguments)? };
        let column = |place: i64| totals.f_narrow(0, place * self.size, self.size);
        Ok(Graded {
            of_branch: short.unwrap_or_else(|| of_x.shallow_clone()),
            of_x,
            of_columns: [column(0)?, column(1)?, column(2)?],
        })
    }
}
