//! The head: logits from the embedding matrix, and the loss of the next token without materialising all logits.
//!
//! ```text
//!   states, in chunks of rows ─▶ logits of the chunk ─┬▶ loss: summed
//!                                                     └▶ softmax − target ─┬▶ · weight: gradient of the chunk's states
//!                                                                          └▶ ᵀ · states: added to weight's gradient
//! ```
//! The logits of 16 texts of 1024 places would need 3.3 GB, and so would their gradient. With chunks, both are computed
//! in the forward pass, one chunk after the other, and backward only multiplies the saved gradients by the gradient of
//! the sum. The number of products is the same as without chunks. On a GPU without chunks, our kernels store the logits
//! in 16 bits and overwrite them with the gradient: that is faster, but all logits exist at once. So the number of
//! chunks that was asked for is used.

use std::cell::OnceCell;

use drumline_torch::{
    RightClasses, SmoothedLabels, TorchError, autograd_function, linear, linear_cross_entropy_cuda,
    smoothed_cross_entropy,
};
use tch::{Kind, Tensor, no_grad};

/// The logit of padding rows: far below all others, and finite in 16 bits.
const NEVER: f64 = -3e4;

/// The head, whose weight is the embedding.
#[derive(Debug)]
pub(super) struct Head {
    weight: Tensor,
    vocab_size: i64,
    /// A bias that keeps padding rows from being predicted, made when it is first used: the weight may have moved to
    /// another device since the head was created.
    bias: OnceCell<Tensor>,
}

impl Head {
    /// Creates the head. Rows of `weight` from `vocab_size` on are padding.
    pub(super) fn new(weight: &Tensor, vocab_size: i64) -> Self {
        Self { weight: weight.shallow_clone(), vocab_size, bias: OnceCell::new() }
    }

    /// The embedding of tokens.
    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, if there are padding rows.
    fn bias(&self) -> Option<&Tensor> {
        let rows = self.weight.size()[0];
        let make = || {
            let kind = if self.weight.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            let bias = no_grad(|| Tensor::zeros([rows], (kind, self.weight.device())));
            let _ = bias.narrow(0, self.vocab_size, rows - self.vocab_size).fill_(NEVER);
            bias
        };
        (rows > self.vocab_size).then(|| self.bias.get_or_init(make))
    }

    pub(super) fn logits(&self, states: &Tensor) -> Tensor {
        states.linear(&self.weight, self.bias())
    }

    /// The sum of the losses over rows of states.
    pub(super) fn loss(&self, states: &Tensor, targets: &Tensor, chunks: i64) -> Result<Tensor, TorchError> {
        if chunks > 1 {
            let projection = Projection { weight: &self.weight, bias: self.bias() };
            return linear_cross_entropy(states, projection, targets, chunks);
        }
        let right = RightClasses { classes: targets, valid: self.vocab_size };
        if let Some(sum) = linear_cross_entropy_cuda(states, &self.weight, right)? {
            return Ok(sum);
        }
        let labels = SmoothedLabels { classes: targets, ignored: None, smoothing: 0.0 };
        smoothed_cross_entropy(&linear(states, &self.weight, self.bias())?, labels)
    }
}

/// The linear layer from states to logits.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// The weight, `[classes, size]`.
    pub weight: &'a Tensor,
    /// The bias, `[classes]`.
    pub bias: Option<&'a Tensor>,
}

/// The sum of the cross-entropies of `states · weightᵀ + bias`, computed in `chunks` chunks of rows. States are `[rows,
/// size]`, and targets are `[rows]`. Gradients flow to states and weight.
///
/// ```
/// use drumline_zoo::models::gpt::{Projection, linear_cross_entropy};
/// use tch::{Device, Kind, Tensor};
///
/// let states = Tensor::ones([6, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let weight = Tensor::zeros([10, 4], (Kind::Float, Device::Cpu));
/// let targets = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9]);
/// let loss = linear_cross_entropy(&states, Projection { weight: &weight, bias: None }, &targets, 4)?;
/// assert!((loss.double_value(&[]) - 6.0 * 10f64.ln()).abs() < 1e-4);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn linear_cross_entropy(
    states: &Tensor,
    projection: Projection<'_>,
    targets: &Tensor,
    chunks: i64,
) -> Result<Tensor, TorchError> {
    let outputs = autograd_function(
        &[states, projection.weight],
        |cx, inputs| {
            let wants = cx.needs_input_grad(0) || cx.needs_input_grad(1);
            let projection = Projection { weight: inputs[1], ..projection };
            let parts = Parts::new(inputs[0], projection, targets, chunks)?;
            if !wants {
                return Ok(vec![parts.loss()?]);
            }
            let Graded { loss, states, weight } = parts.graded()?;
            cx.save(&states);
            cx.save(&weight);
            Ok(vec![loss])
        },
        |cx, grads| {
            let Some(by_sum) = &grads[0] else { return Ok(vec![None, None]) };
            let scaled =
                |kept: &Tensor| -> Result<Option<Tensor>, TorchError> { Ok(Some(kept.f_mul(by_sum)?)) };
            cx.saved().iter().map(|kept| Ok(scaled(kept)?)).collect()
        },
    );
    Ok(outputs?.swap_remove(0))
}

/// The inputs, in the data type of the products.
struct Parts {
    chunks: Vec<(Tensor, Tensor)>,
    weight: Tensor,
    bias: Option<Tensor>,
    /// The original data types of states and weight.
    kinds: (Kind, Kind),
}

/// The loss and its gradients.
struct Graded {
    loss: Tensor,
    states: Tensor,
    weight: Tensor,
}

impl Parts {
    fn new(
        states: &Tensor,
        Projection { weight, bias }: Projection<'_>,
        targets: &Tensor,
        chunks: i64,
    ) -> Result<Self, TorchError> {
        // Autocast may use fewer bits for products. The weight is cast once, not for each chunk.
        let kind = states.f_narrow(0, 0, 1)?.f_mm(&weight.f_narrow(0, 0, 1)?.f_tr()?)?.kind();
        let (low, targets) = (states.f_to_kind(kind)?, targets.f_view([-1, 1])?);
        let chunks = low.f_chunk(chunks, 0)?.into_iter().zip(targets.f_chunk(chunks, 0)?).collect();
        let bias = bias.map(|bias| bias.f_to_kind(kind)).transpose()?;
        Ok(Self { chunks, weight: weight.f_to_kind(kind)?, bias, kinds: (states.kind(), weight.kind()) })
    }

    /// Log probabilities `[rows, classes]`.
    fn log_probs(&self, states: &Tensor) -> Result<Tensor, TorchError> {
        Ok(states.f_linear(&self.weight, self.bias.as_ref())?.f_log_softmax(-1, Kind::Float)?)
    }

    fn loss(&self) -> Result<Tensor, TorchError> {
        let mut sum = Tensor::f_zeros([0i64; 0], (Kind::Float, self.weight.device()))?;
        for (states, targets) in &self.chunks {
            let _ = sum.f_sub_(&self.log_probs(states)?.f_gather(1, targets, false)?.f_sum(Kind::Float)?)?;
        }
        Ok(sum)
    }

    fn graded(&self) -> Result<Graded, TorchError> {
        let (device, chunks) = (self.weight.device(), self.chunks.len());
        if self.weight.kind() == Kind::Half && chunks > 1 {
            return Err(TorchError::Kind {
                what: format!("the weight of a loss in {chunks} chunks"),
                expected: "BFloat16 or Float, because the gradients of chunks are computed before the loss is scaled, \
                           and may underflow or overflow in Half; try one chunk (MODEL.LOSS_CHUNKS 1), or BFloat16"
                    .to_owned(),
                got: "Half".to_owned(),
            });
        }
        let mut loss = Tensor::f_zeros([0i64; 0], (Kind::Float, device))?;
        // Sums over chunks are accumulated in f32, or each would be rounded to a few bits.
        let mut of_weight: Option<Tensor> = None;
        let mut of_states = Vec::with_capacity(self.chunks.len());
        for (states, targets) in &self.chunks {
            let mut probs = self.log_probs(states)?;
            let _ = loss.f_sub_(&probs.f_gather(1, targets, false)?.f_sum(Kind::Float)?)?;
            let _ = probs.f_exp_()?;
            let less = Tensor::f_full(targets.size(), -1.0, (Kind::Float, device))?;
            let by_logits = probs.f_scatter_add_(1, targets, &less)?.f_to_kind(self.weight.kind())?;
            of_states.push(by_logits.f_mm(&self.weight)?);
            let part = by_logits.f_tr()?.f_mm(states)?;
            match &mut of_weight {
                Some(sum) => drop(sum.f_add_(&part)?),
                None if chunks == 1 => of_weight = Some(part),
                None => of_weight = Some(part.f_to_kind(Kind::Float)?),
            }
        }
        let of_weight = of_weight.map_or_else(|| self.weight.f_zeros_like(), Ok)?.f_to_kind(self.kinds.1)?;
        Ok(Graded { loss, states: Tensor::f_cat(&of_states, 0)?.f_to_kind(self.kinds.0)?, weight: of_weight })
    }
}
