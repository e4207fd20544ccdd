//! The trace of a pipeline's step on this rank: computations, bubbles, and an arrow for each message.
//!
//! ```text
//!   rank 0   ▕ forward 0 ▏▕ forward 1 ▏▕  bubble   ▏▕ backward 0 ▏
//!                        └───┐                  ┌──▶┘
//!   rank 1   ▕    bubble    ▏└▶ forward 0 ▏▕ backward 0 ▏▕ …
//! ```
//! An arrow leads from the computation that makes a tensor to the one on another rank that needs it. Both ranks give it the
//! same id, so that it is whole in a file of all ranks. Not here: when each began and ended (`Pipeline`), the file (`tracer`).

use std::time::Instant;

use drumline_comm::Axis;
use drumline_observe::trace::{Arrow, Span, Track};
use drumline_parallel::pipeline::Pipeline;
use drumline_plan::pipeline::{Action, Compute, Message, Program, Way, Work};

use super::tracer::Tracer;

/// The name of the time in which a rank is done with its stages, and others are not.
pub(super) const LAST_BUBBLE: &str = "bubble: waits until all ranks are done";

/// What happened in a step.
pub(super) struct PipelineTrace<'a> {
    pipeline: &'a Pipeline,
    names: Names<'a>,
}

/// How spans and arrows of a rank are called.
struct Names<'a> {
    program: &'a Program,
    /// This rank among those of its pipeline.
    rank: usize,
    /// The first rank of its pipeline, which tells it from replicas.
    first: usize,
    step: u64,
}

impl<'a> PipelineTrace<'a> {
    pub(super) fn new(pipeline: &'a Pipeline, program: &'a Program, step: u64) -> Self {
        let mesh = pipeline.engine().mesh();
        let first = mesh.shape().peers(mesh.whole().rank(), &[Axis::Pp])[0];
        Self { pipeline, names: Names { program, rank: mesh.axis(Axis::Pp).rank(), first, step } }
    }

    pub(super) fn record(&self, tracer: &Tracer) {
        for (work, begin, end) in self.pipeline.spans() {
            tracer.add(self.names.computation(work, [begin, end]));
        }
        for (message, begin, end) in self.pipeline.waits() {
            tracer.add(Span::new(format!("bubble: waits for {message}"), Track::Compute, [begin, end]));
        }
    }
}

impl Names<'_> {
    /// A computation, with the messages that it has needed and made.
    fn computation(&self, work: Work, times: [Instant; 2]) -> Span {
        let Work { compute, stage, micro_batch } = work;
        let what = match compute {
            Compute::Forward => "forward",
            Compute::Backward => "backward",
            Compute::Input => "input gradient",
            Compute::Weight => "weight gradient",
        };
        let name = format!("{what} of stage {stage}, micro-batch {micro_batch}");
        let span = Span::new(name, Track::Compute, times)
            .arg("action", work.to_string())
            .arg("step", self.step)
            .arg("stage", stage)
            .arg("micro-batch", micro_batch);
        let received = self.program.needs(work).and_then(|needed| self.arrow(Action::Receive(needed)));
        let sent = self.program.gives(work).map(|given| Action::Send(Message { stage, ..given }));
        let span = received.into_iter().fold(span, Span::arrow_in);
        sent.and_then(|send| self.arrow(send)).into_iter().fold(span, Span::arrow_out)
    }

    /// The arrow of a message; `None` if it stays on this rank.
    fn arrow(&self, action: Action) -> Option<Arrow> {
        let message = action.sent().filter(|_| self.program.peer_of(&action) != Some(self.rank))?;
        Some(Arrow { name: message.to_string(), id: self.id(message) })
    }

    /// The same on both ranks, and another one for each message of the traced steps.
    fn id(&self, Message { way, stage, micro_batch }: Message) -> u64 {
        let way = u64::from(way == Way::Backward);
        let fields = [
            (self.step, 20),
            (self.first as u64, 16),
            (way, 1),
            (stage as u64, 11),
            (micro_batch as u64, 16),
        ];
        fields.into_iter().fold(0, |id, (value, bits)| id << bits | value & ((1 << bits) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_plan::pipeline::{PipelineSize, Schedule};
    use std::collections::HashMap;

    /// The arrows of all computations of a step, with the number of ends of each.
    fn arrows(schedule: &Schedule, size: PipelineSize, [first, step]: [usize; 2]) -> HashMap<u64, usize> {
        let program = schedule.program(size).unwrap();
        let mut ends = HashMap::new();
        for (rank, row) in program.rows.iter().enumerate() {
            let names = Names { program: &program, rank, first, step: step as u64 };
            let both = |work: Work| {
                let sent = program.gives(work).map(|to| Action::Send(Message { stage: work.stage, ..to }));
                [sent, program.needs(work).map(Action::Receive)]
            };
            let messages = row.iter().flat_map(|action| action.works()).flat_map(both).flatten();
            for arrow in messages.filter_map(|message| names.arrow(message)) {
                *ends.entry(arrow.id).or_default() += 1;
            }
        }
        ends
    }

    #[test]
    fn each_message_is_one_arrow_with_two_ends() {
        let size = PipelineSize { ranks: 3, chunks: 1, micro_batches: 5 };
        let one = arrows(&Schedule::ZeroBubble1P, size, [0, 7]);
        assert_eq!(one.len(), 2 * 2 * 5, "both ways, over two borders");
        assert!(one.values().all(|ends| *ends == 2), "{one:?}");
        // Stages 2 and 3 of a V are on one rank.
        let v = arrows(&Schedule::ZeroBubbleV, PipelineSize { chunks: 2, ..size }, [0, 7]);
        assert_eq!((v.len(), v.values().sum::<usize>()), (2 * 4 * 5, 2 * 2 * 4 * 5));
        for other in [[1, 7], [0, 8]] {
            let other = arrows(&Schedule::ZeroBubble1P, size, other);
            assert!(other.keys().all(|id| !one.contains_key(id)), "another pipeline, or another step");
        }
    }
}
