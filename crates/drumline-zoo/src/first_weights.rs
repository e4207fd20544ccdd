//! Which rank draws and loads the first weights of a model whose states ranks divide: rank 0.
//!
//! ```text
//!   rank 0        draws its weights; those of a file are mapped, not read      ─┐ engine: each rank gets its rows,
//!   other ranks   have the variables, whose memory nobody touches or fills     ─┘ one unit after the other
//! ```
//! So all ranks of a machine together need the memory of one model to start, not of one each. Replicas (DDP) draw and
//! load for themselves.

use std::cell::Cell;

use tch::Tensor;

use crate::error::ZooError;

/// What a rank does with the first weights of a model that is being built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FirstWeights {
    /// It has its own.
    #[default]
    Own,
    /// It has those of all ranks.
    Giver,
    /// It gets the giver's later.
    Taker,
}

thread_local! {
    static BUILDING: Cell<FirstWeights> = const { Cell::new(FirstWeights::Own) };
}

impl FirstWeights {
    /// Builds a model.
    pub(crate) fn build<R>(self, build: impl FnOnce() -> R) -> R {
        struct Before(FirstWeights);
        impl Drop for Before {
            fn drop(&mut self) {
                BUILDING.set(self.0);
            }
        }
        let _before = Before(BUILDING.replace(self));
        build()
    }

    /// Of the model that is being built.
    pub(crate) fn of_this_build() -> Self {
        BUILDING.get()
    }

    /// Whether the values of this rank's weights matter.
    pub(crate) fn have_values(self) -> bool {
        self != Self::Taker
    }

    /// Gives a variable the value of a file. The giver's variable becomes the value itself, which may be mapped from the
    /// file.
    pub(crate) fn fill(self, variable: &mut Tensor, value: &Tensor) -> Result<(), ZooError> {
        let fits = |tensor: &Tensor| (tensor.kind(), tensor.size(), tensor.device(), tensor.stride());
        // What does not require gradients may be a part of a variable.
        let is_whole = variable.requires_grad();
        tch::no_grad(|| {
            if self == Self::Giver && is_whole && fits(variable) == fits(value) {
                variable.f_set_data(value)
            } else {
                variable.f_copy_(value)
            }
        })
        .map_err(|error| ZooError::Torch(error.into()))
    }
}
