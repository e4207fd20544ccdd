//! Logits of words, whole or cut by classes, and the layer that computes them.
//!
//! ```text
//!   states ─▶ product with the word vectors ─▶ Whole   all classes, on one rank
//!   states ─▶ product with own word vectors ─▶ Part    own classes: the loss needs no whole row
//! ```
//! Not here: losses and metrics of logits ([`words`](crate::words)).

use drumline::engine::ParallelError;
use drumline::engine::tensor::{Features, Sharded, TensorParallel, TpTensor};
use drumline_torch::linear;
use tch::Tensor;

type Result<T> = std::result::Result<T, ParallelError>;

/// The logits of words `[words, classes]`.
#[derive(Debug)]
pub enum Logits {
    /// Those of all classes.
    Whole(Tensor),
    /// Those of this rank's classes, of ranks along `tp`.
    Part(TpTensor<Sharded<Features>>),
}

impl Logits {
    /// Those of all classes. Ranks that have parts call it together.
    #[track_caller]
    pub fn whole(&self) -> Result<Tensor> {
        match self {
            Self::Whole(logits) => Ok(logits.shallow_clone()),
            Self::Part(part) => Ok(part.collect()?.into_tensor()),
        }
    }

    /// The tensor that this rank has.
    pub fn local(&self) -> &Tensor {
        match self {
            Self::Whole(logits) => logits,
            Self::Part(part) => part.local(),
        }
    }
}

/// The classes of logits, and the ranks among which they are cut.
#[derive(Debug, Clone)]
pub(crate) struct Classes {
    pub(crate) count: i64,
    pub(crate) tp: TensorParallel,
}

impl Classes {
    /// The logits of which this rank has `local`.
    pub(crate) fn logits(&self, local: Tensor) -> Result<Logits> {
        if !self.tp.is_cut() {
            return Ok(Logits::Whole(local));
        }
        Ok(Logits::Part(TpTensor::sharded(local, self.count, &self.tp)?))
    }
}

/// A linear layer whose outputs are logits. Its weight may be that of an embedding.
#[derive(Debug)]
pub(crate) struct OutputLayer {
    /// This rank's rows.
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) classes: Classes,
}

impl OutputLayer {
    /// The logits of states, which all ranks have.
    #[track_caller]
    pub(crate) fn forward(&self, states: &Tensor) -> Result<Logits> {
        let Self { weight, bias, classes } = self;
        if !classes.tp.is_cut() {
            return Ok(Logits::Whole(linear(states, weight, bias.as_ref())?));
        }
        let states = TpTensor::invariant(states.shallow_clone(), &classes.tp).replicate()?;
        classes.logits(linear(states.local(), weight, bias.as_ref())?)
    }
}
