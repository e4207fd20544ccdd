//! A network that is whole on this rank, or of which this rank has some stages.

use std::fmt;
use std::rc::Rc;

use drumline::data::Cause;
use drumline::engine::pipeline::{Boundary, LayerError, Stages};
use drumline::trainer::{Mode, Model, Staged};
use tch::Tensor;

use super::logits::{Classes, Logits};
use super::ranks::ModelRanks;
use crate::weights::Holding;

/// A network for batches of type `B`.
#[derive(Debug)]
pub enum Net<M: Model<B>, B> {
    /// All of its layers.
    Whole(M),
    /// The layers of this rank's stages.
    Stages(StagedNet<B, M::Output>),
}

/// The stages of a network, with what goes into the first layer and comes out of the last one.
pub struct StagedNet<B, O> {
    /// What this rank has of it.
    pub stages: Rc<Stages>,
    /// What the first layer gets of a batch.
    pub inputs: fn(&B) -> Vec<Tensor>,
    /// The output, of the tensors that the last layer returns.
    pub output: OutputOf<O>,
}

/// The output of a network, of the tensors that its last layer returns.
pub type OutputOf<O> = Box<dyn Fn(&[Tensor]) -> Result<O, Cause>>;

impl<B, O> fmt::Debug for StagedNet<B, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedNet").field("stages", &self.stages).finish_non_exhaustive()
    }
}

impl<M: Model<B>, B> Net<M, B> {
    /// The network, if this rank has all of it.
    pub fn whole(&self) -> Option<&M> {
        match self {
            Self::Whole(model) => Some(model),
            Self::Stages(_) => None,
        }
    }

    /// Which of the model's tensors this rank has, of the ranks among which its layers are cut.
    pub fn holding(&self, ranks: &ModelRanks) -> Holding {
        let elsewhere = self.stages().map(|stages| stages.elsewhere().clone()).unwrap_or_default();
        Holding { parts: ranks.tp.parts(), elsewhere }
    }

    /// What this rank has of it, if it is cut into stages.
    pub fn stages(&self) -> Option<&Rc<Stages>> {
        match self {
            Self::Whole(_) => None,
            Self::Stages(staged) => Some(&staged.stages),
        }
    }
}

impl<M: Model<B>, B> Model<B> for Net<M, B> {
    type Output = M::Output;

    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<M::Output, Cause> {
        match self {
            Self::Whole(model) => model.forward_batch(batch, mode),
            Self::Stages(_) => {
                Err("this rank has only some stages of the model; try a pipeline's step or evaluation".into())
            }
        }
    }

    fn staged(&self) -> Option<&dyn Staged<B, Output = M::Output>> {
        match self {
            Self::Whole(_) => None,
            Self::Stages(staged) => Some(staged),
        }
    }
}

impl<B, O> Staged<B> for StagedNet<B, O> {
    type Output = O;

    fn stages(&self) -> &Rc<Stages> {
        &self.stages
    }

    fn inputs(&self, batch: &B) -> Result<Vec<Tensor>, Cause> {
        Ok((self.inputs)(batch))
    }

    fn output(&self, outputs: &[Tensor], _: &B) -> Result<O, Cause> {
        (self.output)(outputs)
    }
}

/// The only tensor that the last layer returns.
pub(crate) fn only(outputs: &[Tensor]) -> Result<Tensor, Cause> {
    match outputs {
        [one] => Ok(one.shallow_clone()),
        _ => Err(format!("the last layer returned {} tensors, expected 1", outputs.len()).into()),
    }
}

/// The logits of these classes, of which the last layer returns what this rank has.
pub(crate) fn logits_of(classes: Classes) -> OutputOf<Logits> {
    Box::new(move |outputs| Ok(classes.logits(only(outputs)?)?))
}

/// The tensors between two layers, of which there are `N`.
pub(crate) fn tensors_of<const N: usize>(xs: Boundary) -> Result<[Tensor; N], LayerError> {
    let len = xs.len();
    xs.try_into().map_err(|_| format!("a layer got {len} tensors, expected {N}").into())
}
