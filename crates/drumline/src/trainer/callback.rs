//! Callbacks, in two kinds that the types keep apart.
//!
//! ```text
//!   on_train_begin
//!     on_epoch_begin
//!       on_batch_begin ─ forward ─ on_loss_begin ─ loss ─ on_backward_begin ─ backward      each batch of a step, where a rank has one
//!       gradients clipped ─ on_backward_end ─ optimizer ─ on_step_end ─ on_batch_end        once a step, on all ranks
//!         on_valid_begin ─ evaluation, each batch: on_valid_batch_end ─ on_valid_end       when it is time, or was asked for
//!     on_epoch_end
//!   on_train_end                      on_exception instead, where the training fails
//! ```
//! In each hook the callbacks of all ranks come first, in the order in which they were added, then those of the master.

use drumline_torch::Named;
use serde_json::Value;

use super::callbacks::GradientClip;
use super::error::TrainerError;
use super::state::{Evaluation, TrainState};
use crate::loader::Cause;

/// What a hook returns. An error on any rank ends the training on all of them, after a checkpoint.
pub type CallbackResult = Result<(), Cause>;

/// Declares the hooks, which differ between the two kinds in nothing but what may be done to the state.
macro_rules! hooks {
    ($state:ty) => {
        /// What people know it by; in errors, and in checkpoints.
        fn name(&self) -> String {
            let path = std::any::type_name::<Self>();
            let path = path.split('<').next().unwrap_or(path);
            path.rsplit("::").next().unwrap_or(path).to_owned()
        }

        /// Before the first step. A checkpoint to go on from has been loaded.
        fn on_train_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Before the first batch of an epoch.
        fn on_epoch_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Before the forward of a batch; a step has up to `update_every`. Not on ranks that have run out of batches.
        fn on_batch_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Between a batch's forward and its loss; where steps are CUDA graphs, before all of that. Not on ranks that have run out of batches.
        fn on_loss_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Between a batch's loss and its backward; where steps are CUDA graphs, before all of that. Not on ranks that have run out of batches.
        fn on_backward_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Once a step: the gradients are those of all ranks, the loss is known, and the optimizer has yet to step. Place to change gradients, where they
        /// lie, to set the learning rate, and to refuse the step by an error.
        fn on_backward_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After the optimizer's step.
        fn on_step_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// At the end of a step, when it has been counted.
        fn on_batch_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Before an evaluation.
        fn on_valid_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After a batch of an evaluation, of this rank's share.
        fn on_valid_batch_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After an evaluation, which is the same on all ranks.
        fn on_valid_end(&mut self, state: $state, evaluation: &Evaluation) -> CallbackResult {
            let _ = (state, evaluation);
            Ok(())
        }

        /// When all samples of an epoch were seen, after its evaluation.
        fn on_epoch_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After the last step, also where training was asked to stop.
        fn on_train_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// The training has failed. An error here is only logged.
        fn on_exception(&mut self, state: $state, error: &TrainerError) -> CallbackResult {
            let _ = (state, error);
            Ok(())
        }
    };
}

/// Runs on all ranks and may change the state of the training: learning rate, gradients, when to stop.
///
/// All ranks have the same callbacks in the same order, and what they do must be the same on all, but for requests
/// ([`TrainState::request_stop`] and its like), which count when any rank makes them.
///
/// ```
/// use drumline::trainer::{Callback, CallbackResult, TrainState};
///
/// /// Halves the learning rate after each epoch.
/// struct Halve;
///
/// impl Callback for Halve {
///     fn on_epoch_end(&mut self, state: &mut TrainState) -> CallbackResult {
///         state.set_lr(state.lr() / 2.0);
///         Ok(())
///     }
/// }
/// ```
pub trait Callback {
    hooks!(&mut TrainState);

    /// What a checkpoint keeps of it.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Weights that take the place of the trained ones of the same names in evaluations, and as the model of checkpoints. None, if it is not said; of all
    /// callbacks one may have such. While they are the model's, from before `on_valid_begin` until after `on_valid_end`, these tensors hold the trained ones.
    fn evaluation_weights(&self) -> Option<&[Named]> {
        None
    }

    /// Goes on with the weights that [`evaluation_weights`](Self::evaluation_weights) gave, and others of the model; before `on_train_begin`.
    fn load_evaluation_weights(&mut self, weights: &[Named]) -> CallbackResult {
        let _ = weights;
        Ok(())
    }

    /// How the trainer is to clip gradients, before `on_backward_end`. None, if it is not said. Where the bound is another than in a step that was recorded, steps
    /// are made without CUDA graphs.
    fn gradient_clip(&self) -> Option<GradientClip> {
        None
    }

    /// Goes on from what [`state`](Self::state) gave.
    fn load_state(&mut self, state: &Value) -> CallbackResult {
        let _ = state;
        Ok(())
    }
}

/// Runs on rank 0 only and may look at the state but not change it: what prints and writes.
///
/// ```
/// use drumline::trainer::{CallbackResult, MasterCallback, TrainState};
///
/// /// Counts steps.
/// struct Count(usize);
///
/// impl MasterCallback for Count {
///     fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
///         self.0 += 1;
///         println!("step {}: loss {} with lr {}", state.step(), state.loss(), state.lr());
///         Ok(())
///     }
/// }
/// ```
///
/// It cannot do what would have to be done on all ranks:
///
/// ```compile_fail,E0596
/// use drumline::trainer::{CallbackResult, MasterCallback, TrainState};
///
/// struct Halve;
///
/// impl MasterCallback for Halve {
///     fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
///         state.set_lr(0.1);
///         Ok(())
///     }
/// }
/// ```
pub trait MasterCallback {
    hooks!(&TrainState);
}
