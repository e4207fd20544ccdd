//! What a rank of a pipeline does: computations, messages, and the reduction of gradients, written as PyTorch writes them.
//!
//! ```text
//!   2F0        forward of stage 2, micro-batch 0          3SEND_F1    stage 3 sends its output for micro-batch 1
//!   2B0        backward, of input and weights             4RECV_F1    stage 4 receives it
//!   2I0, 2W0   the two halves of a backward               4SEND_B1    stage 4 sends the gradient of what it received
//!   1UNSHARD   gather the parameters of stage 1           3RECV_B1    stage 3 receives it
//!   1RESHARD   free them                                  1REDUCE_GRAD  reduce the gradients of stage 1 over replicas
//!   (0F7;7B3)OVERLAP_F_B   two computations that may run at the same time
//! ```

use std::fmt;
use std::str::FromStr;

/// A kind of computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Compute {
    /// The forward of a stage.
    Forward,
    /// The whole backward: gradients of the input and of the weights.
    Backward,
    /// The part of a backward that the stage before waits for: the gradient of the input.
    Input,
    /// The rest of a backward: the gradients of the weights.
    Weight,
}

/// The way of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// Activations, from a stage to the next.
    Forward,
    /// Gradients of activations, from a stage to the one before.
    Backward,
}

/// A computation of a stage for a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Work {
    /// What is computed.
    pub compute: Compute,
    /// The stage, 0 for the one that reads the batch.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

/// One end of a message: the stage that sends or receives it, not its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// What is sent.
    pub way: Way,
    /// The stage that sends or receives.
    pub stage: usize,
    /// The micro-batch.
    pub micro_batch: usize,
}

/// One thing that a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Computes.
    Compute(Work),
    /// Computes two things that may run at the same time.
    Overlap(Work, Work),
    /// Sends what a stage has computed to the rank of the neighbouring stage.
    Send(Message),
    /// Receives what the neighbouring stage has computed.
    Receive(Message),
    /// Gathers the parameters of a stage from the ranks among which they are divided.
    Unshard(usize),
    /// Frees the gathered parameters of a stage.
    Reshard(usize),
    /// Reduces the gradients of a stage over its replicas.
    ReduceGrad(usize),
}

/// A text that is no action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no action of a pipeline; try one like 2F0, 2B0, 2I0, 2W0, 2SEND_F0, 3RECV_F0, 1UNSHARD or 1REDUCE_GRAD"
)]
pub struct NoSuchAction(String);

impl Compute {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Forward, Self::Backward, Self::Input, Self::Weight];

    /// The letter that PyTorch uses.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::Input => 'I',
            Self::Weight => 'W',
        }
    }
}

impl Way {
    /// Both ways.
    pub const ALL: [Self; 2] = [Self::Forward, Self::Backward];

    /// The letter that PyTorch uses.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
        }
    }
}

impl Action {
    /// A computation.
    pub fn compute(compute: Compute, stage: usize, micro_batch: usize) -> Self {
        Self::Compute(Work { compute, stage, micro_batch })
    }

    /// The stage whose rank does this; the first of two that overlap.
    pub fn stage(&self) -> usize {
        match *self {
            Self::Compute(work) | Self::Overlap(work, _) => work.stage,
            Self::Send(message) | Self::Receive(message) => message.stage,
            Self::Unshard(stage) | Self::Reshard(stage) | Self::ReduceGrad(stage) => stage,
        }
    }

    /// The stages of it, with the micro-batch where it is of one: one of them, or two that overlap.
    pub fn parts(self) -> impl Iterator<Item = (usize, Option<usize>)> {
        let of = |work: Work| (work.stage, Some(work.micro_batch));
        let (first, second) = match self {
            Self::Compute(work) => (of(work), None),
            Self::Overlap(first, second) => (of(first), Some(of(second))),
            Self::Send(message) | Self::Receive(message) => {
                ((message.stage, Some(message.micro_batch)), None)
            }
            Self::Unshard(stage) | Self::Reshard(stage) | Self::ReduceGrad(stage) => ((stage, None), None),
        };
        [first].into_iter().chain(second)
    }

    /// The stage at the other end of a message: the one that receives what this sends, or sends what this receives. `None` for
    /// what is no message, and before the first stage.
    pub fn peer_stage(&self) -> Option<usize> {
        match *self {
            Self::Send(Message { way: Way::Forward, stage, .. })
            | Self::Receive(Message { way: Way::Backward, stage, .. }) => Some(stage + 1),
            Self::Send(Message { way: Way::Backward, stage, .. })
            | Self::Receive(Message { way: Way::Forward, stage, .. }) => stage.checked_sub(1),
            _ => None,
        }
    }

    /// A message as its sender names it, which is the same at both ends: a tag. `None` where there is no peer.
    pub fn sent(&self) -> Option<Message> {
        match *self {
            Self::Send(message) => self.peer_stage().map(|_| message),
            Self::Receive(message) => Some(Message { stage: self.peer_stage()?, ..message }),
            _ => None,
        }
    }

    /// The other end of a message: the receive of a send, the send of a receive.
    pub fn mirrored(&self) -> Option<Self> {
        let stage = self.peer_stage()?;
        match *self {
            Self::Send(message) => Some(Self::Receive(Message { stage, ..message })),
            Self::Receive(message) => Some(Self::Send(Message { stage, ..message })),
            _ => None,
        }
    }

    /// The computations of it: none, one, or two that overlap.
    pub fn works(self) -> impl Iterator<Item = Work> {
        let (first, second) = match self {
            Self::Compute(work) => (Some(work), None),
            Self::Overlap(first, second) => (Some(first), Some(second)),
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }
}

/// As its sender names it.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.way {
            Way::Forward => "activations",
            Way::Backward => "gradients",
        };
        write!(f, "the {what} that stage {} sends for micro-batch {}", self.stage, self.micro_batch)
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.compute.letter(), self.micro_batch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compute(work) => work.fmt(f),
            Self::Overlap(first, second) => write!(f, "({first};{second})OVERLAP_F_B"),
            Self::Send(Message { way, stage, micro_batch }) => {
                write!(f, "{stage}SEND_{}{micro_batch}", way.letter())
            }
            Self::Receive(Message { way, stage, micro_batch }) => {
                write!(f, "{stage}RECV_{}{micro_batch}", way.letter())
            }
            Self::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Self::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Self::ReduceGrad(stage) => write!(f, "{stage}REDUCE_GRAD"),
        }
    }
}

/// A number, then one of these words, then a number or nothing.
fn parts(text: &str) -> Option<(usize, &str, Option<usize>)> {
    let (stage, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let (word, micro_batch) = rest.split_at(rest.trim_end_matches(|c: char| c.is_ascii_digit()).len());
    let micro_batch = (!micro_batch.is_empty()).then(|| micro_batch.parse()).transpose().ok()?;
    Some((stage.parse().ok()?, word, micro_batch))
}

fn work(text: &str) -> Option<Work> {
    let (stage, word, micro_batch) = parts(text)?;
    let compute = Compute::ALL.into_iter().find(|compute| word.chars().eq([compute.letter()]))?;
    Some(Work { compute, stage, micro_batch: micro_batch? })
}

fn action(text: &str) -> Option<Action> {
    if let Some(both) = text.strip_suffix("OVERLAP_F_B") {
        let (first, second) = both.strip_prefix('(')?.strip_suffix(')')?.split_once(';')?;
        return Some(Action::Overlap(work(first)?, work(second)?));
    }
    if let Some(work) = work(text) {
        return Some(Action::Compute(work));
    }
    let (stage, word, micro_batch) = parts(text)?;
    let message = |way| Some(Message { way, stage, micro_batch: micro_batch? });
    Some(match (word, micro_batch) {
        ("SEND_F", _) => Action::Send(message(Way::Forward)?),
        ("SEND_B", _) => Action::Send(message(Way::Backward)?),
        ("RECV_F", _) => Action::Receive(message(Way::Forward)?),
        ("RECV_B", _) => Action::Receive(message(Way::Backward)?),
        ("UNSHARD", None) => Action::Unshard(stage),
        ("RESHARD", None) => Action::Reshard(stage),
        ("REDUCE_GRAD", None) => Action::ReduceGrad(stage),
        _ => return None,
    })
}

impl FromStr for Action {
    type Err = NoSuchAction;

    fn from_str(text: &str) -> Result<Self, NoSuchAction> {
        action(text).ok_or_else(|| NoSuchAction(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_read_as_they_are_written() {
        let texts = [
            "2F0",
            "2B10",
            "12I3",
            "0W0",
            "3SEND_F1",
            "4RECV_F1",
            "4SEND_B1",
            "3RECV_B1",
            "1UNSHARD",
            "1RESHARD",
            "0REDUCE_GRAD",
            "(0F7;7B3)OVERLAP_F_B",
        ];
        for text in texts {
            assert_eq!(text.parse::<Action>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn both_ends_of_a_message_have_one_name() {
        let ends = [("3SEND_F1", "4RECV_F1"), ("4SEND_B1", "3RECV_B1")];
        for [send, receive] in
            ends.map(|(send, receive)| [send, receive].map(|text| text.parse::<Action>().unwrap()))
        {
            assert_eq!((send.mirrored(), receive.mirrored()), (Some(receive), Some(send)));
            assert_eq!(
                (send.peer_stage(), receive.peer_stage()),
                (Some(receive.stage()), Some(send.stage()))
            );
            let Action::Send(message) = send else { unreachable!("{send} is a send") };
            assert_eq!((send.sent(), receive.sent()), (Some(message), Some(message)));
        }
        for nobody in ["0SEND_B0", "0RECV_F0", "2F0", "1UNSHARD"].map(|text| text.parse::<Action>().unwrap())
        {
            assert_eq!((nobody.sent(), nobody.mirrored(), nobody.peer_stage()), (None, None, None));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "F",
            "2F",
            "F0",
            "2X0",
            "2SEND_F",
            "1UNSHARD3",
            "(0F7)OVERLAP_F_B",
            "-1F0",
            "1F99999999999999999999",
            "0F0…",
            "“0F0”",
            "0é",
            "0é0",
            "٠F٠",
        ] {
            let error = text.parse::<Action>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("`{text}` is no action")), "{error}");
        }
    }
}
