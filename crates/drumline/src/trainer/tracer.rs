//! A trace of some steps, on request.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use drumline_observe::trace::{TraceError, Track};
use drumline_parallel::DdpObserver;

use crate::step_trace::{Noting, StepTrace};

/// Notes what is done in the steps that were asked for; nothing, where none were.
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
        trace.set(Noting::Nothing);
        Self { wanted: (!steps.is_empty()).then_some(Wanted { steps, folder, trace }) }
    }

    /// Who is told of the reductions.
    pub(super) fn observer(&self) -> Option<Arc<dyn DdpObserver>> {
        self.wanted.as_ref().map(|wanted| Arc::clone(&wanted.trace) as _)
    }

    /// A step begins, after so many.
    pub(super) fn begin_step(&self, done: u64) {
        if let Some(Wanted { steps, trace, .. }) = &self.wanted {
            trace.set(if steps.contains(&done) { Noting::All } else { Noting::Nothing });
        }
    }

    /// Whether steps are, or will be, traced.
    pub(super) fn is_on(&self) -> bool {
        self.wanted.is_some()
    }

    /// What has been done since `begin`.
    pub(super) fn span(&self, name: &str, track: Track, begin: Instant) {
        if let Some(wanted) = &self.wanted {
            wanted.trace.span(name, track, begin, Instant::now());
        }
    }

    /// Whether the last of the steps has been made.
    pub(super) fn is_over(&self, done: u64) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| done >= wanted.steps.end)
    }

    /// Writes the trace, once; nothing where there is none.
    pub(super) fn write(&mut self) -> Result<(), TraceError> {
        let Some(Wanted { trace, folder, .. }) = self.wanted.take() else { return Ok(()) };
        trace.set(Noting::Nothing);
        trace.write(&folder)?;
        trace.clear();
        Ok(())
    }
}
