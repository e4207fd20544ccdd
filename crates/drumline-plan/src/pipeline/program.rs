//! A program: what each rank of a pipeline does in a step.
//!
//! Whoever carries one out walks `program.rows[rank]` from the first action to the last, and needs nothing else: receives are
//! listed before the computations that use them, sends after those that they send.

use std::fmt;

use super::action::{Action, Compute, Message, Way, Work};
use super::stage_map::StageMap;

/// What each rank of a pipeline does in a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// Which rank holds which stage.
    pub stages: StageMap,
    /// Micro-batches of a step.
    pub num_micro_batches: usize,
    /// The actions of each rank, in order.
    pub rows: Vec<Vec<Action>>,
}

/// Where an action is in a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// The number of the action in the rank's row, from 0.
    pub position: usize,
    /// The action.
    pub action: Action,
}

/// An action that has no place in a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unplaced {
    /// A stage or a micro-batch that does not exist.
    #[error(
        "{place} is outside the program, which has {stages} stages and {micro_batches} micro-batches; try smaller numbers, \
         which begin at 0"
    )]
    Outside {
        /// The action.
        place: Place,
        /// The stages that the program has.
        stages: usize,
        /// The micro-batches that it has.
        micro_batches: usize,
    },
    /// Another rank holds the stage.
    #[error("{place} is of stage {stage}, which rank {holder} holds; try it in the row of that rank")]
    OtherRank {
        /// The action.
        place: Place,
        /// Its stage.
        stage: usize,
        /// The rank of this stage.
        holder: usize,
    },
    /// More or fewer rows than ranks.
    #[error("{rows} rows for {ranks} ranks; try a row for each rank")]
    Rows {
        /// The rows of the program.
        rows: usize,
        /// The ranks that hold stages.
        ranks: usize,
    },
}

/// Where FNV-1a begins, and what it multiplies with.
const FNV: (u64, u64) = (0xcbf2_9ce4_8422_2325, 0x0100_0000_01b3);

impl Program {
    /// The rank at the other end of a message; `None` for what is no message, and where there is no stage.
    pub fn peer_of(&self, action: &Action) -> Option<usize> {
        let stage = action.peer_stage()?;
        (stage < self.stages.num_stages()).then(|| self.stages.rank_of(stage))
    }

    /// Pairs of ranks that exchange messages, the smaller rank first, in the order of ranks.
    ///
    /// They are the same on all ranks, so that each pair can be connected before the first step.
    pub fn pairs(&self) -> Vec<[usize; 2]> {
        let neighbours = (1..self.stages.num_stages()).map(|stage| {
            let [before, after] = [stage - 1, stage].map(|stage| self.stages.rank_of(stage));
            [before.min(after), before.max(after)]
        });
        let mut pairs: Vec<_> = neighbours.filter(|[first, second]| first != second).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// What a computation needs from another stage, as its own stage gets it: activations for a forward, gradients for a
    /// backward. `None` at the ends of the model, and for weight gradients.
    pub fn needs(&self, work: Work) -> Option<Message> {
        let Work { compute, stage, micro_batch } = work;
        match compute {
            Compute::Forward if stage > 0 => Some(Message { way: Way::Forward, stage, micro_batch }),
            Compute::Backward | Compute::Input if stage + 1 < self.stages.num_stages() => {
                Some(Message { way: Way::Backward, stage, micro_batch })
            }
            _ => None,
        }
    }

    /// What another stage gets from a computation.
    pub fn gives(&self, work: Work) -> Option<Message> {
        let Work { compute, stage, micro_batch } = work;
        match compute {
            Compute::Forward if stage + 1 < self.stages.num_stages() => {
                Some(Message { way: Way::Forward, stage: stage + 1, micro_batch })
            }
            Compute::Backward | Compute::Input if stage > 0 => {
                Some(Message { way: Way::Backward, stage: stage - 1, micro_batch })
            }
            _ => None,
        }
    }

    /// Whether there is a row for each rank, and each action is on the rank of its stage and of a micro-batch of the step.
    pub fn check_placed(&self) -> Result<(), Unplaced> {
        let [stages, ranks] = [self.stages.num_stages(), self.stages.num_ranks()];
        if self.rows.len() != ranks {
            return Err(Unplaced::Rows { rows: self.rows.len(), ranks });
        }
        for (rank, row) in self.rows.iter().enumerate() {
            for (position, action) in row.iter().enumerate() {
                let place = Place { rank, position, action: *action };
                let micro_batches = self.num_micro_batches;
                let is_outside =
                    |stage: usize, micro_batch: usize| stage >= stages || micro_batch >= micro_batches;
                if action.parts().any(|(stage, micro_batch)| is_outside(stage, micro_batch.unwrap_or(0))) {
                    return Err(Unplaced::Outside { place, stages, micro_batches });
                }
                let holder = |stage: usize| self.stages.rank_of(stage);
                if let Some((stage, _)) = action.parts().find(|(stage, _)| holder(*stage) != rank) {
                    return Err(Unplaced::OtherRank { place, stage, holder: holder(stage) });
                }
            }
        }
        Ok(())
    }

    /// The same without backward, for evaluation.
    pub fn forward_only(&self) -> Self {
        let forward = |action: &Action| match *action {
            Action::Compute(_) | Action::Overlap(..) => {
                action.works().find(|work| work.compute == Compute::Forward).map(Action::Compute)
            }
            Action::Send(message) | Action::Receive(message) => {
                (message.way == Way::Forward).then_some(*action)
            }
            Action::Unshard(_) | Action::Reshard(_) => Some(*action),
            Action::ReduceGrad(_) => None,
        };
        let rows = self.rows.iter().map(|row| row.iter().filter_map(forward).collect()).collect();
        Self { rows, ..self.clone() }
    }

    /// Whether nothing of it is a backward.
    pub fn is_forward_only(&self) -> bool {
        let is_backward = |work: Work| work.compute != Compute::Forward;
        !self.rows.iter().flatten().any(|action| action.works().any(is_backward))
    }

    /// A number that is equal for equal programs, on every machine and in every version: ranks compare it before the first
    /// step.
    pub fn fingerprint(&self) -> u64 {
        let stages = (0..self.stages.num_stages()).map(|stage| self.stages.rank_of(stage));
        let sizes = [self.stages.num_stages(), self.num_micro_batches, self.rows.len()];
        let head = sizes.into_iter().chain(stages).map(|number| number as u64);
        let rows =
            self.rows.iter().flat_map(|row| [row.len() as u64].into_iter().chain(row.iter().flat_map(words)));
        let (start, prime) = FNV;
        let bytes = head.chain(rows).flat_map(u64::to_le_bytes);
        bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(prime))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "action {} of rank {} ({})", self.position, self.rank, self.action)
    }
}

/// An action as numbers: its kind, its stage, its micro-batch, and the same of a second one.
fn words(action: &Action) -> [u64; 5] {
    let computed = |work: &Work| {
        let kind = match work.compute {
            Compute::Forward => 0,
            Compute::Backward => 1,
            Compute::Input => 2,
            Compute::Weight => 3,
        };
        [kind, work.stage, work.micro_batch]
    };
    let way = |way: Way| usize::from(way == Way::Backward);
    let [kind, stage, micro_batch, other, second] = match action {
        Action::Compute(work) => {
            let [kind, stage, micro_batch] = computed(work);
            [kind, stage, micro_batch, 0, 0]
        }
        Action::Overlap(first, second) => {
            let [[kind, stage, micro_batch], [other, and_stage, and_micro_batch]] =
                [first, second].map(computed);
            [16 + 4 * kind + other, stage, micro_batch, and_stage, and_micro_batch]
        }
        Action::Send(message) => [4 + way(message.way), message.stage, message.micro_batch, 0, 0],
        Action::Receive(message) => [6 + way(message.way), message.stage, message.micro_batch, 0, 0],
        Action::Unshard(stage) => [8, *stage, 0, 0, 0],
        Action::Reshard(stage) => [9, *stage, 0, 0, 0],
        Action::ReduceGrad(stage) => [10, *stage, 0, 0, 0],
    };
    [kind, stage, micro_batch, other, second].map(|number| number as u64)
}

#[cfg(test)]
mod tests {
    use super::super::schedule::{PipelineSize, Schedule};
    use super::*;

    fn program(schedule: Schedule, ranks: usize, micro_batches: usize) -> Program {
        schedule.program(PipelineSize { ranks, chunks: schedule.default_chunks(), micro_batches }).unwrap()
    }

    #[test]
    fn pairs_are_neighbours() {
        assert_eq!(program(Schedule::OneFOneB, 4, 4).pairs(), [[0, 1], [1, 2], [2, 3]]);
        assert_eq!(program(Schedule::Interleaved, 4, 4).pairs(), [[0, 1], [0, 3], [1, 2], [2, 3]]);
        assert_eq!(program(Schedule::ZeroBubbleV, 4, 4).pairs(), [[0, 1], [1, 2], [2, 3]]);
        assert_eq!(program(Schedule::ZeroBubbleV, 1, 4).pairs(), [[0; 2]; 0]);
    }

    #[test]
    fn peers_name_each_other() {
        let program = program(Schedule::ZeroBubbleV, 3, 5);
        for (rank, row) in program.rows.iter().enumerate() {
            for action in row.iter().filter(|action| action.sent().is_some()) {
                let peer = program.peer_of(action).unwrap();
                let mirrored = action.mirrored().unwrap();
                assert!(program.rows[peer].contains(&mirrored), "{action} on {rank}");
                assert_eq!(program.peer_of(&mirrored), Some(rank));
            }
        }
    }

    #[test]
    fn evaluation_keeps_forwards_and_their_messages() {
        let whole = program(Schedule::OneFOneB, 2, 3);
        let forward = whole.forward_only();
        assert!(forward.is_forward_only() && !whole.is_forward_only());
        let texts = |row: &[Action]| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(texts(&forward.rows[0]), "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2");
        assert_eq!(texts(&forward.rows[1]), "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2");
    }

    #[test]
    fn fingerprints_differ_where_programs_do() {
        let programs = Schedule::ALL.map(|schedule| program(schedule, 4, 8));
        let mut prints = programs.each_ref().map(Program::fingerprint).to_vec();
        let mut swapped = programs[0].clone();
        swapped.rows[2].swap(3, 5);
        let longer = Program { num_micro_batches: 9, ..programs[0].clone() };
        prints.extend([swapped.fingerprint(), longer.fingerprint()]);
        prints.sort_unstable();
        prints.dedup();
        assert_eq!(prints.len(), 8);
        // It is the same in every version: files and logs may hold it.
        assert_eq!(program(Schedule::GPipe, 2, 2).fingerprint(), 1_298_846_282_472_313_063);
    }
}
