//! Why work that all ranks do together failed: one error for the trainer, the accelerator and `main_first`, so that the
//! code that shows it (`launch/ending.rs`) need not know where it comes from.

use drumline_comm::CommError;
use drumline_parallel::ParallelError;
use drumline_torch::TorchError;

use crate::checkpoint::CheckpointError;
use crate::comm::shared_failure::{SharedFailure, with_causes};
use crate::data::loader::Cause;

/// Why work of all ranks failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Something went wrong on one rank or several: bad input, a callback, a batch, a checkpoint. All ranks have this
    /// error with the same text, and the group can still be used. A trainer with a `save_path` has saved the state
    /// after its last step.
    #[error(transparent)]
    Failed(#[from] SharedFailure),
    /// A rank was lost, or ranks made different calls.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// libtorch returned an error.
    #[error(transparent)]
    Torch(Box<TorchError>),
    /// The engine returned an error, on this rank.
    #[error(transparent)]
    Parallel(Box<ParallelError>),
    /// The program made a call that makes no sense, on this rank.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// The forward failed on this rank, in a model whose forward communicates, such as one with `SyncBatchNorm`.
    #[error("step {step}: {cause}")]
    Forward {
        /// The step, counted from 1.
        step: u64,
        /// What went wrong, with its causes.
        cause: String,
    },
    /// The model or the loss returned an error while a step was recorded as a CUDA graph.
    #[error("{}", with_causes(cause.as_ref()))]
    Model {
        /// The error.
        cause: Cause,
    },
    /// A callback changed what is trained when the other ranks were about to launch a recorded step.
    #[error(
        "rank {rank}: a callback has frozen, unfrozen or replaced parameters within step {step}, whose CUDA graph was about to be \
         launched; try on_step_end or on_epoch_begin for it, or .cuda_graphs(false)"
    )]
    ParametersChanged {
        /// This rank.
        rank: usize,
        /// The step, counted from 1.
        step: u64,
    },
    /// A step cannot be recorded on this rank, while the other ranks record it.
    #[error(
        "rank {rank} cannot record step {step} as a CUDA graph with the others: {cause}; try .cuda_graphs(false)"
    )]
    Recording {
        /// This rank.
        rank: usize,
        /// The step, counted from 1.
        step: u64,
        /// What went wrong, in one line.
        cause: String,
    },
}

/// A call of an [`Accelerator`](crate::Accelerator) that makes no sense where it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// Backward from a loss that has no gradient.
    #[error(
        "the loss does not depend on anything that is trained; try model.forward_t(&x, true), and no no_grad around it"
    )]
    LossWithoutGradient,
    /// A step after a backward inside `no_sync`.
    #[error(
        "the optimizer would step with gradients that were not reduced over ranks, as the last backward was inside no_sync; \
         try a backward outside before the step"
    )]
    GradientsNotReduced,
    /// A backward between clipping and the step.
    #[error("a backward has added scaled gradients to those that were clipped already; {ORDER}")]
    BackwardAfterClip,
    /// A step of an engine that has no optimizer.
    #[error(
        "there is no optimizer; try `optimizer` in the configuration, or deepspeed::builder(config).optimizer(…)"
    )]
    NoOptimizer,
    /// A batch of a pipeline outside of the loop of a prepared loader.
    #[error("a pipeline trains on the batches of a prepared loader; try accelerator.prepare_loader(…)")]
    BatchOutsideOfLoader,
    /// A step whose micro-batches ended before it was complete.
    #[error(
        "the batches ended in the middle of a step; try a prepared loader, or as many batches as whole steps have"
    )]
    StepWithoutData,
    /// A second step after one backward.
    #[error("there was no backward since the optimizer's last step; {ORDER}")]
    StepWithoutBackward,
    /// Clipping of whole parameters, whose gradients ranks divide among them.
    #[error(
        "clip_grad_norm got whole parameters, and ranks divide their gradients by rows; try model.parameters(), which are the rows \
         that this rank holds"
    )]
    ClippedWhole,
}

const ORDER: &str = "try backward, clip_grad_norm, step and zero_grad in this order";

impl RunError {
    /// Whether a new group may succeed: a process was lost, and nobody made a mistake.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of the group, if it is one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            _ => None,
        }
    }

    /// Whether the other ranks have the same error, and can still be communicated with.
    pub(crate) fn is_agreed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl AsRef<dyn std::error::Error + Send + Sync> for RunError {
    fn as_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        self
    }
}

impl From<CommError> for RunError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<TorchError> for RunError {
    fn from(error: TorchError) -> Self {
        match error {
            TorchError::Comm(error) => Self::Comm(error),
            error => Self::Torch(Box::new(error)),
        }
    }
}

impl From<tch::TchError> for RunError {
    fn from(error: tch::TchError) -> Self {
        TorchError::from(error).into()
    }
}

impl From<ParallelError> for RunError {
    fn from(error: ParallelError) -> Self {
        match error {
            ParallelError::Comm(error) => Self::Comm(error),
            ParallelError::Torch(error) => error.into(),
            // Every rank has found the same.
            ParallelError::OtherModel { .. } | ParallelError::NoFirstBatch { .. } => {
                SharedFailure::on_all_ranks(error.to_string()).into()
            }
            error => Self::Parallel(Box::new(error)),
        }
    }
}

/// Errors of rank 0, which reads and writes for all, are known to all ranks.
impl From<CheckpointError> for RunError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Comm(error) => Self::Comm(error),
            CheckpointError::Torch(error) => (*error).into(),
            CheckpointError::OnRankZero { cause } => SharedFailure::on_all_ranks(cause).into(),
            error => SharedFailure::on_all_ranks(error.to_string()).into(),
        }
    }
}
