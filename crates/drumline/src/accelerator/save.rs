//! The whole state of an accelerated loop, saved and resumed; the files are those of `checkpoint`.
//!
//! Loading changes nothing on disk, as a program that evaluates loads, too. The first save makes the folder the loop's own: what loading
//! has found damaged is renamed then.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drumline_torch::{Named, OptimizerState, RngState, nccl};
use serde_json::json;

use super::Accelerator;
use super::builder::NewData;
use super::error::{AcceleratorError, Result};
use super::scaling::Scaling;
use super::several::{all_states, all_tensors, states_of};
use super::share::Share;
use crate::checkpoint::{Checkpoints, Mark, TrainState, check_model, restore};
use crate::loader::Cause;
use crate::sampler::{DataId, Sampler, SamplerError, SamplerPosition};
use crate::scaling::KeptScale;
use crate::shared_failure::{Trouble, agree};

/// Names the last step that was logged, as the program counts steps, which need not be those of the optimizer.
const LOGGED: &str = "logged_step";

/// The steps of each optimizer.
const STEPS: &str = "steps";

/// Steps of each optimizer that were left out for overflow.
const SKIPPED: &str = "skipped_steps";

/// Where a loader is.
pub(super) struct Place {
    now: Cell<SamplerPosition>,
    /// Where the next loop over its epoch begins.
    resumed: Cell<Option<SamplerPosition>>,
    share: Arc<Share>,
    data: DataId,
}

impl Place {
    pub(super) fn new(share: Arc<Share>, data: DataId) -> Self {
        let start = SamplerPosition { data: Some(data), ..share.start(0) };
        Self { now: Cell::new(start), resumed: Cell::new(None), share, data }
    }

    /// The beginning of an epoch.
    pub(super) fn start(&self, epoch: u64) -> SamplerPosition {
        SamplerPosition { data: Some(self.data), ..self.share.start(epoch) }
    }

    /// A saved position of this data, or of other data where these are accepted.
    fn checked(
        &self,
        saved: SamplerPosition,
        new_data: NewData,
    ) -> std::result::Result<SamplerPosition, SamplerError> {
        saved.check_seed(self.share.seed())?;
        if new_data == NewData::Refuse {
            saved.check_data(self.data)?;
        }
        let samples_seen = saved.samples_seen.min(self.share.whole.num_positions(saved.epoch));
        Ok(SamplerPosition { samples_seen, data: Some(self.data), ..saved })
    }

    /// Epochs done, with the fraction of the one that is on.
    pub(super) fn epochs_done(&self) -> f64 {
        let SamplerPosition { epoch, samples_seen, .. } = self.now();
        let all = self.share.positions_of(epoch);
        epoch as f64 + samples_seen.min(all) as f64 / all.max(1) as f64
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
    /// Steps done; of several optimizers, by the one that has done most.
    pub step: u64,
}

impl Accelerator {
    /// Saves all models and optimizers, generators, and where the first prepared loader is, as a checkpoint in `folder`; all ranks together. The last two are kept.
    ///
    /// Between two steps: gradients of a window that is not complete are not saved, and would be missing.
    #[track_caller]
    pub fn save_state(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        let open = self.shared.turn().is_open().then_some(
            "save_state within a window would lose its gradients; try it after the optimizer's step, where sync_gradients() is true",
        );
        agree::<_, AcceleratorError>(
            self.group(),
            open.map_or_else(|| self.check_prepared(), |open| Err(open.into())),
        )?;
        self.shared.settle()?;
        let state = agree::<_, AcceleratorError>(self.group(), self.state().map_err(Trouble::from))?;
        Ok(self.checkpoints(folder.as_ref()).save(&state, Mark::Latest, self.group())?.path)
    }

    /// Those in this folder, by whatever name: the same object each time, which knows what it has found damaged.
    fn checkpoints(&self, folder: &Path) -> Checkpoints {
        let mut known = self.checkpoints.borrow_mut();
        if let Some(found) = known.iter().find(|checkpoints| checkpoints.is_in(folder)) {
            return found.clone();
        }
        let new = Checkpoints::new(folder);
        known.push(new.clone());
        new
    }

    fn state(&self) -> std::result::Result<TrainState, Cause> {
        // Buffers may have come just now.
        nccl::settle(self.shared.device)?;
        let place = self.shared.place.get().map(|place| place.now());
        let optimizers = self.optimizers.borrow();
        let states: Vec<_> = optimizers.iter().map(|kept| kept.optimizer.borrow().state()).collect();
        let steps: Vec<_> = optimizers.iter().map(|kept| kept.steps.get()).collect();
        let skipped: Vec<_> = optimizers.iter().map(|kept| kept.grads.skipped.get()).collect();
        let scaler = self.shared.scaling.as_ref().map(Scaling::scaler).transpose()?;
        let all_skipped = skipped.iter().sum();
        Ok(TrainState {
            optimizer: all_states(&states),
            epoch: place.map_or(0, |position| position.epoch),
            step: steps.iter().copied().max().unwrap_or(0),
            sampler: serde_json::to_value(place)?,
            config: json!({ LOGGED: self.trackers.borrow().last_step(), STEPS: steps, SKIPPED: skipped }),
            rng: RngState::capture()?,
            scaler: KeptScale::new(scaler.as_deref(), all_skipped)?.to_value()?,
            ..TrainState::new(self.tensors())?
        })
    }

    /// Those of all models.
    fn tensors(&self) -> Vec<Named> {
        let models = self.models.borrow();
        all_tensors(&models.iter().map(|model| &model.tensors[..]).collect::<Vec<_>>())
    }

    /// Goes on from the latest checkpoint in `folder`, saved by any number of ranks; `None` if there is none, nor a folder. All ranks call it, after `prepare`. The
    /// loop then begins with the epoch that it returns, of which the loader gives what was left. Where the checkpoint does not fit, nothing is changed.
    #[track_caller]
    pub fn load_state(&self, folder: impl AsRef<Path>) -> Result<Option<Resumed>> {
        agree::<_, AcceleratorError>(self.group(), self.check_prepared())?;
        let folder = folder.as_ref();
        let checkpoints = self.checkpoints(folder).read_only();
        let Some(found) = checkpoints.load_latest(self.group())? else {
            self.on_main_process(|| {
                tracing::info!("no checkpoint in {}: this is a new run", folder.display())
            });
            return Ok(None);
        };
        if let Some(text) = found.of_new_ranks(self.group()) {
            self.on_main_process(|| checkpoints.warn(&text));
        }
        let place = format!("cannot resume from {}", found.path.display());
        let gone_on = self.go_on(&found.state).map_err(|cause| Trouble::from(cause).within(&place));
        agree::<_, AcceleratorError>(self.group(), gone_on)?;
        self.schedules.borrow().iter().for_each(|schedule| schedule.set());
        Ok(Some(Resumed { path: found.path, epoch: found.state.epoch, step: found.state.step }))
    }

    fn go_on(&self, saved: &TrainState) -> std::result::Result<(), Cause> {
        let position: Option<SamplerPosition> = serde_json::from_value(saved.sampler.clone())?;
        let resumed = self.shared.place.get().zip(position);
        let resumed = match resumed {
            Some((place, position)) => Some((place, place.checked(position, self.new_data)?)),
            None => None,
        };
        // All is checked before anything is changed.
        let tensors = self.tensors();
        check_model(&tensors, &saved.model)?;
        let scale = KeptScale::of(&saved.scaler)?;
        self.load_optimizers(saved)?;
        restore(&tensors, &saved.model)?;
        let mut scaler = self.shared.scaling.as_ref().map(Scaling::scaler_mut).transpose()?;
        scale.load_into(scaler.as_deref_mut())?;
        saved.rng.restore()?;
        if let Some((place, position)) = resumed {
            place.now.set(position);
            place.resumed.set(Some(position));
        }
        self.trackers.borrow_mut().resume_at(saved.config[LOGGED].as_u64().unwrap_or(saved.step));
        Ok(())
    }

    /// All optimizers, or none of them.
    fn load_optimizers(&self, saved: &TrainState) -> std::result::Result<(), Cause> {
        let optimizers = self.optimizers.borrow();
        let mut before = Vec::new();
        for (kept, state) in optimizers.iter().zip(states_of(&saved.optimizer, optimizers.len())?) {
            let mut optimizer = kept.optimizer.borrow_mut();
            before.push((kept, kept_apart(optimizer.state())));
            if let Err(error) = optimizer.load_state(&state) {
                drop(optimizer);
                before.pop();
                before.iter().try_for_each(|(kept, state)| kept.optimizer.borrow_mut().load_state(state))?;
                return Err(error.into());
            }
        }
        for (place, kept) in optimizers.iter().enumerate() {
            kept.steps.set(saved.config[STEPS][place].as_u64().unwrap_or(saved.step));
            kept.grads.skipped.set(saved.config[SKIPPED][place].as_u64().unwrap_or(0));
        }
        Ok(())
    }

    fn check_prepared(&self) -> std::result::Result<(), Trouble> {
        match self.models.borrow().is_empty() {
            false => Ok(()),
            true => {
                Err("no model is prepared whose state could be saved or loaded; try prepare first".into())
            }
        }
    }
}

/// A state that stays as it is when another is loaded: the copies of master weights are written to where they lie.
fn kept_apart(mut state: OptimizerState) -> OptimizerState {
    for named in state.tensors.iter_mut().filter(|named| named.name.ends_with(".master")) {
        named.tensor = named.tensor.copy();
    }
    state
}
