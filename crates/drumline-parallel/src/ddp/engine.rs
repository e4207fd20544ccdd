//! `Ddp` as the engine of a training loop, and the options that make it.

use drumline_comm::{Axis, Mesh, MeshShape, ShapeError, call_site, on_behalf_of};
use drumline_torch::{Named, Optimizer};
use tch::Tensor;

use super::{Ddp, DdpOptions, Result};
use crate::agreement::Agreed;
use crate::engine::{
    Alone, Engine, EngineOptions, EngineSetup, GradSync, ModelParts, Moved, Placed, move_to,
};
use crate::error::NotRecordable;
use crate::observer::both;
use crate::synced::{BackwardKind, Synced};

/// A replica without the model, which the training loop holds.
struct DdpEngine {
    synced: Synced,
    mesh: Mesh,
    parts: ModelParts,
    state: Vec<Placed>,
    moved: Moved,
}

impl From<GradSync> for BackwardKind {
    fn from(sync: GradSync) -> Self {
        match sync {
            GradSync::Accumulate => Self::Accumulate,
            GradSync::Reduce => Self::ReduceLast,
        }
    }
}

impl Engine for DdpEngine {
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
        self.synced.is_lockstep() || self.parts.waits(&self.mesh)
    }

    fn parameters(&self) -> Vec<Named> {
        self.synced.params().to_vec()
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
        self.synced.forward_micro_batch(sync.into(), body)
    }

    #[track_caller]
    fn backward(&self, loss: &Tensor, sync: GradSync) -> Result {
        self.synced.backward_of(loss, sync.into())
    }

    #[track_caller]
    fn backward_nothing(&self, sync: GradSync) -> Result {
        self.synced.skip_micro_batch(sync.into())
    }

    fn accumulate(&self, body: &mut dyn FnMut() -> Result) -> Result {
        self.synced.no_sync(body)
    }

    #[track_caller]
    fn reduce_accumulated(&self) -> Result {
        self.synced.join_backward(&[])
    }

    fn alone(&self, body: &mut dyn FnMut()) {
        self.synced.alone(body);
    }

    #[track_caller]
    fn sync_buffers(&self) -> Result {
        self.synced.sync_buffers()
    }

    fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result {
        self.parts.check_optimizer(optimizer)?;
        self.moved.adopt(optimizer)
    }

    fn state(&self) -> Vec<Placed> {
        self.state.clone()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.parts.is_recordable(&self.mesh)?;
        self.synced.is_recordable()
    }

    fn abort(&self, cause: &str) {
        self.synced.abort(cause);
        self.parts.abort(&self.mesh, cause);
    }
}

impl EngineOptions for DdpOptions {
    fn mesh_shape(&self, num_ranks: usize) -> std::result::Result<MeshShape, ShapeError> {
        Ok(MeshShape::default().with(Axis::Dp, num_ranks))
    }

    #[track_caller]
    fn engine(mut self: Box<Self>, setup: EngineSetup<'_>) -> Result<Box<dyn Engine>> {
        let EngineSetup { store, mesh, parts, device, observer } = setup;
        if mesh.losses().size() == 1 && !self.reduces_alone {
            return Ok(Box::new(Alone::on(device, store, mesh, parts)?));
        }
        let moved = move_to(store, device, |_| false)?;
        self.observer = both(self.observer.take(), observer);
        let site = call_site();
        let Ddp { synced, .. } = on_behalf_of(site, || Ddp::new((), store, mesh.losses(), *self))?;
        Ok(Box::new(DdpEngine {
            synced,
            mesh: mesh.clone(),
            state: parts.placed(Placed::all_of(store, mesh.losses().rank())),
            parts,
            moved,
        }))
    }
}
