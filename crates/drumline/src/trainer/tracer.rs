//! Traces some steps, on request.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use drumline_observe::trace::{Span, TraceError, Track};
use drumline_parallel::ReductionObserver;

use crate::step_trace::{Recording, StepTrace};

/// Records spans in the requested steps, if there are any.
#[derive(Debug, Default)]
pub(super) struct Tracer {
    wanted: Option<Wanted>,
}

#[derive(Debug)]
struct Wanted {
    steps: Range<u64>,
    folder: PathBuf,
    trace: Arc<StepTrace>,
}

impl Tracer {
    pub(super) fn new(steps: Range<u64>, folder: PathBuf, rank: usize) -> Self {
        let trace = StepTrace::new(rank);
        trace.set(Recording::Off);
        Self { wanted: (!steps.is_empty()).then_some(Wanted { steps, folder, trace }) }
    }

    /// The observer of reductions.
    pub(super) fn observer(&self) -> Option<Arc<dyn ReductionObserver>> {
        self.wanted.as_ref().map(|wanted| Arc::clone(&wanted.trace) as _)
    }

    /// Begins a step, after `done` steps.
    pub(super) fn begin_step(&self, done: u64) {
        if let Some(Wanted { steps, trace, .. }) = &self.wanted {
            trace.set(if steps.contains(&done) { Recording::On } else { Recording::Off });
        }
    }

    /// Whether steps are traced, now or later.
    pub(super) fn is_on(&self) -> bool {
        self.wanted.is_some()
    }

    /// Whether this step is traced.
    pub(super) fn is_recording(&self) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| wanted.trace.is_recording())
    }

    /// Records a span from `begin` until now.
    pub(super) fn span(&self, name: &str, track: Track, begin: Instant) {
        if let Some(wanted) = &self.wanted {
            wanted.trace.span(name, track, begin, Instant::now());
        }
    }

    /// Records a span, if this step is traced.
    pub(super) fn add(&self, span: Span) {
        if let Some(wanted) = &self.wanted {
            wanted.trace.add(span);
        }
    }

    /// Whether the last of the steps is done.
    pub(super) fn is_over(&self, done: u64) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| done >= wanted.steps.end)
    }

    /// Writes the trace once, if there is one.
    pub(super) fn write(&mut self) -> Result<(), TraceError> {
        let Some(Wanted { trace, folder, .. }) = self.wanted.take() else { return Ok(()) };
        trace.set(Recording::Off);
        trace.write(&folder)?;
        trace.clear();
        Ok(())
    }
}
