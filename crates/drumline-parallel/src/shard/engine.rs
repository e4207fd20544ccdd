//! Sharded training as the engine of a training loop.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use drumline_comm::{Mesh, ReduceOp, call_site};
use drumline_plan::{Stage, StateBytes, StateSizes};
use drumline_torch::{
    Division, Named, NormType, Optimizer, OwnRows, TensorCollectives, grad_norm, grad_norm_on_device,
};
use tch::{Device, Kind, Tensor};

use super::Result;
use super::accumulation::{Accumulation, Choice};
use super::gathered::Gatherer;
use super::groups::Groups;
use super::weights::Weights;
use crate::agreement::Agreed;
use crate::engine::{Cut, Engine, Forwards, GradSync, ModelParts, Placed, Whole, copy_into};
use crate::error::{NotRecordable, ParallelError};
use crate::offload::{Offload, StatePlace, Units, held_gradients};
use crate::saved_grads::SavedGrads;
use crate::synced::{Alias, BackwardKind, Synced};

/// How an evaluation of this rank has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evaluated {
    /// It has made all its forwards, or stops before.
    All,
    /// A forward has failed.
    Failed,
}

/// A tensor of the model.
pub(super) struct Shape {
    pub(super) name: String,
    pub(super) size: Vec<i64>,
    pub(super) kind: Kind,
    pub(super) device: Device,
    /// Whether ranks have rows of it, and not each of them all.
    pub(super) is_divided: bool,
}

impl Shape {
    pub(super) fn of(Named { name, tensor }: &Named, is_divided: bool) -> Self {
        Self {
            name: name.clone(),
            size: tensor.size(),
            kind: tensor.kind(),
            device: tensor.device(),
            is_divided,
        }
    }
}

impl Shape {
    /// The same tensor under another name.
    pub(super) fn of_alias<'a>(alias: &'a Alias, shapes: &'a [Self]) -> impl Iterator<Item = Self> + 'a {
        let same = shapes.iter().filter(|shape| shape.name == alias.of);
        same.map(|shape| Self { name: alias.name.clone(), size: shape.size.clone(), ..*shape })
    }
}

/// The engine of a model whose states are divided among ranks.
pub(super) struct Sharded {
    pub(super) stage: Stage,
    pub(super) mesh: Mesh,
    pub(super) parts: ModelParts,
    pub(super) groups: Groups,
    pub(super) synced: Synced,
    pub(super) accumulation: Choice,
    /// Of the trained parameters.
    pub(super) weights: Vec<Weights>,
    /// Of the others, where they are divided.
    pub(super) frozen: Vec<Weights>,
    pub(super) device: Device,
    /// Gathers parameters of which ranks have only their rows.
    pub(super) gatherer: Option<Gatherer>,
    /// The rows of trained parameters that this rank owns.
    pub(super) own: Vec<Named>,
    /// Names of parameters that this rank trains for itself.
    pub(super) ignored: Vec<String>,
    /// The rows of this rank's part of the model that it holds.
    pub(super) state: Vec<Placed>,
    /// Of the model's tensors.
    pub(super) shapes: Vec<Shape>,
    pub(super) offload: Offload,
    /// Where the adopted optimizer has its state.
    pub(super) place: RefCell<StatePlace>,
    /// Memory for the rows of other nodes.
    pub(super) scratch: RefCell<Option<Tensor>>,
}

impl Sharded {
    fn kind(&self, sync: GradSync) -> BackwardKind {
        match (sync, self.accumulation.accumulation) {
            (GradSync::Reduce, _) => BackwardKind::ReduceLast,
            (GradSync::Accumulate, Accumulation::OwnRows) => BackwardKind::ReducePart,
            (GradSync::Accumulate, Accumulation::All) => BackwardKind::Accumulate,
        }
    }

    /// Lets `change` write to this rank's rows of these units, and all ranks see what each has written.
    fn change(&self, units: &[&Weights], change: &mut dyn FnMut()) -> Result {
        self.gatherer.as_ref().map_or(Ok(()), Gatherer::end_step)?;
        let are_shared = units.iter().any(|unit| unit.is_node_shared());
        let wait_for_readers = || if are_shared { self.groups.shard.barrier() } else { Ok(()) };
        wait_for_readers()?;
        change();
        let _no_grad = tch::no_grad_guard();
        let mut scratch = self.scratch.borrow_mut();
        units.iter().try_for_each(|unit| unit.gather(&self.groups.shard, &mut scratch))?;
        units.iter().for_each(|unit| unit.forget());
        Ok(wait_for_readers()?)
    }

    /// Those of which ranks have the mean gradient. What a rank trains for itself does not count in a norm of all.
    fn shared(&self, parameters: &[Named]) -> Vec<Named> {
        parameters.iter().filter(|named| !self.ignored.contains(&named.name)).cloned().collect()
    }

    /// The units as an optimizer on this rank sees them.
    fn units(&self) -> Result<Units> {
        let params = self.synced.params();
        let names = |unit: &Weights| unit.own.iter().map(|rows| params[rows.param].name.clone()).collect();
        let bytes = |unit: &Weights| {
            let held = StateBytes::of(&unit.plan.layout, self.stage, of_gradient(unit.plan.kind));
            held.gradients as u64
        };
        let gradients: u64 = self.weights.iter().map(bytes).sum();
        Ok(Units {
            device: self.device,
            names: self.weights.iter().map(names).collect(),
            gradients: gradients.saturating_sub(held_gradients(&self.own)?),
        })
    }

    /// What gathers parameters in an evaluation whose forwards all ranks make together.
    fn counted(&self) -> Option<&Gatherer> {
        self.gatherer.as_ref().filter(|gatherer| gatherer.is_counted())
    }

    /// Runs a forward or backward, in which parameters are gathered when they are used.
    #[track_caller]
    fn gathering<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        match &self.gatherer {
            Some(gatherer) => gatherer.together(call_site(), body),
            None => body(),
        }
    }
}

/// The bytes of an element's gradient.
fn of_gradient(kind: Kind) -> StateSizes {
    StateSizes { parameter: 0, gradient: kind.elt_size_in_bytes(), optimizer: 0 }
}

impl Engine for Sharded {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn communicates(&self) -> bool {
        self.synced.is_reducing()
    }

    fn is_lockstep(&self) -> bool {
        self.gatherer.is_some() || self.parts.waits(&self.mesh) || self.synced.is_lockstep()
    }

    fn parameters(&self) -> Vec<Named> {
        self.own.clone()
    }

    #[track_caller]
    fn begin_step(&self, agreed: &Agreed) -> Result {
        if let Some(gatherer) = &self.gatherer {
            // After a step that was skipped, parameters are still gathered.
            gatherer.end_step()?;
            if agreed.is_uneven() {
                let begun = gatherer.begin_uneven_step();
                begun.inspect_err(|error| self.abort(&error.to_string()))?;
            }
        }
        self.synced.begin_agreed_step(agreed)
    }

    fn begin_micro_batch(&self) {
        self.gatherer.iter().for_each(Gatherer::begin_micro_batch);
        self.synced.begin_micro_batch();
    }

    #[track_caller]
    fn forward(&self, sync: GradSync, body: &mut dyn FnMut()) -> Result {
        self.gatherer.iter().for_each(Gatherer::begin_forward);
        self.gathering(|| self.synced.forward_micro_batch(self.kind(sync), body))
    }

    #[track_caller]
    fn backward(&self, loss: &Tensor, sync: GradSync) -> Result {
        self.gathering(|| self.synced.backward_of(loss, self.kind(sync)))?;
        self.gatherer.as_ref().map_or(Ok(()), Gatherer::end_backward)
    }

    #[track_caller]
    fn backward_nothing(&self, sync: GradSync) -> Result {
        let Some(gatherer) = &self.gatherer else { return self.synced.skip_micro_batch(self.kind(sync)) };
        let site = call_site();
        let joined = if self.synced.is_lockstep() {
            Err(ParallelError::NormsWithoutSamples { rank: self.groups.all.rank() })
        } else {
            // Gradients are sent meanwhile, and wait for ranks that do not come any more.
            let gathers = &mut || {
                let joined = gatherer.join_micro_batch(site);
                joined.inspect_err(|error| self.abort(&error.to_string()))
            };
            self.synced.join_micro_batch(self.kind(sync), gathers)
        };
        joined.inspect_err(|error| self.abort(&error.to_string()))
    }

    fn accumulate(&self, body: &mut dyn FnMut() -> Result) -> Result {
        if self.gatherer.is_some() {
            let expected = "stage 1 or 2, or parameters that are not gathered";
            return Err(ParallelError::value("the stage of ZeRO in a pipeline", 3, expected));
        }
        self.synced.no_sync(body)
    }

    #[track_caller]
    fn reduce_accumulated(&self) -> Result {
        self.synced.join_backward(&[])
    }

    #[track_caller]
    fn alone(&self, body: &mut dyn FnMut()) {
        // The optimizer does not clear gradients of whole parameters, as it steps rows.
        let _gradients = SavedGrads::of(self.synced.params());
        match &self.gatherer {
            Some(gatherer) => gatherer.alone(call_site(), || self.synced.alone(body)),
            None => self.synced.alone(body),
        }
    }

    #[track_caller]
    fn begin_evaluation(&self, forwards: Forwards) -> Result {
        self.parts.begin_evaluation();
        self.synced.sync_buffers()?;
        self.gatherer.as_ref().map_or(Ok(()), |gatherer| gatherer.begin_evaluation(forwards))
    }

    fn cut_evaluation(&self) -> Cut {
        let of_parts = self.parts.cut_evaluation(&self.mesh);
        match self.counted() {
            Some(gatherer) => {
                gatherer.cut();
                Cut::AfterForward
            }
            None => of_parts,
        }
    }

    #[track_caller]
    fn end_evaluation(&self, failure: Option<&str>) -> Result {
        if let Some(cause) = failure {
            // Other ranks wait for this one in their forwards.
            self.parts.abort(&self.mesh, cause);
            self.counted().inspect(|_| self.abort(cause));
        }
        let Some(gatherer) = &self.gatherer else { return Ok(()) };
        let ends = if failure.is_some() { Evaluated::Failed } else { Evaluated::All };
        let ended = gatherer.end_evaluation(call_site(), ends);
        ended.inspect_err(|error| self.abort(&error.to_string()))
    }

    #[track_caller]
    fn evaluate(&self, body: &mut dyn FnMut()) -> Result {
        if self.parts.ends_evaluation(&self.mesh)? {
            // Those that gather parameters with this rank make this forward, and end after it.
            let Some(gatherer) = self.counted() else { return Err(ParallelError::EvaluationCut) };
            gatherer.cut();
        }
        match &self.gatherer {
            Some(gatherer) => gatherer.evaluate(call_site(), body),
            None => {
                body();
                Ok(())
            }
        }
    }

    #[track_caller]
    fn sync_buffers(&self) -> Result {
        self.synced.sync_buffers()
    }

    /// Norms are combined over the ranks among which rows are divided.
    #[track_caller]
    fn norm_of_part(&self, parameters: &[Named]) -> Result<f64> {
        let own = grad_norm(&self.shared(parameters), NormType::L2)?;
        let mut all = vec![0.0; self.groups.shard.size()];
        self.groups.shard.all_gather(&[own], &mut all)?;
        Ok(all.iter().map(|norm| norm * norm).sum::<f64>().sqrt())
    }

    #[track_caller]
    fn norm_of_part_on_device(&self, parameters: &[Named]) -> Result<Tensor> {
        let own = grad_norm_on_device(&self.shared(parameters), self.device)?;
        let mut squares = own.f_square()?;
        self.groups.shard.all_reduce_tensor(&mut squares, ReduceOp::Sum)?;
        Ok(squares.f_sqrt()?)
    }

    fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result {
        self.parts.check_optimizer(optimizer)?;
        let own: HashMap<&str, &Tensor> =
            self.own.iter().map(|own| (own.name.as_str(), &own.tensor)).collect();
        let placed: HashMap<&str, &Placed> =
            self.state.iter().map(|placed| (placed.name.as_str(), placed)).collect();
        let rows = |named: &Named| {
            let (tensor, placed) = (own.get(named.name.as_str())?, placed.get(named.name.as_str())?);
            Some(OwnRows {
                tensor: tensor.shallow_clone(),
                first: placed.offsets.first().copied().unwrap_or(0),
                whole: placed.whole.clone(),
            })
        };
        optimizer.divide(&Division { group: Arc::clone(&self.groups.shard), rows: &rows })?;
        self.place.borrow_mut().adopt(&self.offload, &self.units()?, optimizer, &self.groups.all)
    }

    fn offload_note(&self) -> Option<String> {
        self.place.borrow().note()
    }

    fn state_groups(&self) -> Vec<Vec<String>> {
        self.place.borrow().groups()
    }

    fn settle_state(&self, optimizer: &dyn Optimizer) -> Result {
        self.place.borrow_mut().settle(optimizer)
    }

    fn accumulation_note(&self) -> Option<String> {
        Some(self.accumulation.note())
    }

    #[track_caller]
    fn step(&self, optimizer: &mut dyn Optimizer) -> Result {
        let mut stepped = Ok(());
        let changed = self.change(&self.weights.iter().collect::<Vec<_>>(), &mut || {
            stepped = self.place.borrow_mut().step(optimizer);
            if let (Err(error), false) = (&stepped, self.offload.is_none()) {
                // State on disk is lost on this rank alone.
                self.abort(&error.to_string());
            }
        });
        stepped?;
        changed
    }

    /// Waits until no rank reads parameters, and after `change` until all have written.
    #[track_caller]
    fn change_parameters(&self, change: &mut dyn FnMut()) -> Result {
        self.change(&self.weights.iter().chain(&self.frozen).collect::<Vec<_>>(), change)?;
        // A write to a whole parameter is not seen in the rows of it.
        self.place.borrow_mut().note_change();
        Ok(())
    }

    fn state(&self) -> Vec<Placed> {
        self.parts.placed(self.state.clone())
    }

    fn tensors(&self) -> Vec<Whole> {
        let whole = |shape: &Shape| Whole { name: shape.name.clone(), size: shape.size.clone() };
        self.parts.tensors(|| self.shapes.iter().map(whole).collect())
    }

    #[track_caller]
    fn full_part(&self, name: &str) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let shape = self.shapes.iter().find(|shape| shape.name == name);
        let shape = shape.ok_or_else(|| ParallelError::no_tensor(name))?;
        let whole = Tensor::f_zeros(&shape.size, (shape.kind, shape.device))?;
        let own = self.state.iter().filter(|placed| placed.name == name);
        for Placed { tensor, offsets, .. } in own {
            copy_into(&whole, offsets, tensor)?;
        }
        if shape.is_divided {
            // As bytes, of which one rank has each: a sum of floats would not keep a negative zero.
            let mut bytes = whole.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
            self.groups.shard.all_reduce_tensor(&mut bytes, ReduceOp::Max)?;
        }
        Ok(whole)
    }

    #[track_caller]
    fn release(&self) -> Result {
        let Some(gatherer) = &self.gatherer else { return Ok(()) };
        gatherer.end_step()?;
        self.weights.iter().chain(&self.frozen).try_for_each(|unit| unit.restore(&self.groups.shard))
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.parts.is_recordable(&self.mesh)?;
        self.place.borrow().is_recordable()?;
        self.synced.is_recordable()?;
        self.gatherer.as_ref().map_or(Ok(()), Gatherer::is_recordable)
    }

    fn abort(&self, cause: &str) {
        self.groups.abort(cause);
        self.synced.abort(cause);
        self.parts.abort(&self.mesh, cause);
    }
}
