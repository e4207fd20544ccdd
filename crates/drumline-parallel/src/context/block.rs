//! Attention of some queries to some keys, and how the results for several blocks of keys become one.
//!
//! For each query, a block gives the mean of the values by the softmax within the block, and lse, the logarithm of the sum
//! of exponentials. Two blocks join as
//!
//! ```text
//!   lse = log(exp lse₁ + exp lse₂)          out = exp(lse₁ − lse) · out₁ + exp(lse₂ − lse) · out₂
//! ```
//! Backward needs no scores of forward: with the lse of all blocks, the probabilities of a block are exp(scores − lse). On
//! a CPU libtorch's fused kernels do this, elsewhere our tiles of queries do: neither has all scores of a block in memory.

use tch::{Kind, TchError, Tensor};

type Result<T> = std::result::Result<T, TchError>;

/// Queries of a tile.
const TILE: i64 = 256;

/// A block of keys and values, `[texts, heads, places, head size]` each.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
    /// Whether query i sees the keys up to i only. Then there are as many queries as keys.
    pub(super) causal: bool,
}

/// What queries have seen so far.
#[derive(Debug)]
pub(super) struct Seen {
    /// `[texts, heads, places, head size]`, in f32 or f64.
    pub(super) out: Tensor,
    /// `[texts, heads, places]`.
    pub(super) lse: Tensor,
}

/// What backward needs of some queries.
#[derive(Debug)]
pub(super) struct Queries {
    pub(super) queries: Tensor,
    /// The output of all blocks, in the type of the queries.
    pub(super) out: Tensor,
    pub(super) lse: Tensor,
    /// The gradient of the output.
    pub(super) grad: Tensor,
}

impl Queries {
    /// Those from `first` on.
    pub(super) fn from(&self, first: i64) -> Result<Self> {
        let from = |of: &Tensor| of.f_narrow(2, first, of.size()[2] - first);
        let Self { queries, out, lse, grad } = self;
        Ok(Self { queries: from(queries)?, out: from(out)?, lse: from(lse)?, grad: from(grad)? })
    }
}

/// The gradients by one block.
#[derive(Debug)]
pub(super) struct BlockGrads {
    pub(super) queries: Tensor,
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

/// The type in which results are summed.
pub(super) fn sum_kind(tensor: &Tensor) -> Kind {
    if tensor.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

impl Seen {
    /// Before any block.
    pub(super) fn nothing(queries: &Tensor) -> Result<Self> {
        let (size, options) = (queries.size(), (sum_kind(queries), queries.device()));
        let lse = Tensor::f_full(&size[..3], f64::NEG_INFINITY, options)?;
        Ok(Self { out: Tensor::f_zeros(&size[..], options)?, lse })
    }

    /// The same queries from `first` on.
    pub(super) fn from(&self, first: i64) -> Result<Self> {
        let len = self.lse.size()[2] - first;
        Ok(Self { out: self.out.f_narrow(2, first, len)?, lse: self.lse.f_narrow(2, first, len)? })
    }

    /// Adds what the queries see in another block.
    pub(super) fn join(&mut self, other: &Self) -> Result<()> {
        let lse = self.lse.f_logaddexp(&other.lse)?;
        let factor = |of: &Tensor| of.f_sub(&lse)?.f_exp()?.f_unsqueeze(3);
        let added = other.out.f_mul(&factor(&other.lse)?)?;
        let own = self.out.f_mul_(&factor(&self.lse)?)?;
        drop(own.shallow_clone().f_add_(&added)?);
        self.lse.f_copy_(&lse)
    }
}

impl Block {
    /// What queries see in this block.
    pub(super) fn seen(&self, queries: &Tensor) -> Result<Seen> {
        let Self { keys, values, causal } = self;
        if queries.device().is_cuda() {
            return self.seen_in_tiles(queries);
        }
        let (out, lse) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu::<Tensor>(
            queries, keys, values, 0.0, *causal, None, None,
        )?;
        let kind = sum_kind(queries);
        Ok(Seen { out: out.f_to_kind(kind)?, lse: lse.f_to_kind(kind)? })
    }

    /// The gradients by what queries have seen in this block.
    pub(super) fn grads(&self, of: &Queries) -> Result<BlockGrads> {
        let Self { keys, values, causal } = self;
        if of.queries.device().is_cuda() {
            return self.grads_in_tiles(of);
        }
        let Queries { queries, out, lse, grad } = of;
        let (queries, keys, values) =
            Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward::<Tensor>(
                grad, queries, keys, values, out, lse, 0.0, *causal, None, None,
            )?;
        Ok(BlockGrads { queries, keys, values })
    }

    fn seen_in_tiles(&self, queries: &Tensor) -> Result<Seen> {
        let kind = sum_kind(queries);
        let values = self.values.f_to_kind(kind)?;
        let mut tiles = (Vec::new(), Vec::new());
        for (first, tile) in tiles_of(queries)? {
            let scores = self.scores(&tile, first)?;
            let lse = scores.f_logsumexp(3, false)?;
            tiles.0.push(scores.f_sub(&lse.f_unsqueeze(3)?)?.f_exp()?.f_matmul(&values)?);
            tiles.1.push(lse);
        }
        Ok(Seen { out: Tensor::f_cat(&tiles.0, 2)?, lse: Tensor::f_cat(&tiles.1, 2)? })
    }

    fn grads_in_tiles(&self, of: &Queries) -> Result<BlockGrads> {
        let kind = sum_kind(&of.queries);
        let [wide_keys, wide_values] = [self.keys.f_to_kind(kind)?, self.values.f_to_kind(kind)?];
        let (mut keys, mut values) = (wide_keys.f_zeros_like()?, wide_values.f_zeros_like()?);
        let mut queries = Vec::new();
        for (first, tile) in tiles_of(&of.queries)? {
            let rows = |of: &Tensor| of.f_narrow(2, first, tile.size()[2])?.f_to_kind(kind);
            let (grad, out, lse) = (rows(&of.grad)?, rows(&of.out)?, rows(&of.lse)?);
            let probs = self.scores(&tile, first)?.f_sub(&lse.f_unsqueeze(3)?)?.f_exp()?;
            drop(values.f_add_(&probs.f_transpose(2, 3)?.f_matmul(&grad)?)?);
            let mean = grad.f_mul(&out)?.f_sum_dim_intlist(3, true, kind)?;
            let by_probs = grad.f_matmul(&wide_values.f_transpose(2, 3)?)?.f_sub(&mean)?;
            let by_scores = probs.f_mul(&by_probs)?.f_mul_scalar(scale(&tile))?;
            queries.push(by_scores.f_matmul(&wide_keys)?);
            drop(keys.f_add_(&by_scores.f_transpose(2, 3)?.f_matmul(&tile.f_to_kind(kind)?)?)?);
        }
        Ok(BlockGrads { queries: Tensor::f_cat(&queries, 2)?, keys, values })
    }

    /// The scores of a tile whose first query has this index.
    fn scores(&self, tile: &Tensor, first: i64) -> Result<Tensor> {
        let kind = sum_kind(tile);
        let wide = tile.f_to_kind(kind)?.f_mul_scalar(scale(tile))?;
        let scores = wide.f_matmul(&self.keys.f_to_kind(kind)?.f_transpose(2, 3)?)?;
        if !self.causal {
            return Ok(scores);
        }
        let size = [tile.size()[2], self.keys.size()[2]];
        let later = Tensor::f_ones(size, (Kind::Bool, tile.device()))?.f_triu(first + 1)?;
        scores.f_masked_fill(&later, f64::NEG_INFINITY)
    }
}

fn scale(queries: &Tensor) -> f64 {
    (queries.size()[3] as f64).powf(-0.5)
}

/// Tiles of queries, each with the index of its first.
fn tiles_of(queries: &Tensor) -> Result<Vec<(i64, Tensor)>> {
    let len = queries.size()[2];
    let firsts = (0..len).step_by(TILE as usize);
    firsts.map(|first| Ok((first, queries.f_narrow(2, first, TILE.min(len - first))?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn heads(places: i64, seed: f64) -> Tensor {
        let numel = 2 * 3 * places * 8;
        (Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.37 + seed).sin().view([2, 3, places, 8])
    }

    fn close(one: &Tensor, other: &Tensor) {
        let distance = (one - other).abs().max().double_value(&[]);
        assert!(distance < 1e-12, "{distance:e}");
    }

    #[test]
    fn tiles_have_the_results_of_the_fused_kernel() {
        for (causal, num_queries, num_keys) in [(true, 300, 300), (false, 5, 270), (false, 290, 3)] {
            let block = Block { keys: heads(num_keys, 1.0), values: heads(num_keys, 2.0), causal };
            let queries = heads(num_queries, 3.0);
            let (fused, tiled) = (block.seen(&queries).unwrap(), block.seen_in_tiles(&queries).unwrap());
            close(&fused.out, &tiled.out);
            close(&fused.lse, &tiled.lse);
            let of = Queries { queries, out: fused.out, lse: fused.lse, grad: heads(num_queries, 4.0) };
            let (fused, tiled) = (block.grads(&of).unwrap(), block.grads_in_tiles(&of).unwrap());
            close(&fused.queries, &tiled.queries);
            close(&fused.keys, &tiled.keys);
            close(&fused.values, &tiled.values);
        }
    }

    #[test]
    fn blocks_join_to_the_result_of_all_keys() {
        let (queries, keys, values) = (heads(4, 1.0), heads(9, 2.0), heads(9, 3.0));
        let block = |first, len| Block {
            keys: keys.narrow(2, first, len),
            values: values.narrow(2, first, len),
            causal: false,
        };
        let mut seen = Seen::nothing(&queries).unwrap();
        for (first, len) in [(0, 2), (2, 6), (8, 1)] {
            seen.join(&block(first, len).seen(&queries).unwrap()).unwrap();
        }
        let all = block(0, 9).seen(&queries).unwrap();
        close(&seen.out, &all.out);
        close(&seen.lse, &all.lse);
    }
}
