//! The engine: the interface between a training loop and a kind of parallelism.
//!
//! ```text
//!   Agreed::reach ─▶ begin_step ─▶ begin_micro_batch ─ forward ─ backward ─▶ … ─▶ unscale ─▶ clip ─▶ step
//!   counts, who       buffers      or backward_nothing, where this rank          overflow    norm    optimizer
//!   has data          of one rank  has no batch; the last one reduces            of all      of all
//! ```
//! A loop holds a `dyn Engine` and the model. A step has micro-batches, and all ranks take part in as many as the rank
//! that has most; gradients are reduced in the last one. A new kind of parallelism is a new folder that implements
//! [`Engine`] and [`EngineOptions`].
//!
//! Not here: what ranks agree on before a step (`agreement`), reduction itself (`ddp`).

mod alone;
mod clip;
mod ending;
mod model_parts;
mod moving;
mod placed;

use std::sync::Arc;

use drumline_comm::{Mesh, MeshShape, ShapeError};
use drumline_torch::{
    LossScaler, Named, NormType, Optimizer, StepMade, Unscaled, clip_grad_norm_by, clip_grad_norm_to,
    clip_grad_value, grad_norm, grad_norm_on_device,
};
use tch::nn::VarStore;
use tch::{Device, Tensor};

pub use alone::Alone;
pub use clip::Clip;
pub(crate) use ending::Ending;
pub(crate) use model_parts::copy_into;
pub use model_parts::{ModelParallel, ModelParts, Part, Stack};
pub(crate) use moving::{Moved, move_to};
pub use placed::{Placed, PlacedBox, Whole};

use crate::agreement::Agreed;
use crate::ddp::DdpOptions;
use crate::error::{NotRecordable, ParallelError};
use crate::observer::ReductionObserver;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// What a backward does with gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradSync {
    /// It accumulates them on this rank.
    Accumulate,
    /// It reduces the sum over all ranks.
    Reduce,
}

impl GradSync {
    /// The value for a micro-batch of a step: the last one reduces.
    pub fn of(micro_batch: usize, num_micro_batches: usize) -> Self {
        if micro_batch + 1 < num_micro_batches { Self::Accumulate } else { Self::Reduce }
    }
}

/// The forwards that a rank makes in an evaluation. All ranks of an evaluation choose the same variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwards {
    /// This number, each inside of [`Engine::evaluate`], and nothing else uses the model. Ranks may have different
    /// numbers. Parameters that are divided among ranks are gathered when they are used, as in training.
    Counted(usize),
    /// Any number, anywhere. Parameters that are divided among ranks are all gathered for it.
    Any,
}

/// When an evaluation that a rank wants to end is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// At once: no rank waits for another one.
    Now,
    /// After the next forward of all ranks.
    AfterForward,
}

/// A kind of parallelism, as a training loop sees it. All ranks call each method together, unless its documentation
/// says otherwise.
pub trait Engine {
    /// How the ranks are arranged. Samples are divided over `mesh.samples()`, losses are summed over `mesh.losses()`.
    fn mesh(&self) -> &Mesh;

    /// Which part of the model this rank has.
    fn parts(&self) -> &ModelParts;

    /// Whether a step communicates: there are several ranks, or a single rank reduces to measure the cost.
    fn communicates(&self) -> bool;

    /// Whether a forward waits for other ranks. A rank that fails in such a forward cannot call
    /// [`backward_nothing`](Self::backward_nothing) instead.
    fn is_lockstep(&self) -> bool;

    /// The parameters, with the gradients that this rank holds.
    fn parameters(&self) -> Vec<Named>;

    /// Begins a step in which ranks may have different numbers of batches. Without it, a step begins with its first
    /// forward, and every rank has data.
    fn begin_step(&self, agreed: &Agreed) -> Result;

    /// Begins a micro-batch of the step, on a rank that has a batch as on one that has none.
    fn begin_micro_batch(&self);

    /// Runs the forward of a micro-batch whose backward will be of this kind.
    fn forward(&self, sync: GradSync, body: &mut dyn FnMut()) -> Result;

    /// Backward from this rank's part of the loss.
    fn backward(&self, loss: &Tensor, sync: GradSync) -> Result;

    /// Takes part in the other ranks' forward and backward of a micro-batch without a batch.
    fn backward_nothing(&self, sync: GradSync) -> Result;

    /// Runs backwards of this rank that only add to its gradients, however they begin. [`reduce_accumulated`](Self::reduce_accumulated)
    /// follows, before the step ends. Each rank calls it by itself.
    fn accumulate(&self, body: &mut dyn FnMut() -> Result) -> Result {
        body()
    }

    /// Reduces the gradients that [`accumulate`](Self::accumulate) has added up, and ends the backwards of the step.
    fn reduce_accumulated(&self) -> Result {
        Ok(())
    }

    /// Runs forwards and backwards of this rank alone: nothing in them waits for other ranks, and nothing is reduced.
    fn alone(&self, body: &mut dyn FnMut());

    /// Begins an evaluation of this many forwards: gives all ranks the same buffers, and each rank all that its forwards
    /// need.
    fn begin_evaluation(&self, forwards: Forwards) -> Result {
        let _ = forwards;
        self.parts().begin_evaluation();
        self.sync_buffers()
    }

    /// Asks for the end of an evaluation before all its forwards. If the rank may not just stop, all ranks get
    /// [`EvaluationCut`](ParallelError::EvaluationCut) from their next forward.
    fn cut_evaluation(&self) -> Cut {
        self.parts().cut_evaluation(self.mesh())
    }

    /// Ends an evaluation. A rank that has failed says why: others may be waiting for it.
    fn end_evaluation(&self, failure: Option<&str>) -> Result {
        if let Some(cause) = failure {
            self.parts().abort(self.mesh(), cause);
        }
        Ok(())
    }

    /// Runs a forward of an evaluation. Ranks may make different numbers of them, so that each rank calls it by itself;
    /// only ranks with parts of one model, or of the same samples, make the same number.
    #[track_caller]
    fn evaluate(&self, body: &mut dyn FnMut()) -> Result {
        if self.parts().ends_evaluation(self.mesh())? {
            return Err(ParallelError::EvaluationCut);
        }
        body();
        Ok(())
    }

    /// Gives all ranks the same buffers. Called before buffers are saved.
    fn sync_buffers(&self) -> Result;

    /// Turns gradients of a scaled loss into those of the loss, and agrees with all ranks whether some have overflowed.
    fn unscale(&self, scaler: &LossScaler, parameters: Vec<Named>) -> Result<Unscaled> {
        let mut unscaled = scaler.received().unscale(scaler, parameters)?;
        unscaled.agree(self.mesh().whole())?;
        Ok(unscaled)
    }

    /// The norm of these parameters' gradients together, each element of the whole model once. It may be infinite or NaN.
    #[track_caller]
    fn grad_norm(&self, parameters: &[Named]) -> Result<f64> {
        let own = self.norm_of_part(&self.parts().counted(parameters))?;
        self.parts().norm(self.mesh(), own)
    }

    /// The same of this rank's part of the model, over the ranks that have the same part.
    fn norm_of_part(&self, parameters: &[Named]) -> Result<f64> {
        Ok(grad_norm(parameters, NormType::L2)?)
    }

    /// The same without waiting for a GPU.
    fn norm_of_part_on_device(&self, parameters: &[Named]) -> Result<Tensor> {
        let device = parameters.first().map_or(Device::Cpu, |named| named.tensor.device());
        Ok(grad_norm_on_device(parameters, device)?)
    }

    /// Clips the gradients of these parameters. Returns their norm before clipping, if they are clipped by norm.
    #[track_caller]
    fn clip(&self, clip: Clip, parameters: &[Named]) -> Result<Option<f64>> {
        match clip {
            Clip::Norm(max_norm) => {
                let norm = self.grad_norm(parameters)?;
                clip_grad_norm_to(parameters, max_norm, norm)?;
                Ok(Some(norm))
            }
            Clip::Value(max_value) => Ok(clip_grad_value(parameters, max_value).map(|()| None)?),
        }
    }

    /// The same without waiting for a GPU, so that it can be part of a CUDA graph.
    #[track_caller]
    fn clip_on_device(&self, clip: Clip, parameters: &[Named]) -> Result<Option<Tensor>> {
        match clip {
            Clip::Norm(max_norm) => {
                let own = self.norm_of_part_on_device(&self.parts().counted(parameters))?;
                let norm = self.parts().norm_on_device(self.mesh(), own)?;
                clip_grad_norm_by(parameters, max_norm, &norm)?;
                Ok(Some(norm))
            }
            Clip::Value(max_value) => Ok(clip_grad_value(parameters, max_value).map(|()| None)?),
        }
    }

    /// Lets the optimizer step the parameters that this rank holds: [`parameters`](Self::parameters). Called once, before
    /// the first step.
    fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result {
        let _ = optimizer;
        Ok(())
    }

    /// Where the adopted optimizer has its state, as a table, if the engine was asked to offload it.
    fn offload_note(&self) -> Option<String> {
        None
    }

    /// The names of parameters whose optimizer state is in memory at the same time, so that it is loaded in these groups
    /// ([`Optimizer::load_state_of`]), each followed by [`settle_state`](Self::settle_state). Empty if all of it is.
    fn state_groups(&self) -> Vec<Vec<String>> {
        Vec::new()
    }

    /// Moves state that the optimizer has loaded to where it is kept. Each rank calls it by itself.
    fn settle_state(&self, optimizer: &dyn Optimizer) -> Result {
        let _ = optimizer;
        Ok(())
    }

    /// What this engine has decided by itself and a user should know, for steps of several micro-batches.
    fn accumulation_note(&self) -> Option<String> {
        None
    }

    /// Lets `change` write to the parameters that this rank holds, outside of a step. Then all ranks see what any has
    /// written. Without this, other ranks may read a parameter while it is written, or keep its old value.
    fn change_parameters(&self, change: &mut dyn FnMut()) -> Result {
        change();
        Ok(())
    }

    /// Steps the optimizer.
    fn step(&self, optimizer: &mut dyn Optimizer) -> Result {
        Ok(optimizer.step()?)
    }

    /// The last backward of a step, and the step. A single rank whose optimizer's state is in host memory steps units in
    /// backward, as soon as their gradients are complete, and frees these gradients. Gradients are neither clipped nor
    /// scaled in between. It hooks the parameters: one that has a hook of the program is an error, before anything is
    /// computed.
    #[track_caller]
    fn backward_and_step(&self, loss: &Tensor, optimizer: &mut dyn Optimizer) -> Result {
        self.backward(loss, GradSync::Reduce)?;
        self.step(optimizer)
    }

    /// The model's tensors that this rank holds, each with its place in the whole: what it saves, and what it loads
    /// into.
    fn state(&self) -> Vec<Placed>;

    /// All tensors of the model, on whichever ranks they are.
    fn tensors(&self) -> Vec<Whole> {
        self.parts().tensors(|| self.state().iter().map(Placed::of_whole).collect())
    }

    /// The whole of a tensor of the model, as a copy on this rank.
    #[track_caller]
    fn full(&self, name: &str) -> Result<Tensor> {
        self.parts().full(self.mesh(), name, || self.full_part(name))
    }

    /// This rank's part of a tensor, all of which ranks with the same part have together.
    fn full_part(&self, name: &str) -> Result<Tensor> {
        let mut state = self.state().into_iter();
        let placed =
            state.find(|placed| placed.name == name).ok_or_else(|| ParallelError::no_tensor(name))?;
        Ok(placed.tensor.f_detach()?.copy())
    }

    /// Gives the model back after the last step: if ranks held parts of its parameters, these are whole again, in host
    /// memory that the ranks of a machine share. Without it, such parameters are empty when the engine is dropped.
    fn release(&self) -> Result {
        Ok(())
    }

    /// An error that says why, if a step cannot be recorded as a CUDA graph. Called after the first two steps, which
    /// show in which order gradients become ready.
    fn is_recordable(&self) -> std::result::Result<(), NotRecordable>;

    /// Ends all groups that steps use: this rank will not continue, and others may be waiting in any of them. One rank
    /// calls it.
    fn abort(&self, cause: &str);
}

impl dyn Engine + '_ {
    /// [`forward`](Engine::forward) with a result.
    pub fn forward_with<R>(&self, sync: GradSync, body: impl FnOnce() -> R) -> Result<R> {
        let (mut body, mut result) = (Some(body), None);
        self.forward(sync, &mut || result = body.take().map(|body| body()))?;
        Ok(result.expect("forward runs its body"))
    }

    /// [`evaluate`](Engine::evaluate) with a result.
    pub fn evaluate_with<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        let (mut body, mut result) = (Some(body), None);
        self.evaluate(&mut || result = body.take().map(|body| body()))?;
        Ok(result.expect("evaluate runs its body"))
    }

    /// [`alone`](Engine::alone) with a result.
    pub fn alone_with<R>(&self, body: impl FnOnce() -> R) -> R {
        let (mut body, mut result) = (Some(body), None);
        self.alone(&mut || result = body.take().map(|body| body()));
        result.expect("alone runs its body")
    }

    /// [`step`](Engine::step), unless gradients have overflowed.
    pub fn step_unless_overflowed(
        &self,
        unscaled: &Unscaled,
        optimizer: &mut dyn Optimizer,
    ) -> Result<StepMade> {
        if unscaled.has_overflowed()? {
            return Ok(StepMade::Skipped);
        }
        self.step(optimizer)?;
        Ok(StepMade::Yes)
    }

    /// Takes part in all micro-batches of a step for which this rank has no batch.
    pub fn join_rest(&self, done: usize, num_micro_batches: usize) -> Result {
        (done..num_micro_batches).try_for_each(|micro_batch| {
            self.begin_micro_batch();
            self.backward_nothing(GradSync::of(micro_batch, num_micro_batches))
        })
    }
}

/// The arguments of [`EngineOptions::engine`].
pub struct EngineSetup<'a> {
    /// The model's variables.
    pub store: &'a VarStore,
    /// The ranks.
    pub mesh: &'a Mesh,
    /// Which part of the model the variables are.
    pub parts: ModelParts,
    /// Where the model trains. Its variables are moved there if they are elsewhere: a model that is larger than a GPU is
    /// created on the CPU, and each rank of ZeRO-3 moves its own rows to its GPU.
    pub device: Device,
    /// Observes reductions, in addition to an observer of the options.
    pub observer: Option<Arc<dyn ReductionObserver>>,
}

impl<'a> EngineSetup<'a> {
    /// Trains the model where it is, without an observer.
    pub fn new(store: &'a VarStore, mesh: &'a Mesh) -> Self {
        Self { store, mesh, parts: ModelParts::default(), device: store.device(), observer: None }
    }
}

/// The options of an engine, which create it.
pub trait EngineOptions {
    /// The number of ranks along each axis of the mesh, for `num_ranks` in all.
    fn mesh_shape(&self, num_ranks: usize) -> std::result::Result<MeshShape, ShapeError>;

    /// Creates the engine. All ranks of the mesh call it, and get the weights of rank 0.
    fn engine(self: Box<Self>, setup: EngineSetup<'_>) -> Result<Box<dyn Engine>>;
}

/// The default: a replica of the model on each rank.
impl Default for Box<dyn EngineOptions> {
    fn default() -> Self {
        Box::new(DdpOptions::default())
    }
}

impl<O: EngineOptions + 'static> From<O> for Box<dyn EngineOptions> {
    fn from(options: O) -> Self {
        Box::new(options)
    }
}
