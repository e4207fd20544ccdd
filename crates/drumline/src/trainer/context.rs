//! What all parts of a training share: its state, its callbacks, its settings, and how ranks agree on failures.

use std::panic::Location;
use std::time::{Duration, Instant};

use drumline_comm::{ProcessGroup, ReduceOp, on_behalf_of};
use drumline_observe::bar::Progress;

use super::error::TrainerError;
use super::hooks::{Hook, Hooks};
use super::settings::Settings;
use super::state::TrainState;
use super::tracer::Tracer;
use crate::comm::shared_failure::agree;
use crate::launch::stop_request::StopRequest;

/// Each part of a training borrows it in turn.
pub(super) struct Context<'a> {
    pub(super) state: TrainState,
    pub(super) hooks: Hooks<'a>,
    /// Whether a rank may fail between backward and the optimizer: if there are callbacks, clipping or a schedule.
    pub(super) may_refuse_step: bool,
    pub(super) settings: Settings,
    /// Where the program called `train`. Errors of collectives name this place.
    pub(super) site: &'static Location<'static>,
    pub(super) stop: StopRequest,
    pub(super) tracer: Tracer,
    pub(super) clock: Clock,
    /// On rank 0, if progress is shown.
    pub(super) progress: Option<Progress>,
    /// Whether something has changed since the last checkpoint.
    pub(super) is_unsaved: bool,
}

impl Context<'_> {
    /// Calls a hook of all callbacks. An error is kept for the next agreement of ranks.
    pub(super) fn call(&mut self, hook: Hook<'_>) {
        self.hooks.call(hook, &mut self.state);
    }

    /// Returns an error on all ranks if one has failed. All ranks call it.
    pub(super) fn check(&self) -> Result<(), TrainerError> {
        agree(&self.state.group, self.hooks.failure().cloned().map_or(Ok(()), Err))
    }

    /// The sums over the ranks of `group`. Returns an error on all of them if one has failed.
    pub(super) fn add_up(&self, group: &ProcessGroup, mut sums: Vec<f64>) -> Result<Vec<f64>, TrainerError> {
        sums.push(f64::from(u8::from(self.hooks.failure().is_some())));
        on_behalf_of(self.site, || group.all_reduce(&mut sums, ReduceOp::Sum))?;
        if sums.pop() > Some(0.0) {
            self.check()?;
        }
        Ok(sums)
    }

    /// Writes the steps that were traced, if any were.
    pub(super) fn write_trace(&mut self) {
        if let Err(error) = self.tracer.write() {
            self.hooks.note(error.into());
        }
    }
}

/// How long the last step took.
#[derive(Debug)]
pub(super) struct Clock {
    last: Instant,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { last: Instant::now() }
    }

    /// Excludes the time until now from the next step.
    pub(super) fn restart(&mut self) {
        self.last = Instant::now();
    }

    /// Time since this was last called.
    pub(super) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        std::mem::replace(&mut self.last, now).elapsed()
    }
}
