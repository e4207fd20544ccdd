//! How much memory each rank of a pipeline needs at most, and when.
//!
//! A rank does its actions one after the other, so what it holds at any moment follows from its row alone, whatever the times.
//! Activations count from the forward until the backward, or until the weight gradients are computed from them; what is received,
//! from the receive until it is used; what is sent, from the computation until the send.

use super::action::Action;
use super::program::{Place, Program};
use super::tensors::{Effects, Tensor, TensorKind};
use super::verify::Verified;

/// The bytes of a stage; of a micro-batch, but for `state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageBytes {
    /// Parameters, their gradients and the optimizer's state: there all the time.
    pub state: u64,
    /// What a forward leaves for its backward, with the stage's input.
    pub activations: u64,
    /// What is left of this for the weight gradients, if they are computed apart.
    pub weight_inputs: u64,
    /// The input: what the stage receives, and as large as the gradient that it sends back.
    pub input: u64,
}

/// The most memory that a rank needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankPeak {
    /// Bytes, with the states of the rank's stages.
    pub bytes: u64,
    /// The first action at which they are needed; `None` for a rank that does nothing.
    pub at: Option<Place>,
    /// The most activations at a time; one is of a stage and a micro-batch.
    pub activations: usize,
    /// The most received tensors at a time: as many receive buffers are enough.
    pub received: usize,
}

impl Verified<'_> {
    /// The most memory that each rank needs, with these bytes of stages 0, 1, ….
    ///
    /// # Panics
    ///
    /// If the program has more stages.
    pub fn peaks(&self, stages: &[StageBytes]) -> Vec<RankPeak> {
        let program = self.program();
        (0..program.rows.len()).map(|rank| Holding::new(program, rank, stages).peak(rank)).collect()
    }
}

/// What a rank holds while it goes through its row.
struct Holding<'a> {
    effects: Effects<'a>,
    program: &'a Program,
    stages: &'a [StageBytes],
    bytes: u64,
    activations: usize,
    received: usize,
}

impl<'a> Holding<'a> {
    fn new(program: &'a Program, rank: usize, stages: &'a [StageBytes]) -> Self {
        let bytes = program.stages.stages_of(rank).into_iter().map(|stage| stages[stage].state).sum();
        Self { effects: Effects::new(program), program, stages, bytes, activations: 0, received: 0 }
    }

    fn peak(mut self, rank: usize) -> RankPeak {
        let mut peak = RankPeak { bytes: self.bytes, at: None, activations: 0, received: 0 };
        for (position, &action) in self.program.rows[rank].iter().enumerate() {
            let during = self.during(action);
            if during > peak.bytes || peak.at.is_none() {
                (peak.bytes, peak.at) = (during, Some(Place { rank, position, action }));
            }
            self.finish(action);
            peak.activations = peak.activations.max(self.activations);
            peak.received = peak.received.max(self.received);
        }
        peak
    }

    /// The bytes while an action runs: what it takes and what it makes. What is kept for the backward contains the input, and
    /// what is kept for the weight gradients is a part of it: these count once.
    fn during(&self, action: Action) -> u64 {
        let made: u64 = self.effects.makes(action).map(|tensor| self.size(tensor)).sum();
        let shared = |from: TensorKind, to: TensorKind| -> u64 {
            let taken = self.effects.takes(action).filter(|tensor| tensor.kind == from);
            let kept = taken.map(|tensor| (tensor, Tensor { kind: to, ..tensor }));
            let kept = kept.filter(|(_, kept)| self.effects.makes(action).any(|made| made == *kept));
            kept.map(|(taken, kept)| self.size(taken).min(self.size(kept))).sum()
        };
        let inputs = shared(TensorKind::Input, TensorKind::Saved);
        self.bytes + made - inputs - shared(TensorKind::Saved, TensorKind::WeightInputs)
    }

    fn finish(&mut self, action: Action) {
        for tensor in self.effects.makes(action) {
            self.bytes += self.size(tensor);
            self.activations += usize::from(is_activation(tensor));
            self.received += usize::from(self.is_received(tensor));
        }
        for tensor in self.effects.takes(action) {
            self.bytes -= self.size(tensor);
            self.activations -= usize::from(is_activation(tensor));
            self.received -= usize::from(self.is_received(tensor));
        }
    }

    fn is_received(&self, tensor: Tensor) -> bool {
        matches!(self.effects.maker(tensor), Action::Receive(_))
    }

    fn size(&self, tensor: Tensor) -> u64 {
        let stage = &self.stages[tensor.stage];
        match tensor.kind {
            TensorKind::Input | TensorKind::InputGradient => stage.input,
            TensorKind::Saved => stage.activations,
            TensorKind::WeightInputs => stage.weight_inputs,
            // The next stage's input.
            TensorKind::Output | TensorKind::OutputGradient => self.stages[tensor.stage + 1].input,
        }
    }
}

fn is_activation(tensor: Tensor) -> bool {
    matches!(tensor.kind, TensorKind::Saved | TensorKind::WeightInputs)
}

#[cfg(test)]
mod tests {
    use super::super::{PipelineSize, Schedule, verify};
    use super::*;

    fn peaks(schedule: Schedule, size: PipelineSize, stage: StageBytes) -> Vec<RankPeak> {
        let program = schedule.program(size).unwrap();
        verify(&program).unwrap().peaks(&vec![stage; program.stages.num_stages()])
    }

    #[test]
    fn activations_are_those_of_the_formulas() {
        for (ranks, micro_batches) in [(1, 1), (2, 5), (4, 8), (4, 2), (8, 16)] {
            let size = |chunks| PipelineSize { ranks, chunks, micro_batches };
            let activations = |schedule, chunks| -> Vec<_> {
                let peaks = peaks(schedule, size(chunks), StageBytes::default());
                peaks.iter().map(|peak| peak.activations).collect()
            };
            assert_eq!(activations(Schedule::GPipe, 1), vec![micro_batches; ranks]);
            let left = |rank| micro_batches.min(ranks - rank);
            assert_eq!(activations(Schedule::OneFOneB, 1), (0..ranks).map(left).collect::<Vec<_>>());
            // On all ranks, while weight gradients are behind.
            assert_eq!(activations(Schedule::ZeroBubble1P, 1), vec![micro_batches.min(ranks); ranks]);
            assert_eq!(activations(Schedule::BreadthFirst, 3), vec![3 * micro_batches; ranks]);
        }
    }

    #[test]
    fn bytes_are_counted_while_an_action_runs() {
        let stage = StageBytes { state: 1000, activations: 100, weight_inputs: 60, input: 7 };
        let size = PipelineSize { ranks: 2, chunks: 1, micro_batches: 2 };
        let peak = |schedule, rank: usize| {
            let peak = peaks(schedule, size, stage)[rank];
            (peak.bytes, peak.at.unwrap().action.to_string())
        };
        // Two activations, and the output of the second one; at last two gradients at once cost as much.
        assert_eq!(peak(Schedule::GPipe, 0), (1000 + 2 * 100 + 7, "0F1".into()));
        // Two activations, of which the inputs are parts, and the gradient that is made from one.
        assert_eq!(peak(Schedule::GPipe, 1), (1000 + 2 * 100 + 7, "1B0".into()));
        // Both micro-batches arrive before the first backward.
        assert_eq!(peak(Schedule::OneFOneB, 1), (1000 + 100 + 7 + 7, "1B0".into()));
        // A full activation, the weight inputs of the first one, and the gradient for the rank before.
        assert_eq!(peak(Schedule::ZeroBubble1P, 1), (1000 + 100 + 60 + 7, "1I1".into()));
    }

    #[test]
    fn received_tensors_do_not_grow_with_the_micro_batches() {
        let received = |micro_batches| -> Vec<_> {
            let size = PipelineSize { ranks: 4, chunks: 1, micro_batches };
            let peaks = peaks(Schedule::OneFOneB, size, StageBytes::default());
            peaks.iter().map(|peak| peak.received).collect()
        };
        assert_eq!(received(8), received(64));
    }
}
