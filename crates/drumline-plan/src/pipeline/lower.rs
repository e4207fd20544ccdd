//! From computations to a whole program: sends and receives, and the reduction of gradients.
//!
//! ```text
//!   rank 0:  0F0 0F1 …             rank 0:  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 …
//!   rank 1:  1F0 1B0 …      ─▶     rank 1:  1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 …
//! ```
//! Ranks take turns. Whoever computes lists its send, and at the same moment the receive on the other rank, so that both ranks
//! of a pair list their messages in the same order: this keeps a pipeline from stopping wherever messages pass in order. A
//! computation waits until the receive that it needs is listed.
//!
//! The gradients of a stage are reduced over its replicas after its last backward, unless the rows already say where.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{Action, Compute, Message, Work};
use super::program::{Place, Program, Unplaced};

/// Computations that cannot become a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LowerError {
    /// No rank can continue.
    #[error(
        "no rank can continue: {place} waits for {needs}, which nobody can compute before; try another order"
    )]
    Stuck {
        /// What the first rank that waits cannot do.
        place: Place,
        /// What it waits for.
        needs: Message,
    },
    /// A stage or a micro-batch that the program does not have.
    #[error(transparent)]
    Unplaced(#[from] Unplaced),
}

/// The activations and gradients that a rank has or is going to receive.
struct Listed<'a> {
    program: &'a Program,
    /// Those that stages get: activations, then gradients.
    arrived: [Vec<bool>; 2],
}

impl<'a> Listed<'a> {
    fn new(program: &'a Program) -> Self {
        let none = vec![false; program.stages.num_stages() * program.num_micro_batches];
        Self { program, arrived: [none.clone(), none] }
    }

    fn slot(&mut self, at: Message) -> &mut bool {
        &mut self.arrived[at.way as usize][at.stage * self.program.num_micro_batches + at.micro_batch]
    }

    /// What a computation needs from another stage and does not have, as its own stage receives it.
    fn missing(&mut self, work: Work) -> Option<Message> {
        self.program.needs(work).filter(|at| !*self.slot(*at))
    }
}

/// The rows of a program with all messages, and with the reduction of gradients. Messages that its rows have are listed again.
pub fn lower(program: &Program) -> Result<Program, LowerError> {
    program.check_placed()?;
    let without = |row: &Vec<Action>| row.iter().filter(|action| action.sent().is_none()).copied().collect();
    let rows = program.rows.iter().map(without).collect();
    let given = with_reductions(Program { rows, ..program.clone() }).rows;
    let mut rows = vec![Vec::new(); given.len()];
    let mut next = vec![0; given.len()];
    let mut listed = Listed::new(program);
    let mut turns = Turns::new(given.len());
    while let Some(rank) = turns.next() {
        let Some(&action) = given[rank].get(next[rank]) else { continue };
        if action.works().any(|work| listed.missing(work).is_some()) {
            continue;
        }
        next[rank] += 1;
        rows[rank].push(action);
        turns.wake(rank);
        for message in action.works().filter_map(|work| program.gives(work)) {
            list(program, message, &mut rows);
            *listed.slot(message) = true;
            turns.wake(program.stages.rank_of(message.stage));
        }
    }
    let waiting = (0..given.len()).find_map(|rank| {
        let action = *given[rank].get(next[rank])?;
        let needs = action.works().find_map(|work| listed.missing(work))?;
        let needs = Action::Receive(needs).sent()?;
        Some(LowerError::Stuck { place: Place { rank, position: next[rank], action }, needs })
    });
    waiting.map_or_else(|| Ok(Program { rows, ..program.clone() }), Err)
}

/// Whose turn it is: rank 0, rank 1, … and again, without those that wait.
struct Turns {
    now: BTreeSet<usize>,
    after: BTreeSet<usize>,
    last: usize,
}

impl Turns {
    fn new(ranks: usize) -> Self {
        Self { now: (0..ranks).collect(), after: BTreeSet::new(), last: 0 }
    }

    fn next(&mut self) -> Option<usize> {
        if self.now.is_empty() {
            std::mem::swap(&mut self.now, &mut self.after);
        }
        self.last = self.now.pop_first()?;
        Some(self.last)
    }

    /// A rank may be able to continue.
    fn wake(&mut self, rank: usize) {
        let turn = if rank > self.last { &mut self.now } else { &mut self.after };
        turn.insert(rank);
    }
}

/// Lists both ends of what a stage gets, if its rank does not have it.
fn list(program: &Program, at: Message, rows: &mut [Vec<Action>]) {
    let receive = Action::Receive(at);
    let (Some(from), Some(send)) = (program.peer_of(&receive), receive.mirrored()) else { return };
    let to = program.stages.rank_of(at.stage);
    if from != to {
        rows[from].push(send);
        rows[to].push(receive);
    }
}

/// The program with a reduction after the last backward of each stage, and after the messages that follow it, unless it has
/// any reduction.
pub(super) fn with_reductions(program: Program) -> Program {
    let is_reduction = |action: &Action| matches!(action, Action::ReduceGrad(_));
    if program.rows.iter().flatten().any(is_reduction) {
        return program;
    }
    let rows = program.rows.iter().map(|row| with_reductions_of(row)).collect();
    Program { rows, ..program }
}

fn with_reductions_of(row: &[Action]) -> Vec<Action> {
    let adds = |work: &Work| matches!(work.compute, Compute::Backward | Compute::Weight);
    let mut last = BTreeMap::new();
    for (position, action) in row.iter().enumerate() {
        last.extend(action.works().filter(adds).map(|work| (work.stage, position)));
    }
    let mut with = Vec::with_capacity(row.len() + last.len());
    let mut complete: Vec<usize> = Vec::new();
    for (position, action) in row.iter().enumerate() {
        if action.sent().is_none() {
            with.extend(complete.drain(..).map(Action::ReduceGrad));
        }
        with.push(*action);
        let stages = action.works().filter(adds).map(|work| work.stage);
        complete.extend(stages.filter(|stage| last.get(stage) == Some(&position)));
        complete.dedup();
    }
    with.extend(complete.into_iter().map(Action::ReduceGrad));
    with
}

#[cfg(test)]
mod tests {
    use super::super::schedule::tests_support::{read, written};
    use super::super::stage_map::StageMap;
    use super::*;

    fn program(rows: &[&str], chunks: usize, num_micro_batches: usize) -> Program {
        let stages = StageMap::Loop { ranks: rows.len(), chunks };
        Program { stages, num_micro_batches, rows: rows.iter().map(|row| read(row)).collect() }
    }

    #[test]
    fn both_ranks_of_a_pair_list_their_messages_in_one_order() {
        let lowered = lower(&program(&["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], 1, 2)).unwrap();
        let rows = [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
        ];
        assert_eq!([written(&lowered.rows[0]), written(&lowered.rows[1])], rows);
        assert_eq!(lower(&lowered).unwrap(), lowered, "again");
    }

    #[test]
    fn stages_of_one_rank_exchange_no_messages() {
        let lowered = lower(&program(&["0F0 1F0 1I0 1W0 0I0 0W0"], 2, 1)).unwrap();
        assert_eq!(written(&lowered.rows[0]), "0F0 1F0 1I0 1W0 1REDUCE_GRAD 0I0 0W0 0REDUCE_GRAD");
    }

    #[test]
    fn an_order_that_nobody_can_carry_out_is_an_error() {
        let error = |rows, micro_batches| lower(&program(rows, 1, micro_batches)).unwrap_err().to_string();
        assert_eq!(
            error(&["0B0 0F0", "1F0 1B0"], 1),
            "no rank can continue: action 0 of rank 0 (0B0) waits for the gradients that stage 1 sends for micro-batch 0, \
             which nobody can compute before; try another order"
        );
        assert_eq!(
            error(&["0F0 1B0", "1F0 0B0"], 1),
            "action 1 of rank 0 (1B0) is of stage 1, which rank 1 holds; try it in the row of that rank"
        );
        assert_eq!(
            error(&["0F0 0F1", "1F0"], 1),
            "action 1 of rank 0 (0F1) is outside the program, which has 2 stages and 1 micro-batches; try smaller \
             numbers, which begin at 0"
        );
    }
}
