//! A prepared model: a replica of rank 0's, which knows the turn that it is in.

use std::cell::RefCell;
use std::rc::Rc;

use drumline_comm::{call_site, on_behalf_of};
use drumline_parallel::{Ddp, DdpOptions, ParallelError};
use drumline_torch::Named;
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use super::Prepared;
use super::error::Result;
use super::norms::Norms;
use super::shared::Shared;
use super::window::Turn;
use crate::checkpoint::named;
use crate::shared_failure::agree;

type Parallel = std::result::Result<(), ParallelError>;

/// What backward needs of a model, whatever its type is.
pub(super) trait Replica {
    /// All ranks begin a window with the buffers of one. Each calls it in every turn; the first call does it.
    fn begin(&self, turn: &Rc<Turn>) -> Result;
    fn backward(&self, loss: &Tensor) -> Parallel;
    fn backward_unreduced(&self, loss: &Tensor) -> Parallel;
    /// Takes part in a turn of the others that reduces.
    fn backward_nothing(&self, turn: &Turn) -> Parallel;
    /// Takes part in one that does not.
    fn backward_nothing_unreduced(&self, turn: &Turn) -> Parallel;
    fn sync_buffers(&self) -> Parallel;
}

struct OneReplica<M> {
    ddp: Ddp<M>,
    norms: Norms,
    /// The turn that it has begun.
    begun: RefCell<Option<Rc<Turn>>>,
}

impl<M> Replica for OneReplica<M> {
    fn begin(&self, turn: &Rc<Turn>) -> Result {
        let Some(buffers_of) = turn.window.buffers_of else { return Ok(()) };
        let before = self.begun.replace(Some(turn.clone()));
        if before.as_ref().is_some_and(|before| Rc::ptr_eq(before, turn)) {
            return Ok(());
        }
        if before.as_ref().is_some_and(|before| before.factor.is_some()) {
            self.norms.learn();
        }
        if before.is_some_and(|before| Rc::ptr_eq(&before.window, &turn.window)) {
            return Ok(());
        }
        self.ddp.begin_step(buffers_of)?;
        self.norms.begin_window(self.ddp.group(), turn)
    }

    fn backward(&self, loss: &Tensor) -> Parallel {
        self.ddp.backward(loss)
    }

    fn backward_unreduced(&self, loss: &Tensor) -> Parallel {
        self.ddp.no_sync(|| self.ddp.backward(loss))
    }

    fn backward_nothing(&self, turn: &Turn) -> Parallel {
        match self.norms.calls_of(turn) {
            Some(calls) => self.ddp.backward_nothing_beside(&calls),
            None => self.ddp.backward_nothing(),
        }
    }

    fn backward_nothing_unreduced(&self, turn: &Turn) -> Parallel {
        Ok(self.norms.shadow(&self.norms.calls_of(turn).unwrap_or_default())?)
    }

    fn sync_buffers(&self) -> Parallel {
        self.ddp.sync_buffers()
    }
}

/// An error on all ranks if a model cannot be prepared on one, beside those that are.
pub(super) fn check(store: &VarStore, models: &[Prepared], shared: &Shared) -> Result {
    let is_prepared = |named: &&Named| {
        let mut known = models.iter().flat_map(|model| &model.tensors);
        named.tensor.numel() > 0 && known.any(|known| known.tensor.data_ptr() == named.tensor.data_ptr())
    };
    let trouble = match named(store).iter().find(is_prepared) {
        _ if store.device() != shared.device => Some(format!(
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
    agree(&shared.group, trouble.map_or(Ok(()), |trouble| Err(trouble.into())))
}

/// A model that all ranks train together; see [`Accelerator::prepare`](super::Accelerator::prepare). It has `forward_t` as a `tch` module has.
pub struct PreparedModel<M> {
    replica: Rc<OneReplica<M>>,
    shared: Rc<Shared>,
}

impl<M: 'static> PreparedModel<M> {
    pub(super) fn new(
        model: M,
        store: &VarStore,
        options: DdpOptions,
        shared: &Rc<Shared>,
    ) -> Result<(Self, Prepared)> {
        let norms = Norms::new(options.sync_group.clone());
        let ddp = Ddp::new(model, store, &shared.group, options)?;
        let replica = Rc::new(OneReplica { ddp, norms, begun: RefCell::default() });
        let prepared = Prepared { replica: replica.clone(), tensors: named(store) };
        if let Some(scaling) = &shared.scaling {
            scaling.add_model(replica.clone(), prepared.tensors.clone());
        }
        Ok((Self { replica, shared: shared.clone() }, prepared))
    }

    /// Forward in training, whatever it is made of: `body` gets the model. In a turn whose batch only fills up its output counts nowhere, and norms over all
    /// ranks do as in an evaluation.
    #[track_caller]
    pub fn forward_with<R>(&self, body: impl FnOnce(&M) -> R) -> Result<R> {
        let turn = on_behalf_of(call_site(), || self.begin())?;
        let _autocast = self.shared.autocast()?;
        let ddp = &self.replica.ddp;
        if turn.factor.is_none() {
            return Ok(self.replica.norms.alone(|| body(ddp.module())));
        }
        Ok(match self.shared.reduces(&turn) {
            true => ddp.forward_with(body)?,
            false => ddp.no_sync(|| ddp.forward_with(body))?,
        })
    }

    /// Backward of this model, where several are prepared; see [`Accelerator::backward`](super::Accelerator::backward).
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        on_behalf_of(call_site(), || self.shared.backward(&self.any(), loss))
    }

    /// The model begins a turn of training.
    fn begin(&self) -> Result<Rc<Turn>> {
        let turn = self.shared.turn();
        self.shared.begin(&self.any(), &turn)?;
        Ok(turn)
    }

    fn any(&self) -> Rc<dyn Replica> {
        self.replica.clone()
    }
}

impl<M> PreparedModel<M> {
    /// The model itself.
    pub fn unwrap(&self) -> &M {
        self.replica.ddp.module()
    }

    /// What is trained.
    pub fn parameters(&self) -> Vec<Named> {
        self.replica.ddp.parameters()
    }

    /// Bytes of each bucket of gradients.
    pub fn bucket_bytes(&self) -> Vec<usize> {
        self.replica.ddp.bucket_bytes()
    }
}

impl<M: ModuleT + 'static> PreparedModel<M> {
    /// As `tch`'s, before it was prepared. What goes wrong between ranks, which cannot be returned here, is returned by the backward that follows.
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
            // A filler: nothing random is used up, norms learn nothing, and no layer waits for other ranks.
            self.begin()?;
            return self.evaluate(input);
        }
        let output = self.forward_with(|model| model.forward_t(input, true))?;
        widened(output)
    }

    /// Forward in evaluation: nothing shared.
    fn evaluate(&self, input: &Tensor) -> Result<Tensor> {
        let _autocast = self.shared.autocast()?;
        widened(self.unwrap().forward_t(input, false))
    }
}

/// Losses are computed in f32.
fn widened(output: Tensor) -> Result<Tensor> {
    Ok(match output.kind() {
        Kind::BFloat16 | Kind::Half => output.f_to_kind(Kind::Float)?,
        _ => output,
    })
}

impl<M> std::fmt::Debug for PreparedModel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedModel").field("ddp", &self.replica.ddp).finish_non_exhaustive()
    }
}
