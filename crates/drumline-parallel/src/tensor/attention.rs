//! Self-attention of which each rank has some of the heads.

use drumline_comm::{call_site, on_behalf_of};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::linear::{ColumnLinear, LinearShape, RowLinear};
use super::ranks::TensorParallel;
use super::value::{Features, Invariant, Replicated, Sequence, Sharded, TpTensor};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// The sizes of an attention layer.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// Features of input and output.
    pub features: i64,
    /// Heads, which the ranks must divide.
    pub heads: i64,
    /// Whether places see only themselves and earlier places.
    pub causal: bool,
}

impl AttentionShape {
    /// The number of heads on each of several ranks. An error unless they divide the heads.
    pub fn heads_of_rank(heads: i64, num_ranks: usize) -> Result<i64> {
        let num_ranks = num_ranks as i64;
        if heads < 1 {
            return Err(ParallelError::value("the number of attention heads", heads, "1 or more; try 1"));
        }
        if heads % num_ranks == 0 {
            return Ok(heads / num_ranks);
        }
        let expected = format!("a number that tp {num_ranks} divides; try tp as a divisor of {heads}");
        Err(ParallelError::value("the number of attention heads", heads, expected))
    }
}

/// Self-attention with the tensors `qkv` (queries, keys and values one after the other) and `proj`.
#[derive(Debug)]
pub struct SelfAttention {
    qkv: ColumnLinear,
    proj: RowLinear,
    heads: i64,
    causal: bool,
}

impl SelfAttention {
    /// Creates this rank's heads.
    pub fn new(tp: &TensorParallel, path: &Path<'_>, shape: AttentionShape, init: Init) -> Result<Self> {
        let AttentionShape { features, heads, causal } = shape;
        let own_heads = AttentionShape::heads_of_rank(heads, tp.size())?;
        if features % heads != 0 {
            let expected = format!("a multiple of {heads} heads");
            return Err(ParallelError::value("the number of features of attention", features, expected));
        }
        let qkv = LinearShape { inputs: features, outputs: 3 * features, init, stacked: 3 };
        let proj = LinearShape { inputs: features, outputs: features, init, stacked: 1 };
        Ok(Self {
            qkv: ColumnLinear::new(tp, &(path / "qkv"), qkv)?,
            proj: RowLinear::new(tp, &(path / "proj"), proj)?,
            heads: own_heads,
            causal,
        })
    }

    /// The output on all ranks.
    #[track_caller]
    pub fn forward(&self, xs: &TpTensor<Replicated>) -> Result<TpTensor<Invariant>> {
        let seen = self.seen(xs)?;
        on_behalf_of(call_site(), || self.proj.forward(&seen))
    }

    /// Each rank's part of the output along the sequence.
    #[track_caller]
    pub fn forward_scattered(&self, xs: &TpTensor<Replicated>) -> Result<TpTensor<Sharded<Sequence>>> {
        let seen = self.seen(xs)?;
        on_behalf_of(call_site(), || self.proj.forward_scattered(&seen))
    }

    /// What this rank's heads have seen.
    fn seen(&self, xs: &TpTensor<Replicated>) -> Result<TpTensor<Sharded<Features>>> {
        let all = self.qkv.forward_stacked(xs)?;
        let heads = |part: &TpTensor<Sharded<Features>>| {
            let size = part.local().size();
            part.local().f_view([size[0], size[1], self.heads, -1])?.f_transpose(1, 2)
        };
        let (queries, keys, values) = (heads(&all[0])?, heads(&all[1])?, heads(&all[2])?);
        let no_mask = None::<Tensor>;
        let seen = Tensor::f_scaled_dot_product_attention(
            &queries,
            &keys,
            &values,
            no_mask,
            0.0,
            self.causal,
            None,
            false,
        )?;
        let seen = seen.f_transpose(1, 2)?.f_flatten(2, 3)?;
        TpTensor::sharded(seen, all[0].whole_len(), xs.ranks())
    }
}
