//! Variables that stages on several ranks have in common: their gradients are added up before the step.
//!
//! They begin equal and get equal gradients, so they stay equal. Where one rank has all layers that a tie names, they share
//! the tensor, and there is nothing to do. Norms count a tied variable once, and one rank saves it
//! ([`ModelParts`](crate::ModelParts)).

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::{TensorCollectives, grad, set_grad};
use tch::Tensor;
use tch::nn::VarStore;

use super::layer::Tie;
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The tied variables of this rank that other ranks have, too, by the group of these ranks.
#[derive(Debug)]
pub(super) struct Ties(Vec<(ProcessGroup, Vec<Tensor>)>);

impl Ties {
    /// All ranks along `pp` call it, with the ranks that have layers of each tie.
    #[track_caller]
    pub(super) fn new(
        group: &ProcessGroup,
        store: &VarStore,
        ties: &[Tie],
        holders: impl Fn(&Tie) -> Vec<usize>,
    ) -> Result<Self> {
        let variables = store.variables();
        let mut by_ranks: Vec<(Vec<usize>, Vec<&Tie>)> = Vec::new();
        for tie in ties {
            let ranks = holders(tie);
            match by_ranks.iter_mut().find(|(other, _)| *other == ranks) {
                Some((_, ties)) => ties.push(tie),
                None => by_ranks.push((ranks, vec![tie])),
            }
        }
        let mut shared = Vec::new();
        for (ranks, ties) in by_ranks.into_iter().filter(|(ranks, _)| ranks.len() > 1) {
            let Some(made) = group.new_group(&ranks)? else { continue };
            let tensors = ties.into_iter().map(|tie| {
                let found = variables.get(&tie.variable).map(Tensor::shallow_clone);
                found.ok_or_else(|| ParallelError::no_tensor(&tie.variable))
            });
            shared.push((made, tensors.collect::<Result<_>>()?));
        }
        Ok(Self(shared))
    }

    /// Adds up the gradients of all ranks that have a variable.
    #[track_caller]
    pub(super) fn sum(&self) -> Result {
        for (group, tensors) in &self.0 {
            for tensor in tensors.iter().filter(|tensor| tensor.requires_grad()) {
                let own = grad(tensor)?;
                let mut sum = own.map_or_else(|| tensor.f_zeros_like(), Ok)?.f_detach()?;
                group.all_reduce_tensor(&mut sum, ReduceOp::Sum)?;
                set_grad(tensor, Some(&sum))?;
            }
        }
        Ok(())
    }

    /// Ends the groups: this rank will not continue.
    pub(super) fn abort(&self, cause: &str) {
        self.0.iter().for_each(|(group, _)| drop(group.abort(cause)));
    }
}
