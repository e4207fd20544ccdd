//! The tensors of a step: what each action takes and what it makes.
//!
//! ```text
//!                input ─▶ F ─▶ output ─▶ send          on the next rank: receive ─▶ its input
//!                         └─▶ saved ─┐
//!   receive ─▶ output gradient ──────┴▶ B ─▶ input gradient ─▶ send
//!                                       I ─▶ input gradient, and weight inputs ─▶ W
//! ```
//! Each is made once, taken once, and freed by whoever takes it. Between two stages of one rank there are no messages: the
//! forward of one makes the input of the other.

use std::fmt;

use super::action::{Action, Compute, Message, Way, Work};
use super::program::Program;

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorKind {
    /// The activations with which a stage begins.
    Input,
    /// What the forward leaves for the backward.
    Saved,
    /// The activations with which a stage ends, until they are sent.
    Output,
    /// The gradient of the output, received.
    OutputGradient,
    /// The gradient of the input, until it is sent.
    InputGradient,
    /// What the weight gradients are computed from, if they are computed apart.
    WeightInputs,
}

/// A tensor of a stage for a micro-batch, on the rank of the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tensor {
    /// What it is for.
    pub kind: TensorKind,
    /// The stage.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

impl TensorKind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Input,
        Self::Saved,
        Self::Output,
        Self::OutputGradient,
        Self::InputGradient,
        Self::WeightInputs,
    ];
}

/// What actions of a program take and make.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effects<'a> {
    program: &'a Program,
    is_forward_only: bool,
}

impl<'a> Effects<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        Self { program, is_forward_only: program.is_forward_only() }
    }

    /// The tensors that must be there, and are freed.
    pub(super) fn takes(self, action: Action) -> impl Iterator<Item = Tensor> {
        let sent = match action {
            Action::Send(Message { way: Way::Forward, stage, micro_batch }) => {
                Some(Tensor { kind: TensorKind::Output, stage, micro_batch })
            }
            Action::Send(Message { way: Way::Backward, stage, micro_batch }) => {
                Some(Tensor { kind: TensorKind::InputGradient, stage, micro_batch })
            }
            _ => None,
        };
        action.works().flat_map(move |work| self.taken_by(work)).flatten().chain(sent)
    }

    /// The tensors that are there afterwards, and were not before.
    pub(super) fn makes(self, action: Action) -> impl Iterator<Item = Tensor> {
        let received = match action {
            Action::Receive(message) => Some(got(message)),
            _ => None,
        };
        action.works().flat_map(move |work| self.made_by(work)).flatten().chain(received)
    }

    fn taken_by(self, work: Work) -> [Option<Tensor>; 2] {
        let Work { compute, stage, micro_batch } = work;
        let of_stage = |kind| Some(Tensor { kind, stage, micro_batch });
        let needed = self.program.needs(work).map(got);
        match compute {
            Compute::Forward => [needed, None],
            Compute::Backward | Compute::Input => [of_stage(TensorKind::Saved), needed],
            Compute::Weight => [of_stage(TensorKind::WeightInputs), None],
        }
    }

    fn made_by(self, work: Work) -> [Option<Tensor>; 2] {
        let Work { compute, stage, micro_batch } = work;
        let of_stage = |kind| Tensor { kind, stage, micro_batch };
        let is_here =
            |at: &Message| self.program.stages.rank_of(at.stage) == self.program.stages.rank_of(stage);
        let given = self.program.gives(work).map(|at| match at.way {
            _ if is_here(&at) => got(at),
            Way::Forward => of_stage(TensorKind::Output),
            Way::Backward => of_stage(TensorKind::InputGradient),
        });
        let kept = match compute {
            Compute::Forward if !self.is_forward_only => Some(of_stage(TensorKind::Saved)),
            Compute::Input => Some(of_stage(TensorKind::WeightInputs)),
            _ => None,
        };
        [given, kept]
    }

    /// The action that makes a tensor.
    pub(super) fn maker(self, tensor: Tensor) -> Action {
        let Tensor { kind, stage, micro_batch } = tensor;
        let from = |way| {
            let receive = Action::Receive(Message { way, stage, micro_batch });
            let peer = self.program.peer_of(&receive);
            let sender = receive.peer_stage().filter(|_| peer == Some(self.program.stages.rank_of(stage)));
            let compute = if way == Way::Forward { Compute::Forward } else { Compute::Backward };
            sender.map_or(receive, |stage| Action::compute(compute, stage, micro_batch))
        };
        match kind {
            TensorKind::Input => from(Way::Forward),
            TensorKind::OutputGradient => from(Way::Backward),
            TensorKind::Saved | TensorKind::Output => Action::compute(Compute::Forward, stage, micro_batch),
            TensorKind::InputGradient => Action::compute(Compute::Backward, stage, micro_batch),
            TensorKind::WeightInputs => Action::compute(Compute::Input, stage, micro_batch),
        }
    }

    /// The action that takes a tensor.
    pub(super) fn taker(self, tensor: Tensor) -> Action {
        let Tensor { kind, stage, micro_batch } = tensor;
        match kind {
            TensorKind::Input => Action::compute(Compute::Forward, stage, micro_batch),
            TensorKind::Saved | TensorKind::OutputGradient => {
                Action::compute(Compute::Backward, stage, micro_batch)
            }
            TensorKind::Output => Action::Send(Message { way: Way::Forward, stage, micro_batch }),
            TensorKind::InputGradient => Action::Send(Message { way: Way::Backward, stage, micro_batch }),
            TensorKind::WeightInputs => Action::compute(Compute::Weight, stage, micro_batch),
        }
    }
}

/// What a stage has when it has got a message.
fn got(at: Message) -> Tensor {
    let kind = match at.way {
        Way::Forward => TensorKind::Input,
        Way::Backward => TensorKind::OutputGradient,
    };
    Tensor { kind, stage: at.stage, micro_batch: at.micro_batch }
}

/// As in "needs …".
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            TensorKind::Input => "the input",
            TensorKind::Saved => "the saved activations",
            TensorKind::Output => "the output",
            TensorKind::OutputGradient => "the gradient of the output",
            TensorKind::InputGradient => "the gradient of the input",
            TensorKind::WeightInputs => "the inputs of the weight gradients",
        };
        write!(f, "{what} of stage {} for micro-batch {}", self.stage, self.micro_batch)
    }
}
