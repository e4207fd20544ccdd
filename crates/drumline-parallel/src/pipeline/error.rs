//! What can go wrong in a pipeline.

use drumline_plan::pipeline::{
    Action, Compute, CsvError, LowerError, PartitionError, ScheduleError, VerifyError, Way,
};

use crate::error::ParallelError;

/// An error of a pipeline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The layers cannot be cut.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The schedule does not exist for this size.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The file of a program cannot be read.
    #[error(transparent)]
    Csv(#[from] CsvError),
    /// The program lists computations in an order that nobody can carry out.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The program cannot be carried out.
    #[error("the program cannot be carried out: {0}")]
    Verify(#[from] VerifyError),
    /// The program is for another number of ranks.
    #[error(
        "the program is for {program} ranks, and the mesh has {mesh} along pp; try a mesh of {program}, or 1, which carries out all rows"
    )]
    Ranks {
        /// The rows of the program.
        program: usize,
        /// The ranks along `pp`.
        mesh: usize,
    },
    /// A program of another number of micro-batches was given.
    #[error(
        "the program is for {program} micro-batches, and the step has {step}; try a schedule, which fits any number"
    )]
    MicroBatches {
        /// Those of the program.
        program: usize,
        /// Those of the step.
        step: usize,
    },
    /// Ranks along `pp` bring different numbers of micro-batches.
    #[error(
        "rank {rank} brings {got} micro-batches and rank {first} brings {expected}; try the same number on all ranks of a pipeline"
    )]
    Uneven {
        /// A rank.
        rank: usize,
        /// What it brings.
        got: usize,
        /// The first rank of its pipeline.
        first: usize,
        /// What that one brings.
        expected: usize,
    },
    /// Ranks have different programs.
    #[error(
        "rank {rank} has another program than rank 0; try the same schedule, layers and costs on all ranks"
    )]
    OtherProgram {
        /// The first rank with another one.
        rank: usize,
    },
    /// Another rank could not build its stages.
    #[error("rank {rank} cannot build its stages: {cause}")]
    NotBuilt {
        /// The rank.
        rank: usize,
        /// Its error.
        cause: String,
    },
    /// An action failed on this rank.
    #[error("rank {rank} failed at {}: {cause}", spoken(action))]
    Failed {
        /// This rank.
        rank: usize,
        /// What it did.
        action: Action,
        /// Why it failed.
        cause: Box<ParallelError>,
    },
    /// Another rank failed, or was lost, while this one did something else.
    #[error("rank {rank} stopped at {}: {cause}", spoken(action))]
    Stopped {
        /// This rank.
        rank: usize,
        /// What it did.
        action: Action,
        /// The error of its group, which names the other rank.
        cause: Box<ParallelError>,
    },
    /// Another rank failed, or was lost, when this one had done all its actions.
    #[error("rank {rank} stopped at the end of a step, after its last micro-batch: {cause}")]
    StoppedAtEnd {
        /// This rank.
        rank: usize,
        /// The error of its group, which names the other rank.
        cause: Box<ParallelError>,
    },
    /// A layer returned an error or panicked.
    #[error("layer `{layer}`: {cause}")]
    Layer {
        /// Its name.
        layer: String,
        /// The text of the error.
        cause: String,
    },
    /// An earlier step failed.
    #[error("the pipeline makes no more steps, because of an earlier error: {cause}")]
    Ended {
        /// The earlier error, which was returned where it happened.
        cause: String,
    },
}

impl PipelineError {
    /// The error that caused it, if it has one.
    pub(crate) fn cause(&self) -> Option<&ParallelError> {
        match self {
            Self::Failed { cause, .. } | Self::Stopped { cause, .. } | Self::StoppedAtEnd { cause, .. } => {
                Some(cause)
            }
            _ => None,
        }
    }
}

impl From<PipelineError> for ParallelError {
    fn from(error: PipelineError) -> Self {
        Self::Pipeline(Box::new(error))
    }
}

/// An action, with its stage and its micro-batch in words.
fn spoken(action: &Action) -> String {
    let words = match *action {
        Action::Compute(work) | Action::Overlap(work, _) => {
            let what = match work.compute {
                Compute::Forward => "the forward",
                Compute::Backward => "the backward",
                Compute::Input => "the input gradient",
                Compute::Weight => "the weight gradients",
            };
            format!("{what} of stage {}, micro-batch {}", work.stage, work.micro_batch)
        }
        Action::Send(message) | Action::Receive(message) => {
            let verb = if matches!(action, Action::Send(_)) { "sending" } else { "receiving" };
            let what = if message.way == Way::Forward { "activations" } else { "gradients" };
            format!("{verb} {what} of stage {}, micro-batch {}", message.stage, message.micro_batch)
        }
        Action::Unshard(stage) => format!("gathering stage {stage}"),
        Action::Reshard(stage) => format!("freeing stage {stage}"),
        Action::ReduceGrad(stage) => format!("reducing the gradients of stage {stage}"),
    };
    format!("{action} ({words})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_stage_and_micro_batch() {
        for (action, words) in [
            ("2F5", "2F5 (the forward of stage 2, micro-batch 5)"),
            ("2W5", "2W5 (the weight gradients of stage 2, micro-batch 5)"),
            ("1SEND_B3", "1SEND_B3 (sending gradients of stage 1, micro-batch 3)"),
            ("1REDUCE_GRAD", "1REDUCE_GRAD (reducing the gradients of stage 1)"),
        ] {
            assert_eq!(spoken(&action.parse().unwrap()), words);
        }
    }
}
