//! Sharded training as the engine of a training loop.

use std::cell::RefCell;

use drumline_comm::Mesh;
use drumline_torch::{Named, NormType, Optimizer, clip_grad_norm_to, clip_grad_value, grad_norm};
use tch::Tensor;

use super::groups::Groups;
use super::weights::Weights;
use super::{Accumulation, Result};
use crate::agreement::Agreed;
use crate::engine::{Clip, Engine, GradSync, Placed};
use crate::error::NotRecordable;
use crate::synced::{BackwardKind, Synced};

/// The engine of a model whose states are divided among ranks.
pub(super) struct Sharded {
    pub(super) mesh: Mesh,
    pub(super) groups: Groups,
    pub(super) synced: Synced,
    pub(super) accumulation: Accumulation,
    /// Of the trained parameters.
    pub(super) weights: Vec<Weights>,
    /// The rows of trained parameters that this rank owns.
    pub(super) own: Vec<Named>,
    pub(super) state: Vec<Placed>,
    /// Memory for the rows of other nodes.
    pub(super) scratch: RefCell<Option<Tensor>>,
}

impl Sharded {
    fn kind(&self, sync: GradSync) -> BackwardKind {
        match (sync, self.accumulation) {
            (GradSync::Reduce, _) => BackwardKind::ReduceLast,
            (GradSync::Accumulate, Accumulation::OwnRows) => BackwardKind::ReducePart,
            (GradSync::Accumulate, Accumulation::All) => BackwardKind::Accumulate,
        }
    }

    /// Lets all ranks see what each has written to its rows.
    fn publish(&self) -> Result {
        let _no_grad = tch::no_grad_guard();
        let mut scratch = self.scratch.borrow_mut();
        self.weights.iter().try_for_each(|unit| unit.gather(&self.groups.shard, &mut scratch))?;
        Ok(self.groups.shard.barrier()?)
    }
}

impl Engine for Sharded {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn communicates(&self) -> bool {
        self.synced.is_reducing()
    }

    fn is_lockstep(&self) -> bool {
        self.synced.is_lockstep()
    }

    fn parameters(&self) -> Vec<Named> {
        self.own.clone()
    }

    #[track_caller]
    fn begin_step(&self, agreed: &Agreed) -> Result {
        self.synced.begin_agreed_step(agreed)
    }

    fn begin_micro_batch(&self) {
        self.synced.begin_micro_batch();
    }

    #[track_caller]
    fn forward(&self, sync: GradSync, body: &mut dyn FnMut()) -> Result {
        self.synced.forward_micro_batch(self.kind(sync), body)
    }

    #[track_caller]
    fn backward(&self, loss: &Tensor, sync: GradSync) -> Result {
        self.synced.backward_of(loss, self.kind(sync))
    }

    #[track_caller]
    fn backward_nothing(&self, sync: GradSync) -> Result {
        self.synced.skip_micro_batch(self.kind(sync))
    }

    fn alone(&self, body: &mut dyn FnMut()) {
        self.synced.alone(body);
    }

    #[track_caller]
    fn sync_buffers(&self) -> Result {
        self.synced.sync_buffers()
    }

    /// Each element counts once: norms are combined over the ranks among which rows are divided.
    #[track_caller]
    fn grad_norm(&self, parameters: &[Named]) -> Result<f64> {
        let own = grad_norm(parameters, NormType::L2)?;
        let mut all = vec![0.0; self.groups.shard.size()];
        self.groups.shard.all_gather(&[own], &mut all)?;
        Ok(all.iter().map(|norm| norm * norm).sum::<f64>().sqrt())
    }

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

    fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result {
        let find = |named: &Named| self.own.iter().find(|own| own.name == named.name);
        Ok(optimizer.replace_parameters(&mut |named| find(named).map(|own| own.tensor.shallow_clone()))?)
    }

    #[track_caller]
    fn step(&self, optimizer: &mut dyn Optimizer) -> Result {
        let mut stepped = Ok(());
        self.change_parameters(&mut || stepped = optimizer.step())?;
        Ok(stepped?)
    }

    /// Waits until no rank reads parameters, and after `change` until all have written.
    #[track_caller]
    fn change_parameters(&self, change: &mut dyn FnMut()) -> Result {
        self.groups.shard.barrier()?;
        change();
        self.publish()
    }

    fn state(&self) -> Vec<Placed> {
        self.state.clone()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.synced.is_recordable()
    }

    fn abort(&self, cause: &str) {
        self.groups.abort(cause);
        self.synced.abort(cause);
    }
}
