//! Callbacks, of two kinds with different traits.
//!
//! ```text
//!   on_train_begin
//!     on_epoch_begin
//!       on_batch_begin ─ forward ─ on_loss_begin ─ loss ─ on_backward_begin ─ backward      each batch of a rank
//!       clip, learning rate ─ on_backward_end ─ optimizer ─ on_step_end ─ on_batch_end      once a step, on all ranks
//!         on_valid_begin ─ evaluation, each batch: on_valid_batch_end ─ on_valid_end       when due or requested
//!     on_epoch_end
//!   on_train_end                      or on_exception, if the training fails
//! ```
//! In each hook the callbacks of all ranks run first, in the order in which they were added, then those of rank 0.

use drumline_torch::Named;
use serde_json::Value;

use super::error::TrainerError;
use super::state::{Evaluation, TrainState};
use crate::data::loader::Cause;

/// What a hook returns. An error on any rank ends the training on all of them, after a checkpoint.
pub type CallbackResult = Result<(), Cause>;

/// Declares the hooks. The two kinds differ only in whether the state is mutable.
macro_rules! hooks {
    ($state:ty) => {
        /// The name of the callback, in errors and in checkpoints.
        fn name(&self) -> String {
            let path = std::any::type_name::<Self>();
            let path = path.split('<').next().unwrap_or(path);
            path.rsplit("::").next().unwrap_or(path).to_owned()
        }

        /// Before the first step, and after a checkpoint was loaded.
        fn on_train_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Before the first batch of an epoch.
        fn on_epoch_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Before the forward of a batch; a step has up to `update_every` batches. Not called on ranks that have run
        /// out of batches.
        fn on_batch_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Between the forward of a batch and its loss. If steps are CUDA graphs, before both. Not called on ranks that
        /// have run out of batches.
        fn on_loss_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Between the loss of a batch and its backward. If steps are CUDA graphs, before both. Not called on ranks
        /// that have run out of batches.
        fn on_backward_begin(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// Once per step, before the optimizer's step. The gradients are those of all ranks, and the loss is known.
        /// Change gradients in place here, set the learning rate, or return an error to refuse the step.
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

        /// After each batch of this rank in an evaluation.
        fn on_valid_batch_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After an evaluation. Its result is the same on all ranks.
        fn on_valid_end(&mut self, state: $state, evaluation: &Evaluation) -> CallbackResult {
            let _ = (state, evaluation);
            Ok(())
        }

        /// At the end of an epoch, after its evaluation.
        fn on_epoch_end(&mut self, state: $state) -> CallbackResult {
            let _ = state;
            Ok(())
        }

        /// After the last step, also if the training was asked to stop.
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

/// Runs on all ranks, and may change the state of the training: learning rate, gradients, when to stop.
///
/// All ranks have the same callbacks in the same order, and these must do the same on all ranks. The exceptions are
/// requests ([`TrainState::request_stop`] and others), which count if any rank makes them.
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

    /// The state to save in checkpoints.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Weights that replace the trained ones of the same names in evaluations, and in the model of checkpoints. The
    /// default is `None`; at most one callback may have such weights. From before `on_valid_begin` until after
    /// `on_valid_end` they are in the model, and these tensors hold the trained ones.
    fn evaluation_weights(&self) -> Option<&[Named]> {
        None
    }

    /// Loads the weights that [`evaluation_weights`](Self::evaluation_weights) returned, along with others of the
    /// model. It is called before `on_train_begin`.
    fn load_evaluation_weights(&mut self, weights: &[Named]) -> CallbackResult {
        let _ = weights;
        Ok(())
    }

    /// Loads what [`state`](Self::state) returned.
    fn load_state(&mut self, state: &Value) -> CallbackResult {
        let _ = state;
        Ok(())
    }
}

/// Runs on rank 0 only, and may read the state but not change it. Use it to print and write.
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
/// It cannot make changes that all ranks would have to make:
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
