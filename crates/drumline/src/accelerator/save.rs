//! The whole state of an accelerated loop, saved and gone on from; the files are those of `checkpoint`.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use drumline_torch::RngState;
use serde_json::json;

use super::error::{AcceleratorError, Result};
use super::optimizer::Kept;
use super::{Accelerator, Prepared};
use crate::checkpoint::{Checkpoints, Mark, TrainState, restore};
use crate::loader::Cause;
use crate::sampler::SamplerPosition;
use crate::shared_failure::{Trouble, agree};

/// Names the last step that was logged, as the program counts steps, which need not be those of the optimizer.
const LOGGED: &str = "logged_step";

/// Where a loader is.
#[derive(Debug)]
pub(super) struct Place {
    now: Cell<SamplerPosition>,
    /// Where the next loop over its epoch begins.
    resumed: Cell<Option<SamplerPosition>>,
    seed: u64,
}

impl Place {
    pub(super) fn new(start: SamplerPosition) -> Self {
        Self { now: Cell::new(start), resumed: Cell::new(None), seed: start.seed }
    }

    pub(super) fn now(&self) -> SamplerPosition {
        self.now.get()
    }

    pub(super) fn set(&self, position: SamplerPosition) {
        self.now.set(position);
    }

    /// What is left of an epoch that was loaded in its midst; once.
    pub(super) fn take_resumed(&self, epoch: u64) -> Option<SamplerPosition> {
        self.resumed.take().filter(|position| position.epoch == epoch)
    }
}

/// What a loop goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resumed {
    /// The checkpoint, as rank 0 sees it.
    pub path: PathBuf,
    /// The epoch to go on with. The loader knows where in it.
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
}

impl Accelerator {
    /// Saves model, optimizer, generators, and where the first prepared loader is, as a checkpoint in `folder`; all ranks together. The last two are kept.
    ///
    /// Between two steps: gradients of a window that is not complete are not saved, and would be missing.
    #[track_caller]
    pub fn save_state(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        if self.shared.turn().is_open() {
            return Err(AcceleratorError::Unfit(
                "save_state within a window would lose its gradients; try it after the optimizer's step, where sync_gradients() is true"
                    .into(),
            ));
        }
        self.shared.settle()?;
        let state = self.with_one(|model, kept| self.state(model, kept).map_err(Trouble::from))?;
        let state = agree::<_, AcceleratorError>(self.group(), state)?;
        Ok(Checkpoints::new(folder.as_ref()).save(&state, Mark::Latest, self.group())?.path)
    }

    fn state(&self, model: &Prepared, kept: &Kept) -> std::result::Result<TrainState, Cause> {
        let place = self.place.borrow().as_ref().map(|place| place.now());
        Ok(TrainState {
            optimizer: kept.optimizer.borrow().state(),
            epoch: place.map_or(0, |position| position.epoch),
            step: kept.steps.get(),
            sampler: serde_json::to_value(place)?,
            config: json!({ LOGGED: self.trackers.borrow().last_step() }),
            rng: RngState::capture()?,
            ..TrainState::new(model.tensors.clone())?
        })
    }

    /// Goes on from the latest checkpoint in `folder`, saved by any number of ranks; `None` if there is none. All ranks call it, after `prepare`. The loop then
    /// begins with the epoch that it returns, of which the loader gives what was left.
    #[track_caller]
    pub fn load_state(&self, folder: impl AsRef<Path>) -> Result<Option<Resumed>> {
        let Some(found) = Checkpoints::new(folder.as_ref()).load_latest(self.group())? else {
            return Ok(None);
        };
        let place = format!("cannot go on from {}", found.path.display());
        let epoch = self.with_one(|model, kept| {
            self.go_on(model, kept, &found.state).map_err(|cause| Trouble::from(cause).within(&place))
        })?;
        let epoch = agree::<_, AcceleratorError>(self.group(), epoch)?;
        Ok(Some(Resumed { path: found.path, epoch, step: found.state.step }))
    }

    fn go_on(&self, model: &Prepared, kept: &Kept, saved: &TrainState) -> std::result::Result<u64, Cause> {
        let position: Option<SamplerPosition> = serde_json::from_value(saved.sampler.clone())?;
        let place = self.place.borrow();
        if let (Some(position), Some(place)) = (position, &*place) {
            position.check_seed(place.seed)?;
        }
        restore(&model.tensors, &saved.model)?;
        kept.optimizer.borrow_mut().load_state(&saved.optimizer)?;
        saved.rng.restore()?;
        kept.steps.set(saved.step);
        if let (Some(position), Some(place)) = (position, &*place) {
            place.now.set(position);
            place.resumed.set(Some(position));
        }
        self.trackers.borrow_mut().resume_at(saved.config[LOGGED].as_u64().unwrap_or(saved.step));
        Ok(saved.epoch)
    }

    /// A checkpoint holds one model and one optimizer.
    fn with_one<R>(&self, body: impl FnOnce(&Prepared, &Kept) -> R) -> Result<R> {
        match (&self.models.borrow()[..], &self.optimizers.borrow()[..]) {
            ([model], [optimizer]) => Ok(body(model, optimizer)),
            (models, optimizers) => Err(AcceleratorError::Unfit(format!(
                "a state is that of one model and one optimizer, and {} and {} are prepared; try drumline::checkpoint for more",
                models.len(),
                optimizers.len()
            ))),
        }
    }
}
