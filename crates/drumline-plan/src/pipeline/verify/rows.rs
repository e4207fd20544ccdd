//! Each row alone: what an action takes is there, and all that is made is taken.
//!
//! A computation that is done twice makes a tensor twice, or takes one that is gone; one that is never done leaves a tensor
//! behind. Only forwards need a list of their own: the first stage takes nothing, and in evaluation the last one makes nothing.

use super::super::action::{Action, Compute};
use super::super::program::{Place, Program};
use super::super::tensors::{Effects, Tensor, TensorKind};
use super::{Missing, VerifyError};

/// What has happened so far, for each stage and micro-batch.
struct State<'a> {
    program: &'a Program,
    effects: Effects<'a>,
    cells: Vec<Cell>,
}

/// A stage and a micro-batch. Tensors have a bit for each kind.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    there: u8,
    made: u8,
    has_forward: bool,
}

pub(super) fn check(program: &Program) -> Result<(), VerifyError> {
    let cells = vec![Cell::default(); program.stages.num_stages() * program.num_micro_batches];
    let mut state = State { program, effects: Effects::new(program), cells };
    for (rank, row) in program.rows.iter().enumerate() {
        for (position, &action) in row.iter().enumerate() {
            state.act(Place { rank, position, action })?;
        }
    }
    state.all_done()
}

impl<'a> State<'a> {
    fn cell(&mut self, stage: usize, micro_batch: usize) -> &mut Cell {
        &mut self.cells[stage * self.program.num_micro_batches + micro_batch]
    }

    fn act(&mut self, place: Place) -> Result<(), VerifyError> {
        let effects = self.effects;
        let action = place.action;
        let is_message = matches!(action, Action::Send(_) | Action::Receive(_));
        if is_message && self.program.peer_of(&action).is_none_or(|peer| peer == place.rank) {
            return Err(VerifyError::NoPeer(place));
        }
        for work in action.works().filter(|work| work.compute == Compute::Forward) {
            let cell = self.cell(work.stage, work.micro_batch);
            if std::mem::replace(&mut cell.has_forward, true) {
                return Err(VerifyError::Twice(place));
            }
        }
        for tensor in effects.takes(action) {
            self.take(tensor).map_err(|was_there| {
                let maker = effects.maker(tensor);
                VerifyError::Missing(Box::new(Missing { place, tensor, was_there, maker }))
            })?;
        }
        let is_first = effects.makes(action).all(|tensor| self.make(tensor));
        if is_first { Ok(()) } else { Err(VerifyError::Twice(place)) }
    }

    /// Whether the tensor was not made before.
    fn make(&mut self, tensor: Tensor) -> bool {
        let bit = 1 << tensor.kind as u8;
        let cell = self.cell(tensor.stage, tensor.micro_batch);
        let is_first = cell.made & bit == 0;
        cell.made |= bit;
        cell.there |= bit;
        is_first
    }

    /// The error is whether the tensor was there before.
    fn take(&mut self, tensor: Tensor) -> Result<(), bool> {
        let bit = 1 << tensor.kind as u8;
        let cell = self.cell(tensor.stage, tensor.micro_batch);
        if cell.there & bit == 0 {
            return Err(cell.made & bit != 0);
        }
        cell.there &= !bit;
        Ok(())
    }

    fn all_done(&mut self) -> Result<(), VerifyError> {
        for stage in 0..self.program.stages.num_stages() {
            let rank = self.program.stages.rank_of(stage);
            for micro_batch in 0..self.program.num_micro_batches {
                let cell = *self.cell(stage, micro_batch);
                let left = TensorKind::ALL.into_iter().find(|kind| cell.there & (1 << *kind as u8) != 0);
                if let Some(kind) = left {
                    let tensor = Tensor { kind, stage, micro_batch };
                    return Err(VerifyError::NeverFreed { rank, tensor, taker: self.effects.taker(tensor) });
                }
                if !cell.has_forward {
                    let action = Action::compute(Compute::Forward, stage, micro_batch);
                    return Err(VerifyError::Never { rank, action });
                }
            }
        }
        Ok(())
    }
}
