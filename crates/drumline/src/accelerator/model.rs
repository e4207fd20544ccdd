//! A prepared model: a replica of rank 0's, which tracks the current turn.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;

use drumline_comm::{call_site, on_behalf_of};
use drumline_parallel::{Clip, Engine, EngineOptions, EngineSetup, Forwards, GradSync};
use drumline_torch::{Named, grad};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::error::Result;
use super::shared::Shared;
use super::stages::Pipelined;
use super::window::Turn;
use crate::checkpoint::named;
use crate::comm::shared_failure::{SharedFailure, agree};

/// The engine of a model of any type, and the turn that it has begun.
pub(super) struct Replica {
    engine: Rc<dyn Engine>,
    /// What runs it, if it is cut into stages, from the first step or evaluation on.
    pub(super) pipelined: OnceCell<Pipelined>,
    begun: RefCell<Option<Rc<Turn>>>,
    /// Backwards of scaled losses, on this rank or on others.
    scaled_backwards: Cell<u64>,
}

/// A prepared model of any type, with all its tensors.
pub(super) struct Prepared {
    pub(super) replica: Rc<Replica>,
    pub(super) tensors: Vec<Named>,
}

impl Prepared {
    /// Whether it has this tensor, or this rank's rows of it.
    pub(super) fn has(&self, named: &Named) -> bool {
        let is_same = |own: &Named| own.tensor.data_ptr() == named.tensor.data_ptr();
        self.tensors.iter().any(is_same) || self.replica.engine().parameters().iter().any(is_same)
    }
}

/// Parameters of one model.
pub(super) type OfModel = (Rc<Replica>, Vec<Named>);

impl Replica {
    pub(super) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// The engine, for a pipeline.
    pub(super) fn shared_engine(&self) -> Rc<dyn Engine> {
        Rc::clone(&self.engine)
    }

    /// Begins a turn, and with the first turn of a window also the step. Each rank calls it in every turn; only the
    /// first call has an effect.
    pub(super) fn begin(&self, turn: &Rc<Turn>) -> Result {
        let Some(agreed) = &turn.window.agreed else { return Ok(()) };
        let before = self.begun.replace(Some(turn.clone()));
        if before.as_ref().is_some_and(|before| Rc::ptr_eq(before, turn)) {
            return Ok(());
        }
        if !before.is_some_and(|before| Rc::ptr_eq(&before.window, &turn.window)) {
            self.engine.begin_step(agreed)?;
        }
        self.engine.begin_micro_batch();
        Ok(())
    }

    /// The number of backwards of scaled losses.
    pub(super) fn scaled_backwards(&self) -> u64 {
        self.scaled_backwards.get()
    }

    /// Counts a backward of a scaled loss, on this rank or on others.
    pub(super) fn note_scaled_backward(&self) {
        self.scaled_backwards.set(self.scaled_backwards.get() + 1);
    }

    /// Takes part in the other ranks' turn without a batch.
    pub(super) fn backward_nothing(&self, turn: &Turn, sync: GradSync) -> Result {
        if turn.window.agreed.is_none() {
            self.engine.begin_micro_batch();
        }
        Ok(self.engine.backward_nothing(sync)?)
    }
}

/// Clips gradients of one model or several by their norm together. Returns the norm before clipping.
pub(super) fn clip_norm(models: &[OfModel], max_norm: f64) -> Result<f64> {
    if let [(replica, parameters)] = models
        && max_norm.is_finite()
    {
        return Ok(replica.engine().clip(Clip::Norm(max_norm), parameters)?.unwrap_or(0.0));
    }
    let norms = models.iter().map(|(replica, parameters)| replica.engine().grad_norm(parameters));
    let norms = norms.collect::<std::result::Result<Vec<_>, _>>()?;
    let all = norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
    if max_norm.is_finite() {
        for ((replica, parameters), norm) in models.iter().zip(norms) {
            // If a norm is not finite, clipping returns an error that names the parameter.
            let part = if all.is_finite() && all > 0.0 { norm / all } else { 1.0 };
            replica.engine().clip(Clip::Norm(max_norm * part), parameters)?;
        }
    }
    Ok(all)
}

/// Whether one of these parameters has no gradient because the rows of it that this rank holds have it.
pub(super) fn gradients_are_elsewhere(models: &[OfModel]) -> Result<bool> {
    for (replica, given) in models {
        let mut trained = HashSet::new();
        for Named { name, tensor } in replica.engine().parameters() {
            if grad(&tensor)?.is_some() {
                trained.insert(name);
            }
        }
        for Named { name, tensor } in given {
            if trained.contains(name) && grad(tensor)?.is_none() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Returns an error on all ranks if the model cannot be prepared on one of them.
fn check(store: &VarStore, shared: &Shared) -> Result {
    let models = shared.models.borrow();
    let is_prepared =
        |named: &&Named| named.tensor.numel() > 0 && models.iter().any(|model| model.has(named));
    let failure = match named(store).iter().find(is_prepared) {
        _ if ![Device::Cpu, shared.device].contains(&store.device()) => Some(format!(
            "the model is on {:?}, expected {:?}; try VarStore::new(accelerator.device())",
            store.device(),
            shared.device
        )),
        Some(named) => Some(format!(
            "`{}` is part of a model that is prepared already; try one prepare for each model",
            named.name
        )),
        None => None,
    };
    agree(&shared.group, failure.map_or(Ok(()), |failure| Err(failure.into())))
}

/// A model that all ranks train together; see [`Accelerator::prepare`](super::Accelerator::prepare). It has
/// `forward_t`, as a `tch` module has.
pub struct PreparedModel<M> {
    pub(super) model: M,
    pub(super) replica: Rc<Replica>,
    pub(super) shared: Rc<Shared>,
}

impl<M: 'static> PreparedModel<M> {
    pub(super) fn new(
        model: M,
        store: &VarStore,
        options: Box<dyn EngineOptions>,
        shared: &Rc<Shared>,
    ) -> Result<Self> {
        check(store, shared)?;
        let on_all = |text: String| SharedFailure::on_all_ranks(text);
        let shape = options.mesh_shape(shared.group.size()).map_err(|error| on_all(error.to_string()))?;
        if shape != *shared.mesh.shape() {
            let text = format!(
                "the model's ranks are {shape}, those of the accelerator {}; try the same options in Accelerator::builder().engine(…)",
                shared.mesh.shape()
            );
            return Err(on_all(text).into());
        }
        let setup = EngineSetup { device: shared.device, ..EngineSetup::new(store, &shared.mesh) };
        let replica = Rc::new(Replica {
            engine: options.engine(setup)?.into(),
            pipelined: OnceCell::new(),
            begun: RefCell::default(),
            scaled_backwards: Cell::new(0),
        });
        shared.models.borrow_mut().push(Prepared { replica: replica.clone(), tensors: named(store) });
        Ok(Self { model, replica, shared: shared.clone() })
    }

    /// Runs a forward in training: `body` gets the model. In a turn with a filler batch the output does not count, and
    /// norms over all ranks act as in an evaluation.
    #[track_caller]
    pub fn forward_with<R>(&self, body: impl FnOnce(&M) -> R) -> Result<R> {
        self.forward_of(None, body)
    }

    /// The same for a batch of so many samples, if that is known.
    #[track_caller]
    fn forward_of<R>(&self, count: Option<usize>, body: impl FnOnce(&M) -> R) -> Result<R> {
        let site = call_site();
        let turn = on_behalf_of(site, || self.begin())?;
        let _autocast = self.shared.autocast()?;
        let engine = self.replica.engine();
        if turn.factor.is_none() {
            return Ok(engine.alone_with(|| body(&self.model)));
        }
        let _masks = self.shared.enter_masks(&turn, count)?;
        let sync = self.shared.sync_of(&turn);
        Ok(on_behalf_of(site, || engine.forward_with(sync, || body(&self.model)))?)
    }

    /// Runs backward of this model, where several are prepared; see
    /// [`Accelerator::backward`](super::Accelerator::backward).
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        on_behalf_of(call_site(), || self.shared.backward(&self.replica, loss))
    }

    /// Begins the current turn, in training.
    fn begin(&self) -> Result<Rc<Turn>> {
        let turn = self.shared.turn();
        self.shared.begin(&self.replica, &turn)?;
        Ok(turn)
    }
}

impl<M> PreparedModel<M> {
    /// The model itself.
    pub fn unwrap(&self) -> &M {
        &self.model
    }

    /// Runs an evaluation: forwards in `body` may be as many as a rank likes. All ranks call it. It is needed only where
    /// parameters are divided among GPUs (ZeRO-3): they are gathered for it.
    pub fn evaluation<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        struct Ends<'a>(&'a Replica);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                // It frees memory, and cannot do more than that.
                let _ = self.0.engine().end_evaluation(None);
            }
        }
        self.replica.engine().begin_evaluation(Forwards::Any)?;
        let _ends = Ends(&self.replica);
        Ok(body())
    }

    /// Where the optimizer's state lies, as a table, once the optimizer is prepared and if the state is offloaded. Rank 0 logs
    /// it.
    pub fn offload_note(&self) -> Option<String> {
        self.replica.engine().offload_note()
    }

    /// The parameters that are trained.
    pub fn parameters(&self) -> Vec<Named> {
        self.replica.engine().parameters()
    }
}

impl<M: ModuleT + 'static> PreparedModel<M> {
    /// Forward, as that of the `tch` module. It cannot return an error; the backward that follows returns errors
    /// between ranks instead.
    #[track_caller]
    pub fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        let output = if train { self.forward(input) } else { self.evaluate(input) };
        output.unwrap_or_else(|error| {
            self.shared.note(error);
            self.unwrap().forward_t(input, false)
        })
    }

    /// Forward in training.
    #[track_caller]
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if self.shared.turn().factor.is_none() {
            // A filler draws no random numbers, does not update norms, and waits for no other rank.
            self.begin()?;
            let _autocast = self.shared.autocast()?;
            return widened(self.replica.engine().alone_with(|| self.model.forward_t(input, false)));
        }
        let count = input.size().first().map(|count| *count as usize);
        let output = self.forward_of(count, |model| model.forward_t(input, true))?;
        widened(output)
    }

    /// Forward in evaluation, without communication.
    pub(crate) fn evaluate(&self, input: &Tensor) -> Result<Tensor> {
        let _autocast = self.shared.autocast()?;
        let forward = || self.model.forward_t(input, false);
        widened(self.replica.engine().evaluate_with(forward)?)
    }
}

/// The output in f32, in which losses are computed.
pub(super) fn widened(output: Tensor) -> Result<Tensor> {
    Ok(match output.kind() {
        Kind::BFloat16 | Kind::Half => output.f_to_kind(Kind::Float)?,
        _ => output,
    })
}

impl<M> std::fmt::Debug for PreparedModel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let num_parameters = self.replica.engine().parameters().len();
        f.debug_struct("PreparedModel").field("parameters", &num_parameters).finish_non_exhaustive()
    }
}
