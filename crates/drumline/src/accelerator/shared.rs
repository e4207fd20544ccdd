//! State shared by all prepared objects: the current turn, and whether gradients are reduced in it.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{EngineOptions, GradSync};
use drumline_torch::{Autocast, LossScaler, Named, Optimizer, nccl};
use tch::{Device, Kind, Tensor};

use super::error::{AcceleratorError, Result};
use super::masks::{InForward, TurnMasks};
use super::model::{OfModel, Prepared, Replica};
use super::save::LoaderPosition;
use super::scaling::{OwnGrads, Scaled, Scaling};
use super::window::{Turn, Window};
use crate::checkpoint::is_divided;
use crate::comm::alike::usage_error;
use crate::comm::shared_failure::SharedFailure;
use crate::injected_faults::InjectedFaults;
use crate::run_error::UsageError;
use crate::trainer::Precision;

/// Makes the options of a model's engine.
pub(super) type MakeEngineOptions = Box<dyn Fn() -> Box<dyn EngineOptions>>;

pub(super) struct Shared {
    pub(super) group: ProcessGroup,
    /// How the ranks are arranged.
    pub(super) mesh: Mesh,
    engine: MakeEngineOptions,
    pub(super) models: RefCell<Vec<Prepared>>,
    pub(super) device: Device,
    precision: Precision,
    /// Only in fp16.
    pub(super) scaling: Option<Scaling>,
    /// Turns in a window.
    pub(super) window: usize,
    /// The position of the first prepared loader.
    pub(super) first_loader: OnceCell<Rc<LoaderPosition>>,
    /// The running loops, the innermost last: an evaluation may run between two turns of a training.
    turns: RefCell<Vec<(u64, Rc<Turn>)>>,
    loops: Cell<u64>,
    /// The number of `accumulate` calls in the current window, outside prepared loops.
    scopes: RefCell<(usize, Rc<Window>)>,
    is_syncing: Cell<bool>,
    /// Whether gradients were accumulated and not reduced since.
    is_unreduced: Cell<bool>,
    /// Models that have trained and whose buffers may still differ between ranks.
    stale: RefCell<Vec<Rc<Replica>>>,
    faults: RefCell<InjectedFaults>,
    /// An error that a forward could not return. The next backward returns it.
    failure: RefCell<Option<AcceleratorError>>,
    /// Where dropout draws from, with a seed.
    pub(super) masks: Option<TurnMasks>,
}

/// The options of an accelerator that all prepared objects need.
pub(super) struct SharedOptions {
    pub(super) device: Device,
    pub(super) precision: Precision,
    /// Only in fp16.
    pub(super) scaler: Option<LossScaler>,
    /// Turns in a window.
    pub(super) window: usize,
    pub(super) engine: MakeEngineOptions,
    /// Of random numbers, if the program has given one.
    pub(super) seed: Option<u64>,
}

impl Shared {
    pub(super) fn new(group: ProcessGroup, options: SharedOptions) -> Result<Self> {
        let SharedOptions { device, precision, scaler, window, engine, seed } = options;
        let shape = engine().mesh_shape(group.size());
        let shape = shape.map_err(|error| SharedFailure::on_all_ranks(error.to_string()))?;
        Ok(Self {
            faults: InjectedFaults::from_env(&group)?.into(),
            mesh: Mesh::new(&group, shape)?,
            engine,
            models: RefCell::default(),
            group,
            device,
            precision,
            scaling: scaler.map(Scaling::new),
            window,
            first_loader: OnceCell::new(),
            turns: RefCell::default(),
            loops: Cell::new(0),
            scopes: RefCell::default(),
            is_syncing: Cell::new(true),
            is_unreduced: Cell::new(false),
            stale: RefCell::default(),
            failure: RefCell::default(),
            masks: seed.map(|seed| TurnMasks::new(seed, device)).transpose()?,
        })
    }

    /// The options of the engine of a model.
    pub(super) fn engine_options(&self) -> Box<dyn EngineOptions> {
        (self.engine)()
    }

    /// These parameters by the models that have them. Those of no prepared model are with the first one.
    pub(super) fn by_model(&self, parameters: &[Named]) -> Vec<OfModel> {
        let models = self.models.borrow();
        if let [model] = &models[..] {
            return vec![(model.replica.clone(), parameters.to_vec())];
        }
        let model_of = |named: &Named| models.iter().position(|model| model.has(named)).unwrap_or(0);
        let of_model = |(place, model): (usize, &Prepared)| {
            let own = parameters.iter().filter(|named| model_of(named) == place);
            (model.replica.clone(), own.cloned().collect())
        };
        let all = models.iter().enumerate().map(of_model);
        // Where ranks divide parameters, one of them may hold nothing of a model whose norm all compute together.
        all.filter(|(_, own): &OfModel| !own.is_empty() || self.is_divided()).collect()
    }

    /// The parameters of an optimizer by the models that have them. Where ranks divide them, it trains one model, of
    /// which this rank may hold nothing.
    pub(super) fn trained_in(&self, model: Option<usize>, parameters: &[Named]) -> Vec<OfModel> {
        let place = model.filter(|_| self.is_divided());
        let replica = place.and_then(|place| Some(self.models.borrow().get(place)?.replica.clone()));
        replica.map_or_else(|| self.by_model(parameters), |replica| vec![(replica, parameters.to_vec())])
    }

    /// Whether ranks divide the state of a training among them.
    pub(super) fn is_divided(&self) -> bool {
        is_divided(self.mesh.shape())
    }

    /// Lets an optimizer step what this rank holds of the model that it trains. Returns the place of the model; `None`
    /// if no model is prepared yet.
    pub(super) fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result<Option<usize>> {
        let (models, parameters) = (self.models.borrow(), optimizer.parameters());
        let has_some = |model: &&Prepared| parameters.iter().any(|named| model.has(named));
        if self.is_divided() && models.iter().filter(has_some).count() > 1 {
            let text = "an optimizer trains parameters of several models, whose state ranks divide among them; \
                        try one optimizer for each model";
            return Err(SharedFailure::on_all_ranks(text.to_owned()).into());
        }
        if models.is_empty() {
            return Ok(None);
        }
        let place = models.iter().position(|model| has_some(&model)).unwrap_or(0);
        let engine = models[place].replica.engine();
        engine.adopt(optimizer)?;
        if let Some(note) = engine.offload_note().filter(|_| self.group.rank() == 0) {
            tracing::info!("{note}");
        }
        Ok(Some(place))
    }

    /// Steps an optimizer by the engine of the model that it trains.
    pub(super) fn step(&self, optimizer: &mut dyn Optimizer, model: Option<usize>) -> Result {
        let replica = model.and_then(|place| Some(self.models.borrow().get(place)?.replica.clone()));
        match replica {
            Some(replica) => Ok(replica.engine().step(optimizer)?),
            None => Ok(optimizer.step()?),
        }
    }

    /// Moves the state that an optimizer has loaded to where the engine of its model keeps it.
    pub(super) fn settle_state(&self, optimizer: &dyn Optimizer, model: Option<usize>) -> Result {
        let models = self.models.borrow();
        let replica = model.and_then(|place| models.get(place)).map(|model| &model.replica);
        replica.map_or(Ok(()), |replica| Ok(replica.engine().settle_state(optimizer)?))
    }

    /// An optimizer is about to make this step. Injected faults happen here.
    pub(super) fn at_step(&self, step: u64) {
        self.masks.iter().for_each(|masks| masks.note_step(step));
        self.faults.borrow_mut().at(step, &self.group);
    }

    /// Dropout of a forward in this turn draws masks by position, until the result is dropped. `count` is the number of
    /// samples, where the turn does not know it.
    pub(super) fn enter_masks(&self, turn: &Turn, count: Option<usize>) -> Result<Option<InForward>> {
        let Some(masks) = self.masks.as_ref().filter(|_| self.is_in_turn()) else { return Ok(None) };
        Ok(masks.enter(&self.mesh, turn, count)?)
    }

    /// The current turn.
    pub(super) fn turn(&self) -> Rc<Turn> {
        self.turns.borrow().last().map_or_else(|| Rc::new(Turn::alone()), |(_, turn)| turn.clone())
    }

    /// The turn of an `accumulate` call: that of the running loop, or else one that counts the calls.
    pub(super) fn scope(self: &Rc<Self>) -> Option<Entry> {
        if !self.turns.borrow().is_empty() {
            return None;
        }
        let mut scopes = self.scopes.borrow_mut();
        if scopes.0 == 0 {
            scopes.1 = Rc::default();
        }
        scopes.0 = (scopes.0 + 1) % self.window;
        let mut entry = Entry::new(self);
        entry.begin(Turn {
            window: scopes.1.clone(),
            factor: Some(1.0 / self.window as f64),
            is_last: scopes.0 == 0,
            ..Turn::alone()
        });
        Some(entry)
    }

    /// Whether the gradients of a window are not complete: a checkpoint would lose them.
    pub(super) fn is_within_window(&self) -> bool {
        self.turn().is_open() || (self.turns.borrow().is_empty() && self.scopes.borrow().0 > 0)
    }

    /// Whether a turn has begun.
    pub(super) fn is_in_turn(&self) -> bool {
        !self.turns.borrow().is_empty()
    }

    /// Whether the next `accumulate` call outside of loops ends a window.
    pub(super) fn is_next_last(&self) -> bool {
        (self.scopes.borrow().0 + 1).is_multiple_of(self.window)
    }

    /// Turns off reduction until the result is dropped.
    pub(super) fn without_sync(&self) -> WithoutSync<'_> {
        WithoutSync { shared: self, before: self.is_syncing.replace(false) }
    }

    /// Whether a backward of this turn reduces or accumulates.
    pub(super) fn sync_of(&self, turn: &Turn) -> GradSync {
        if turn.is_last && self.is_syncing.get() { GradSync::Reduce } else { GradSync::Accumulate }
    }

    /// Begins a turn of a model in training. Every rank calls it in every turn.
    pub(super) fn begin(&self, replica: &Rc<Replica>, turn: &Rc<Turn>) -> Result {
        replica.begin(turn)?;
        if turn.window.agreed.is_some() {
            self.note_training(replica);
        }
        Ok(())
    }

    /// A model trains: its buffers may differ between ranks until [`settle`](Self::settle).
    pub(super) fn note_training(&self, replica: &Rc<Replica>) {
        let mut stale = self.stale.borrow_mut();
        if !stale.iter().any(|known| Rc::ptr_eq(known, replica)) {
            stale.push(replica.clone());
        }
    }

    /// Gives all ranks the buffers of a rank that has trained to the end. Called at the beginning and end of loops, so
    /// that evaluations are exact.
    pub(super) fn settle(&self) -> Result {
        nccl::settle(self.device)?;
        for replica in self.stale.take() {
            replica.engine().sync_buffers()?;
        }
        Ok(())
    }

    pub(super) fn backward(&self, replica: &Rc<Replica>, loss: &Tensor) -> Result {
        let turn = self.turn();
        let Some(factor) = turn.factor else { return self.backward_nothing(replica) };
        self.check()?;
        if !loss.requires_grad() {
            return Err(usage_error(&self.group, UsageError::LossWithoutGradient));
        }
        self.begin(replica, &turn)?;
        let loss = if factor == 1.0 { loss.shallow_clone() } else { loss * factor };
        let sync = self.sync_of(&turn);
        let backward = |loss: &Tensor| -> Result { Ok(replica.engine().backward(loss, sync)?) };
        match &self.scaling {
            None => backward(&loss)?,
            Some(scaling) => scaling.backward(replica, &loss, backward)?,
        }
        self.is_unreduced.set(sync == GradSync::Accumulate);
        turn.note_backward();
        Ok(())
    }

    pub(super) fn backward_nothing(&self, replica: &Rc<Replica>) -> Result {
        let turn = self.turn();
        self.check()?;
        self.begin(replica, &turn)?;
        self.scaling.iter().try_for_each(Scaling::advance)?;
        let sync = self.sync_of(&turn);
        replica.backward_nothing(&turn, sync)?;
        if sync == GradSync::Reduce {
            self.scaling.iter().for_each(|_| replica.note_scaled_backward());
            self.is_unreduced.set(false);
        }
        turn.note_backward();
        Ok(())
    }

    /// Returns the error of a forward, or an error if gradients are only those of this rank: ranks would diverge
    /// silently.
    pub(super) fn check_reduced(&self) -> Result {
        self.check()?;
        nccl::check()?;
        if self.is_unreduced.get() {
            return Err(usage_error(&self.group, UsageError::GradientsNotReduced));
        }
        Ok(())
    }

    /// The scaled gradients of an optimizer, in fp16.
    pub(super) fn scaled<'a>(&'a self, own: &'a Rc<OwnGrads>) -> Option<Scaled<'a>> {
        Some(Scaled { scaling: self.scaling.as_ref()?, shared: self, own })
    }

    /// The gradients were cleared.
    pub(super) fn gradients_cleared(&self) {
        self.is_unreduced.set(false);
    }

    /// Returns an error of a forward that could not return it.
    pub(super) fn check(&self) -> Result {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Keeps an error of a forward for the next backward.
    pub(super) fn note(&self, error: AcceleratorError) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    /// Enters autocast, where the precision needs it, until the result is dropped.
    pub(super) fn autocast(&self) -> Result<Option<Autocast>> {
        Ok(self.autocast_kind().map(|kind| Autocast::new(self.device, kind)).transpose()?)
    }

    /// The type of autocast, if any.
    pub(super) fn autocast_kind(&self) -> Option<Kind> {
        self.precision.autocast()
    }
}

/// The entry of a running loop. It is removed when this is dropped.
pub(crate) struct Entry {
    shared: Rc<Shared>,
    name: u64,
}

impl Entry {
    pub(super) fn new(shared: &Rc<Shared>) -> Self {
        let name = shared.loops.get();
        shared.loops.set(name + 1);
        Self { shared: shared.clone(), name }
    }

    /// Makes this the current turn of the loop.
    pub(super) fn begin(&mut self, turn: Turn) {
        let (mut turns, turn) = (self.shared.turns.borrow_mut(), Rc::new(turn));
        match turns.iter_mut().find(|(name, _)| *name == self.name) {
            Some((_, place)) => *place = turn,
            None => turns.push((self.name, turn)),
        }
    }

    pub(super) fn end(&mut self) {
        self.shared.turns.borrow_mut().retain(|(name, _)| *name != self.name);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.end();
    }
}

/// Restores reduction when it is dropped.
pub(super) struct WithoutSync<'a> {
    shared: &'a Shared,
    before: bool,
}

impl Drop for WithoutSync<'_> {
    fn drop(&mut self) {
        self.shared.is_syncing.set(self.before);
    }
}
