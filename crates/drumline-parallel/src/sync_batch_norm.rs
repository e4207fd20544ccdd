//! Batch normalisation over the batch of all ranks, as PyTorch's `SyncBatchNorm`.
//!
//! ```text
//!   forward   x ─▶ count, mean, variance ─▶ everybody's ─▶ moments of the whole batch ─▶ (x - mean) · invstd · weight + bias
//!   backward  dy ─▶ Σ dy, Σ dy·x̂ ─▶ summed over ranks ─▶ dx = (dy - Σdy/N - x̂ · Σdy·x̂/N) · invstd · weight
//! ```
//! Batches may differ in length from rank to rank, and may be empty. The gradients of weight and bias are each rank's
//! own part, which `Ddp` averages. Not here: communication (`sync_group`), statistics that stay on a GPU (`on_gpu`).

mod moments;
mod on_gpu;
#[cfg(test)]
mod tests;

use std::borrow::Borrow;

use drumline_torch::{
    Backward, FunctionError, TorchError, autograd_function, batch_norm_sums, is_recomputing,
};
use tch::nn::{BatchNormConfig, ModuleT, Path};
use tch::{Device, Kind, Tensor};

use crate::sync_group::{SyncGroup, statistics_len};
use moments::Moments;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Batch normalisation with the statistics of all ranks' batches together, for inputs `(N, C)`, `(N, C, L)`, `(N, C, H,
/// W)` and `(N, C, D, H, W)`.
///
/// Its tensors have the names and shapes of tch's and PyTorch's `BatchNorm`. In evaluation, and in a group of one rank,
/// it is an ordinary batch normalisation.
///
/// ```
/// use drumline_comm::LocalGroup;
/// use drumline_parallel::{SyncBatchNorm, SyncGroup};
/// use tch::nn::{self, ModuleT};
/// use tch::{Device, Tensor};
///
/// LocalGroup::run(2, |group| {
///     let vs = nn::VarStore::new(Device::Cpu);
///     let sync = SyncGroup::new(&group)?;
///     let norm = SyncBatchNorm::new(vs.root() / "bn", 1, Default::default(), &sync);
///     // One value on each rank, -1 and 1: together they have mean 0 and variance 1.
///     let x = Tensor::from_slice(&[2.0 * group.rank() as f32 - 1.0]).view([1, 1]);
///     norm.forward_t(&x, true);
///     assert!(norm.running_mean.abs().double_value(&[0]) < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
#[derive(Debug)]
pub struct SyncBatchNorm {
    sync: SyncGroup,
    config: BatchNormConfig,
    channels: i64,
    /// The running mean.
    pub running_mean: Tensor,
    /// The running (unbiased) variance.
    pub running_var: Tensor,
    /// `weight`, if the layer is affine.
    pub ws: Option<Tensor>,
    /// `bias`, if the layer is affine.
    pub bs: Option<Tensor>,
}

/// What backward needs to know about the batch of all ranks, for each channel.
#[derive(Debug)]
struct Whole {
    sync: SyncGroup,
    mean: Tensor,
    invstd: Tensor,
    /// The number of values per channel on all ranks, as a tensor of one element.
    count: Tensor,
}

impl SyncBatchNorm {
    /// A layer for the ranks of `sync`. All ranks create the same layers.
    pub fn new<'a>(
        path: impl Borrow<Path<'a>>,
        channels: i64,
        config: BatchNormConfig,
        sync: &SyncGroup,
    ) -> Self {
        let path = path.borrow();
        sync.note_device(path.device());
        let affine = |name, init| config.affine.then(|| path.var(name, &[channels], init));
        Self {
            sync: sync.clone(),
            ws: affine("weight", config.ws_init),
            bs: affine("bias", config.bs_init),
            running_mean: path.zeros_no_train("running_mean", &[channels]),
            running_var: path.ones_no_train("running_var", &[channels]),
            config,
            channels,
        }
    }

    /// Like `forward_t` of [`ModuleT`], with an error instead of a panic.
    pub fn f_forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.check(x)?;
        if !train || self.sync.is_alone() {
            return self.plain(x, false);
        }
        if self.sync.size() > 1 && matches!(x.device(), Device::Cuda(_)) {
            return self.normalised_on_gpu(x);
        }
        let batch_moments = {
            let _no_grad = tch::no_grad_guard();
            self.batch_moments(x)?
        };
        match batch_moments.count {
            0.0 => self.affine(x),
            1.0 => Err(TorchError::Unsupported {
                operation: "normalise a batch",
                reason: "one value per channel on all ranks together has no variance; \
                         try a larger batch, or evaluation",
            }),
            _ if self.sync.size() == 1 => self.plain(x, train),
            _ => self.normalised(x, &batch_moments),
        }
    }

    fn check(&self, x: &Tensor) -> Result {
        let size = x.size();
        if size.len() >= 2 && size[1] == self.channels {
            return Ok(());
        }
        Err(TorchError::Shape {
            what: format!("the input of a batch normalisation of {} channels", self.channels),
            expected: format!("[batch, {}, ..]", self.channels),
            got: size,
        })
    }

    /// Ordinary batch normalisation of this rank's batch.
    fn plain(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let BatchNormConfig { momentum, eps, cudnn_enabled, .. } = self.config;
        // The second forward of a checkpoint must not update them again.
        let running = |tensor: &Tensor| {
            if train && is_recomputing() { tensor.copy() } else { tensor.shallow_clone() }
        };
        let (mean, var) = (running(&self.running_mean), running(&self.running_var));
        Ok(x.f_batch_norm(
            self.ws.as_ref(),
            self.bs.as_ref(),
            Some(&mean),
            Some(&var),
            train,
            momentum,
            eps,
            cudnn_enabled,
        )?)
    }

    /// The output for an empty batch, which keeps its autograd history.
    fn affine(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.ws, &self.bs) {
            (Some(weight), Some(bias)) => {
                Ok(x.f_mul(&per_channel(weight, x)?)?.f_add(&per_channel(bias, x)?)?)
            }
            _ => Ok(x.shallow_clone()),
        }
    }

    /// The moments of all ranks' batches. In a group of one rank only the count is computed, because the rest is not
    /// needed.
    fn batch_moments(&self, x: &Tensor) -> Result<Moments> {
        let channels = self.channels as usize;
        let count = x.numel() / channels.max(1);
        if self.sync.size() == 1 {
            return Ok(Moments { count: count as f64, mean: Vec::new(), variance: Vec::new() });
        }
        let mut mine = vec![count as f64];
        if count > 0 {
            let x = x.f_detach()?.f_to_kind(computing_kind(x))?;
            let (mean, variance) = x.f_batch_norm_update_stats(None::<&Tensor>, None, 0.0)?;
            mine.extend(values(&mean)?);
            mine.extend(values(&variance)?);
        }
        mine.resize(statistics_len(channels), 0.0);
        Ok(Moments::of_all(&self.sync.gather_statistics(channels, &mine)?, channels))
    }

    /// Normalises by the moments of the whole batch, and updates the running statistics.
    fn normalised(&self, x: &Tensor, moments: &Moments) -> Result<Tensor> {
        let kind = computing_kind(x);
        let like = |values: &[f64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_to_device(x.device())?.f_to_kind(kind)?)
        };
        self.update(&like(&moments.mean)?, &like(&moments.unbiased_variance())?)?;
        let (mean, invstd) = (like(&moments.mean)?, like(&moments.invstd(self.config.eps))?);
        let whole = Whole { sync: self.sync.clone(), mean, invstd, count: like(&[moments.count])? };
        self.apply(x, whole, like(&moments.variance)?)
    }

    /// The layer as an autograd function; `variance` is that of the whole batch.
    fn apply(&self, x: &Tensor, whole: Whole, variance: Tensor) -> Result<Tensor> {
        let (kind, eps) = (whole.mean.kind(), self.config.eps);
        let inputs: Vec<&Tensor> =
            [Some(x), self.ws.as_ref(), self.bs.as_ref()].into_iter().flatten().collect();
        let mean = whole.mean.shallow_clone();
        let outputs = autograd_function(
            &inputs,
            |cx, inputs| {
                inputs.iter().take(2).for_each(|input| cx.save(input));
                if inputs[0].numel() == 0 {
                    return Ok(vec![inputs[0].f_empty_like()?]);
                }
                let affine = |input: usize| inputs.get(input).map(|t| t.f_to_kind(kind)).transpose();
                let (weight, bias) = (affine(1)?, affine(2)?);
                let (mean, variance) = (Some(mean), Some(variance));
                Ok(vec![inputs[0].f_batch_norm(weight, bias, mean, variance, false, 0.0, eps, false)?])
            },
            move |cx, mut grads| whole.backward(cx, grads.remove(0)),
        )?;
        let output = outputs.into_iter().next();
        output.ok_or(TorchError::Internal { what: "a batch normalisation returned no output" })
    }

    fn update(&self, mean: &Tensor, variance: &Tensor) -> Result {
        if is_recomputing() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let momentum = self.config.momentum;
        for (running, batch) in [(&self.running_mean, mean), (&self.running_var, variance)] {
            let mut running = running.shallow_clone();
            let _ = running.f_mul_scalar_(1.0 - momentum)?.f_add_(&(batch.f_mul_scalar(momentum)?))?;
        }
        Ok(())
    }
}

impl Whole {
    /// The gradients of input, and of weight and bias if the layer has them.
    fn backward(
        &self,
        cx: &Backward,
        grad: Option<Tensor>,
    ) -> std::result::Result<Vec<Option<Tensor>>, FunctionError> {
        let (x, weight) = (&cx.saved()[0], cx.saved().get(1));
        let grad = grad.map_or_else(|| x.f_zeros_like(), Ok)?;
        let (by_weight, by_bias) = match x.numel() {
            0 => (self.mean.f_zeros_like()?, self.mean.f_zeros_like()?),
            _ => batch_norm_sums(&grad, x, &self.mean, &self.invstd)?,
        };
        let mut by_input = None;
        if cx.needs_input_grad(0) {
            by_input = Some(self.input_gradient(&self.sums(&by_weight, &by_bias)?, x, weight, &grad)?);
        }
        let affine = weight.is_some().then(|| [Some(by_weight), Some(by_bias)]);
        Ok(std::iter::once(by_input).chain(affine.into_iter().flatten()).collect())
    }

    /// The sums over all ranks, concatenated.
    fn sums(&self, by_weight: &Tensor, by_bias: &Tensor) -> Result<Tensor> {
        if matches!(self.mean.device(), Device::Cuda(_)) {
            return self.sums_on_gpu(by_weight, by_bias);
        }
        let mut sums = [values(by_weight)?, values(by_bias)?].concat();
        self.sync.sum_gradients(self.mean.numel(), &mut sums)?;
        Ok(Tensor::f_from_slice(&sums)?)
    }

    /// `sums` holds, over all ranks, Σ dy·x̂ for each channel, and after them Σ dy.
    fn input_gradient(
        &self,
        sums: &Tensor,
        x: &Tensor,
        weight: Option<&Tensor>,
        grad: &Tensor,
    ) -> Result<Tensor> {
        let kind = self.mean.kind();
        let means = sums.f_to_kind(kind)?.f_div(&self.count)?.f_view([2, -1])?;
        let scale = match weight {
            Some(weight) => self.invstd.f_mul(&weight.f_to_kind(kind)?)?,
            None => self.invstd.shallow_clone(),
        };
        let slope = scale.f_mul(&self.invstd)?.f_mul(&means.f_get(0)?)?.f_neg()?;
        let shift = scale.f_mul(&means.f_get(1)?)?.f_neg()?;
        let mut gradient = x.f_sub(&per_channel(&self.mean, x)?)?;
        gradient = gradient.f_mul_(&per_channel(&slope, x)?)?.f_add_(&per_channel(&shift, x)?)?;
        gradient = gradient.f_addcmul_(&grad.f_to_kind(kind)?, &per_channel(&scale, x)?)?;
        Ok(gradient.f_to_kind(x.kind())?)
    }
}

/// One value per channel, shaped to broadcast with `x`.
fn per_channel(values: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut size = vec![1; x.dim()];
    size[1] = -1;
    Ok(values.f_view(&size[..])?)
}

/// The type of the computation: single precision for 16-bit inputs.
fn computing_kind(x: &Tensor) -> Kind {
    if x.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(tensor.f_to_kind(Kind::Double)?)?)
}

/// Panics if the input has a wrong shape or the group fails, because a module of tch cannot return an error. See
/// [`f_forward_t`](SyncBatchNorm::f_forward_t).
impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(x, train).unwrap_or_else(|error| self.sync.panic_with(&error))
    }
}
