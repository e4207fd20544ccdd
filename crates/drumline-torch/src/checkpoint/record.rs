//! What is known of a first forward, so that the second can follow it.

use tch::{Device, Kind, Tensor, no_grad};

use super::error::Meta;
use super::input::Role;
use super::origin::Origin;
use crate::error::TorchError;
use crate::rng::RngState;
use crate::saved_tensors::SavedTensor;

/// A first forward.
#[derive(Default)]
pub(super) struct Record {
    /// The tensors that it saved, in order.
    pub(super) saved: Vec<Meta>,
    /// The marks, in order; `None` for those whose function runs again.
    pub(super) marks: Vec<Option<Replay>>,
}

/// A mark whose function does not run again.
pub(super) struct Replay {
    /// The index of its first saved tensor.
    pub(super) first: usize,
    pub(super) sources: Vec<Source>,
    pub(super) role: Role,
    pub(super) result: MarkedResult,
    /// The generators after it, if it has drawn from them.
    pub(super) drawn: Option<RngState>,
}

/// Where a saved tensor of a mark is taken from.
pub(super) enum Source {
    From(Origin),
    Kept(SavedTensor),
}

/// The result of a mark.
pub(super) enum MarkedResult {
    Kept(SavedTensor),
    /// Nothing needs its elements.
    Blank(Blank),
}

/// The place for a tensor.
pub(super) struct Blank {
    size: Vec<i64>,
    stride: Vec<i64>,
    options: (Kind, Device),
}

impl Blank {
    pub(super) fn like(tensor: &Tensor) -> Self {
        Self { size: tensor.size(), stride: tensor.stride(), options: (tensor.kind(), tensor.device()) }
    }

    fn make(&self) -> Result<Tensor, TorchError> {
        Ok(Tensor::f_empty_strided(&self.size[..], &self.stride[..], self.options)?)
    }
}

impl Replay {
    /// The result, and the tensors that the function would save.
    pub(super) fn run(&self, inputs: &[&Tensor]) -> Result<(Tensor, Vec<Tensor>), TorchError> {
        no_grad(|| {
            self.drawn.as_ref().map_or(Ok(()), RngState::restore)?;
            let result = match &self.result {
                MarkedResult::Kept(kept) => kept.get()?,
                MarkedResult::Blank(blank) => blank.make()?,
            };
            let saved = self.sources.iter().map(|source| source.take(inputs, &result));
            let saved = saved.collect::<Result<_, TorchError>>()?;
            Ok((self.role.give(&result)?, saved))
        })
    }
}

impl Source {
    fn take(&self, inputs: &[&Tensor], result: &Tensor) -> Result<Tensor, TorchError> {
        match self {
            Self::Kept(tensor) => tensor.get(),
            Self::From(Origin::Input { index, cast: None, view }) => view.take(inputs[*index]),
            Self::From(Origin::Input { index, cast: Some(kind), view }) => {
                view.take(&inputs[*index].f_to_kind(*kind)?)
            }
            Self::From(Origin::Parameter { parameter, kind, view }) => {
                view.take(&parameter.f_to_kind(*kind)?)
            }
            Self::From(Origin::Result { view }) => view.take(result),
            Self::From(Origin::Unknown) => {
                Err(TorchError::Internal { what: "a tensor without origin is not kept" })
            }
        }
    }
}
