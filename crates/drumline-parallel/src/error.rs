//! What can go wrong in data parallelism.

use drumline_comm::CommError;
use drumline_plan::NoRoom;
use drumline_torch::{PinError, SwapError, TorchError};
use tch::Device;

use crate::pipeline::PipelineError;

/// An error of a parallel model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// libtorch, or a collective on tensors.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// A collective.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// The ranks built different models. Every rank returns this error.
    #[error(
        "rank {rank} has another model than rank 0: {difference}; try building it from the same configuration on all ranks"
    )]
    OtherModel {
        /// The first rank whose model differs.
        rank: usize,
        /// The first differences.
        difference: String,
    },
    /// Tensors of one model are on different devices.
    #[error(
        "`{name}` is on {device:?} and `{first}` on {first_device:?}; try one device for the whole model"
    )]
    DifferentDevices {
        /// A tensor.
        name: String,
        /// Its device.
        device: Device,
        /// The model's first tensor.
        first: String,
        /// Its device.
        first_device: Device,
    },
    /// Gradients cannot be reduced on this kind of device.
    #[error("several ranks cannot reduce gradients on {device:?}; try an NVIDIA GPU, or Device::Cpu")]
    UnsupportedDevice {
        /// The model's device.
        device: Device,
    },
    /// A rank has asked for the end of an evaluation that all ranks make together.
    #[error("the evaluation ends early: a rank has asked for its end")]
    EvaluationCut,
    /// A setting or an argument has a value that cannot be used.
    #[error("{what} is {got}; expected {expected}")]
    Value {
        /// Which one.
        what: String,
        /// The values that are possible, and what to try.
        expected: String,
        /// Its value.
        got: String,
    },
    /// The optimizer's steps need whole parameters, of which ranks have parts.
    #[error(
        "{what} needs whole parameters, and ranks along tp have parts; try Adam, AdamW, Lion, SGD or Adagrad with f32 state"
    )]
    WholeTensors {
        /// What needs them.
        what: &'static str,
    },
    /// The ranks cannot be divided into subgroups of this size.
    #[error("{ranks} ranks cannot be divided into groups of {size}; try a divisor of {ranks}")]
    GroupSize {
        /// The number of ranks.
        ranks: usize,
        /// The size of a subgroup.
        size: usize,
    },
    /// PyTorch's "Expected to mark a variable ready only once".
    #[error(
        "the gradient of `{name}` was ready twice in one backward of rank {rank}, and its bucket may be reduced without the second part \
         (PyTorch: \"Expected to mark a variable ready only once\"); a backward inside a function's backward, such as of two checkpointed \
         segments that share a parameter, does that; try one backward of the sum of all losses, or `no_sync` around it"
    )]
    MarkedReadyTwice {
        /// The rank.
        rank: usize,
        /// The parameter.
        name: String,
    },
    /// A parameter was frozen when `Ddp` was made, and requires a gradient now.
    #[error(
        "`{name}` was frozen when rank {rank} made its Ddp, and now requires a gradient, which would not be reduced; \
         try to freeze it after Ddp is made, or to make another Ddp"
    )]
    Unfrozen {
        /// The rank.
        rank: usize,
        /// The parameter.
        name: String,
    },
    /// A backward was called on the loss itself, and not through `Ddp`.
    #[error(
        "a backward of rank {rank} would not be reduced over ranks; try `model.backward(&loss)`, \
         or `model.no_sync(|| …)` around it to add up gradients"
    )]
    BackwardOutsideDdp {
        /// The rank.
        rank: usize,
    },
    /// A backward had no forward in training before it.
    #[error("backward needs a forward in training before it")]
    BackwardWithoutForward,
    /// A rank has no batch in the first step of a model with synchronised norms. Every rank returns this error.
    #[error(
        "rank {rank} has no batch in the first step, and cannot know which synchronised norms the others wait for; \
         try more data, or smaller batches"
    )]
    NoFirstBatch {
        /// The rank without a batch; the same on all ranks.
        rank: usize,
    },
    /// This rank ran out of data before its first step of a model with synchronised norms.
    #[error(
        "rank {rank} has run out of data before its first step, and cannot know which synchronised norms the others wait for; \
         try a first batch of length 0 there, or data for all ranks"
    )]
    NoFirstStep {
        /// This rank.
        rank: usize,
    },
    /// This rank has no samples in the first step of a model whose parameters are gathered when they are used.
    #[error(
        "rank {rank} has no samples in the first step, and cannot know in which order the others gather parameters; \
         try more data, or smaller batches"
    )]
    NoFirstUse {
        /// This rank.
        rank: usize,
    },
    /// A rank without samples cannot take part in synchronised norms and in gathers of parameters at once.
    #[error(
        "rank {rank} has no samples in a step of a model with synchronised norms whose parameters are gathered when they are used; \
         try stage 2, more data, or smaller batches"
    )]
    NormsWithoutSamples {
        /// This rank.
        rank: usize,
    },
    /// An operation outside of a step uses parameters that are divided among ranks.
    #[error(
        "`{operation}` on rank {rank} uses parameters of unit `{unit}` outside of a step, where they are divided among ranks; \
         try `Engine::full`, or the engine's `evaluate` between `begin_evaluation` and `end_evaluation` (for a metric: `BatchMetric::uses_model`)"
    )]
    UsedOutsideStep {
        /// The rank.
        rank: usize,
        /// The unit.
        unit: String,
        /// libtorch's name of the operation.
        operation: String,
    },
    /// An operation uses parameters of more units at once than are gathered at a time.
    #[error(
        "`{operation}` on rank {rank} uses parameters of {num_units} units at once, of which {num_slots} are gathered at a time; \
         try an operation for each of them"
    )]
    TooManyUnits {
        /// The rank.
        rank: usize,
        /// libtorch's name of the operation.
        operation: String,
        /// The number of units.
        num_units: usize,
        /// The number of units that are gathered at a time.
        num_slots: usize,
    },
    /// A communication hook panicked.
    #[error("a communication hook panicked: {message}")]
    HookPanicked {
        /// The message of the panic.
        message: String,
    },
    /// A replica of `DataParallel` panicked.
    #[error("a replica panicked: {message}")]
    ReplicaPanicked {
        /// The message of the panic.
        message: String,
    },
    /// Gradients are not reduced any more, because a reduction has failed.
    #[error("gradients are not reduced any more, because of an earlier error: {cause}")]
    ReductionEnded {
        /// The earlier error, which was returned where it happened.
        cause: String,
    },
    /// A thread could not be started.
    #[error("cannot start {what}: {cause}")]
    Thread {
        /// Which thread.
        what: &'static str,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// State cannot be in a file.
    #[error(transparent)]
    Swap(#[from] SwapError),
    /// Host memory cannot be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The optimizer's state fits neither into memory nor on disk.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// A rank cannot offload what it should. Every rank returns this error.
    #[error("rank {rank} cannot offload: {cause}")]
    OffloadOnRank {
        /// The rank.
        rank: usize,
        /// Its error.
        cause: String,
    },
    /// A parameter has a hook of the program.
    #[error(
        "`{parameter}` has a GradHook of the program, which `backward_and_step` would replace; try `backward` and `step`"
    )]
    HookedParameter {
        /// The parameter.
        parameter: String,
    },
    /// Offloaded state was not read or written completely, and is not that of a step any more.
    #[error("the optimizer makes no more steps, because of an earlier error: {cause}")]
    OffloadEnded {
        /// The earlier error, which was returned where it happened.
        cause: String,
    },
    /// An optimizer does not say how much state it keeps.
    #[error(
        "the optimizer `{optimizer}` does not say how much state it keeps (`state_bytes`), so that it cannot be offloaded; try AdamW"
    )]
    NotOffloadable {
        /// Its kind.
        optimizer: String,
    },
    /// An optimizer keeps several tensors in one memory.
    #[error(
        "the optimizer's state of `{parameter}` is in the memory of another tensor, and cannot be offloaded; try another optimizer"
    )]
    SharedState {
        /// The parameter.
        parameter: String,
    },
    /// An optimizer keeps more than it has said.
    #[error(
        "the optimizer keeps {needed} bytes for `{parameter}`, and has said that {room} are enough; try another optimizer, or no offload"
    )]
    StateGrew {
        /// The parameter.
        parameter: String,
        /// The bytes of its tensors.
        needed: usize,
        /// The bytes that were reserved.
        room: usize,
    },
    /// State cannot be offloaded from a GPU to this place.
    #[error("the model trains on {device:?}, where {what}; try {hint}")]
    OffloadOnGpu {
        /// The model's device.
        device: Device,
        /// What is not possible.
        what: &'static str,
        /// What to try.
        hint: &'static str,
    },
    /// Memory cannot be allocated.
    #[error("cannot allocate {bytes} bytes for {what}: {cause}; try a smaller model, or more ranks")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: usize,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// A pipeline.
    #[error(transparent)]
    Pipeline(Box<PipelineError>),
    /// Something happened that this library rules out.
    #[error("internal error: {what}; please report it")]
    Internal {
        /// What happened.
        what: &'static str,
    },
}

/// Why a step cannot be recorded in a CUDA graph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotRecordable {
    /// Collectives on tensors cannot be recorded.
    #[error(transparent)]
    Collectives(#[from] drumline_torch::NotRecordable),
    /// The model is on the CPU.
    #[error("gradients are reduced in host memory")]
    GradientsOnHost,
    /// The layers of synchronised norms are on the CPU.
    #[error("synchronised norms communicate through host memory")]
    NormsOnHost,
    /// The order of buckets is not final yet.
    #[error("the first two steps show in which order gradients become ready")]
    OrderNotKnown,
    /// The model is cut along `pp` or `tp`, or its texts along `cp`.
    #[error(
        "ranks have different parts of the model or of its texts, and communicate in forward and backward"
    )]
    ModelIsCut,
    /// The CPU makes a part of the step.
    #[error("the optimizer's state is in host memory")]
    OffloadedState,
    /// The communication hook makes decisions from step to step.
    #[error("the communication hook does not do the same in each step")]
    Hook,
}

impl ParallelError {
    /// A [`Value`](Self::Value) error.
    pub(crate) fn value(
        what: impl Into<String>,
        got: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Value { what: what.into(), got: got.to_string(), expected: expected.into() }
    }

    /// The error for a name that no tensor of the model has.
    pub(crate) fn no_tensor(name: &str) -> Self {
        Self::value("the name of a tensor", format!("`{name}`"), "a name of the model's variables")
    }

    /// Whether forming a new group may help: a process was lost, and the program made no mistake.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of the process group, if that is what failed.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            Self::Torch(error) => error.comm_error(),
            Self::Pipeline(error) => error.cause()?.comm_error(),
            _ => None,
        }
    }
}

impl From<CommError> for ParallelError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<tch::TchError> for ParallelError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
