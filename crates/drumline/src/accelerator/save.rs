//! The whole state of an accelerated loop, saved and resumed. The files are those of `checkpoint`.
//!
//! Loading changes nothing on disk, because a program that only evaluates also loads. The first save makes this program
//! the owner of the folder: checkpoints that loading has found damaged are renamed then.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use drumline_torch::{Named, OptimizerState, RngState, nccl};
use serde_json::{Value, json};

use super::Accelerator;
use super::builder::NewData;
use super::error::{AcceleratorError, Result};
use super::scaling::Scaling;
use super::several::{all_states, all_tensors, numbered, states_of};
use super::share::Share;
use crate::checkpoint::{
    CheckpointError, Checkpoints, Mark, RunState, StateLayout, check_model, held_by, restore,
};
use crate::comm::shared_failure::{LocalFailure, agree};
use crate::data::loader::Cause;
use crate::data::sampler::{DataId, Sampler, SamplerError, SamplerPosition};
use crate::scaling::SavedScale;

/// The key of the last logged step. The program counts these steps; they need not be those of the optimizer.
const LOGGED: &str = "logged_step";

/// The key of the steps of each optimizer.
const STEPS: &str = "steps";

/// The key of the skipped steps of each optimizer.
const SKIPPED: &str = "skipped_steps";

/// The key of what a program saves besides.
const PROGRAM: &str = "program";

/// The position of a loader in its data.
pub(super) struct LoaderPosition {
    now: Cell<SamplerPosition>,
    /// The position at which the next loop over its epoch begins, after a resume.
    resumed: Cell<Option<SamplerPosition>>,
    share: Arc<Share>,
    data: DataId,
}

impl LoaderPosition {
    pub(super) fn new(share: Arc<Share>, data: DataId) -> Self {
        let start = SamplerPosition { data: Some(data), ..share.start(0) };
        Self { now: Cell::new(start), resumed: Cell::new(None), share, data }
    }

    /// The beginning of an epoch.
    pub(super) fn start(&self, epoch: u64) -> SamplerPosition {
        SamplerPosition { data: Some(self.data), ..self.share.start(epoch) }
    }

    /// Checks that a saved position is of this data, or accepts it on other data.
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

    /// Epochs done, including the fraction of the current one.
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

    /// The position of an epoch that was resumed in its middle. It is returned once.
    pub(super) fn take_resumed(&self, epoch: u64) -> Option<SamplerPosition> {
        self.resumed.take().filter(|position| position.epoch == epoch)
    }
}

/// The point from which a loop resumes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resumed {
    /// The checkpoint, as rank 0 sees it.
    pub path: PathBuf,
    /// The epoch to continue. The loader knows the position in it.
    pub epoch: u64,
    /// Steps done; of several optimizers the highest count.
    pub step: u64,
}

/// A checkpoint that matches the program.
struct Checked {
    /// The parts of it that this rank holds.
    state: RunState,
    position: Option<SamplerPosition>,
    scale: SavedScale,
}

impl Accelerator {
    /// Saves all models and optimizers, random number generators, and the position of the first prepared loader, as a
    /// checkpoint in `folder`. All ranks call it together. The last two checkpoints are kept.
    ///
    /// Call it between two steps: the gradients of an incomplete window are not saved, so it is an error inside one.
    #[track_caller]
    pub fn save_state(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        self.save_with(folder.as_ref(), Value::Null)
    }

    /// Saves the same, and what the program wants to know when it resumes.
    #[track_caller]
    pub(crate) fn save_with(&self, folder: &Path, program: Value) -> Result<PathBuf> {
        let open = self.shared.is_within_window().then_some(
            "save_state within a window would lose its gradients; try it after the optimizer's step, where sync_gradients() is true",
        );
        agree::<_, AcceleratorError>(
            self.group(),
            open.map_or_else(|| self.check_prepared(), |open| Err(open.into())),
        )?;
        self.shared.settle()?;
        let state = agree::<_, AcceleratorError>(self.group(), self.state().map_err(LocalFailure::from));
        let mut state = state?;
        if !program.is_null() {
            state.accelerator[PROGRAM] = program;
        }
        Ok(self.checkpoints(folder).save(&state, Mark::Latest, self.group())?.path)
    }

    /// The checkpoints of a folder, under any of its names. It is the same object each time, which remembers what it
    /// has found damaged.
    fn checkpoints(&self, folder: &Path) -> Checkpoints {
        let mut known = self.checkpoints.borrow_mut();
        if let Some(found) = known.iter().find(|checkpoints| checkpoints.is_in(folder)) {
            return found.clone();
        }
        let new = Checkpoints::new(folder);
        known.push(new.clone());
        new
    }

    fn state(&self) -> std::result::Result<RunState, Cause> {
        // The broadcast of buffers may still be running.
        nccl::settle(self.shared.device)?;
        let position = self.shared.first_loader.get().map(|loader| loader.now());
        let optimizers = self.optimizers.borrow();
        let states: Vec<_> = optimizers.iter().map(|handle| handle.optimizer.borrow().state()).collect();
        let steps: Vec<_> = optimizers.iter().map(|handle| handle.steps.get()).collect();
        let skipped: Vec<_> = optimizers.iter().map(|handle| handle.grads.skipped.get()).collect();
        let scaler = self.shared.scaling.as_ref().map(Scaling::scaler).transpose()?;
        let all_skipped = skipped.iter().sum();
        Ok(RunState {
            optimizer: all_states(&states),
            epoch: position.map_or(0, |position| position.epoch),
            step: steps.iter().copied().max().unwrap_or(0),
            sampler: serde_json::to_value(position)?,
            accelerator: json!({ LOGGED: self.trackers.borrow().last_step(), STEPS: steps, SKIPPED: skipped }),
            rng: RngState::capture()?,
            scaler: SavedScale::new(scaler.as_deref(), all_skipped)?.to_value()?,
            layout: self.layout()?,
            mesh: Some(*self.shared.mesh.shape()),
            ..RunState::new(self.held())?
        })
    }

    /// The tensors of all models that this rank holds.
    fn held(&self) -> Vec<Named> {
        let models = self.shared.models.borrow();
        let held: Vec<_> = models.iter().map(|model| held_by(model.replica.engine())).collect();
        all_tensors(&held.iter().map(|tensors| &tensors[..]).collect::<Vec<_>>())
    }

    /// How ranks divide all tensors; `None` if each rank has all of them.
    fn layout(&self) -> std::result::Result<Option<StateLayout>, CheckpointError> {
        if !self.shared.is_divided() {
            return Ok(None);
        }
        let (models, optimizers) = (self.shared.models.borrow(), self.optimizers.borrow());
        let mut layout = StateLayout::default();
        for (place, model) in models.iter().enumerate() {
            let engine = model.replica.engine();
            layout
                .add_model(&engine.tensors(), &engine.state(), |name| numbered(name, place, models.len()))?;
        }
        for (place, handle) in optimizers.iter().enumerate() {
            let Some(model) = handle.model.get().and_then(|model| models.get(model)) else { continue };
            let engine = model.replica.engine();
            layout.add_optimizer(&engine.tensors(), &engine.state(), |name| {
                numbered(name, place, optimizers.len())
            })?;
        }
        Ok(Some(layout))
    }

    /// The layout when each optimizer knows the rows that it steps.
    fn adopted_layout(&self) -> std::result::Result<Option<StateLayout>, Cause> {
        self.optimizers.borrow().iter().try_for_each(|handle| handle.adopt(&self.shared))?;
        Ok(self.layout()?)
    }

    /// Copies a checkpoint's tensors into those that this rank holds. All ranks call it.
    fn restore_held(&self, saved: &[Named]) -> Result {
        let models = self.shared.models.borrow();
        for (place, model) in models.iter().enumerate() {
            let engine = model.replica.engine();
            let renamed =
                |Named { name, tensor }| Named { name: numbered(&name, place, models.len()), tensor };
            let into: Vec<Named> = held_by(engine).into_iter().map(renamed).collect();
            let is_own = |named: &&Named| into.iter().any(|own| own.name == named.name);
            let from: Vec<Named> = saved.iter().filter(is_own).cloned().collect();
            let mut restored = Ok(());
            engine.change_parameters(&mut || restored = restore(&into, &from))?;
            agree::<_, AcceleratorError>(self.group(), restored.map_err(LocalFailure::from))?;
        }
        Ok(())
    }

    /// Resumes from the latest checkpoint in `folder`, saved by any number of ranks. Returns `None` if there is no
    /// checkpoint or no folder. All ranks call it, after `prepare`. The loop then begins with the returned epoch, of
    /// which the loader gives the remaining batches. If the checkpoint does not match the program, nothing is changed.
    #[track_caller]
    pub fn load_state(&self, folder: impl AsRef<Path>) -> Result<Option<Resumed>> {
        Ok(self.load_with(folder.as_ref())?.map(|(resumed, _)| resumed))
    }

    /// The same, and what the program has saved with it.
    #[track_caller]
    pub(crate) fn load_with(&self, folder: &Path) -> Result<Option<(Resumed, Value)>> {
        agree::<_, AcceleratorError>(self.group(), self.check_prepared())?;
        let checkpoints = self.checkpoints(folder).read_only();
        let found = if self.shared.is_divided() {
            checkpoints.find_latest(self.group())?
        } else {
            checkpoints.load_latest(self.group())?
        };
        let Some(mut found) = found else {
            self.on_main_process(|| {
                tracing::info!("no checkpoint in {}: this is a new run", folder.display())
            });
            return Ok(None);
        };
        if let Some(text) = found.rank_change_warning(self.group()) {
            self.on_main_process(|| checkpoints.warn(&text));
        }
        let context = format!("cannot resume from {}", found.path.display());
        let failed = |cause: Cause| LocalFailure::from(cause).within(&context);
        let layout = self.adopted_layout().map_err(failed);
        let layout = agree::<_, AcceleratorError>(self.group(), layout)?;
        let read = found.read_parts(layout.as_ref(), self.group()).map_err(|error| failed(error.into()));
        agree::<_, AcceleratorError>(self.group(), read)?;
        let checked = self.check(&found.state).map_err(failed);
        let checked = agree::<_, AcceleratorError>(self.group(), checked)?;
        self.load_optimizers(&checked.state, failed)?;
        self.restore_held(&checked.state.model)?;
        agree::<_, AcceleratorError>(self.group(), self.resume(checked).map_err(failed))?;
        self.schedules.borrow().iter().for_each(|schedule| schedule.set());
        let resumed = Resumed { path: found.path, epoch: found.state.epoch, step: found.state.step };
        Ok(Some((resumed, found.state.accelerator[PROGRAM].take())))
    }

    /// Checks everything but the states of optimizers, before anything is changed.
    fn check(&self, saved: &RunState) -> std::result::Result<Checked, Cause> {
        let position: Option<SamplerPosition> = serde_json::from_value(saved.sampler.clone())?;
        let resumed = self.shared.first_loader.get().zip(position);
        let resumed =
            resumed.map(|(loader, position)| loader.checked(position, self.new_data)).transpose()?;
        let state = match self.adopted_layout()? {
            Some(layout) => layout.part_of(saved)?,
            None => saved.clone(),
        };
        check_model(&self.held(), &state.model)?;
        let scale = SavedScale::of(&saved.scaler)?;
        Ok(Checked { state, position: resumed, scale })
    }

    /// Loads everything but weights and optimizers.
    fn resume(&self, checked: Checked) -> std::result::Result<(), Cause> {
        let Checked { state: saved, position, scale } = checked;
        let mut scaler = self.shared.scaling.as_ref().map(Scaling::scaler_mut).transpose()?;
        scale.load_into(scaler.as_deref_mut())?;
        saved.rng.restore()?;
        if let Some((loader, position)) = self.shared.first_loader.get().zip(position) {
            loader.now.set(position);
            loader.resumed.set(Some(position));
        }
        self.trackers.borrow_mut().resume_at(saved.accelerator[LOGGED].as_u64().unwrap_or(saved.step));
        Ok(())
    }

    /// Loads the states of all optimizers on all ranks, or none on any. All ranks call it.
    fn load_optimizers(&self, saved: &RunState, failed: impl Fn(Cause) -> LocalFailure) -> Result {
        let optimizers = self.optimizers.borrow();
        let mut before = Vec::new();
        let loaded = states_of(&saved.optimizer, optimizers.len()).and_then(|states| {
            for (handle, state) in optimizers.iter().zip(states) {
                let mut optimizer = handle.optimizer.borrow_mut();
                let own = copy_of_state(optimizer.state());
                optimizer.load_state(&state)?;
                before.push((handle, own));
            }
            Ok(())
        });
        let agreed = agree::<_, AcceleratorError>(self.group(), loaded.map_err(&failed));
        if agreed.is_err() {
            for (handle, state) in before {
                handle.optimizer.borrow_mut().load_state(&state)?;
            }
            return agreed;
        }
        for (place, handle) in optimizers.iter().enumerate() {
            self.shared.settle_state(&*handle.optimizer.borrow(), handle.model.get())?;
            handle.steps.set(saved.accelerator[STEPS][place].as_u64().unwrap_or(saved.step));
            handle.grads.skipped.set(saved.accelerator[SKIPPED][place].as_u64().unwrap_or(0));
        }
        let begun = optimizers.iter().map(|handle| handle.steps.get() + handle.grads.skipped.get());
        if let (Some(masks), Some(step)) = (&self.shared.masks, begun.max()) {
            masks.resume_at(step);
        }
        Ok(())
    }

    fn check_prepared(&self) -> std::result::Result<(), LocalFailure> {
        if self.shared.models.borrow().is_empty() {
            return Err("there is no prepared model to save or load; try prepare first".into());
        }
        Ok(())
    }
}

/// A state that does not change when another is loaded: loading overwrites the tensors of master weights in place.
fn copy_of_state(mut state: OptimizerState) -> OptimizerState {
    for named in state.tensors.iter_mut().filter(|named| named.name.ends_with(".master")) {
        named.tensor = named.tensor.copy();
    }
    state
}
