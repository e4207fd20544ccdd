//! `Ddp` as the engine of a training loop, and the options that make it.

use std::sync::Arc;
use std::time::Instant;

use drumline_comm::{Axis, Mesh, MeshShape, ShapeError, call_site, on_behalf_of};
use drumline_torch::Named;
use tch::Tensor;

use super::observer::{ReducedBucket, ReductionObserver};
use super::{Ddp, DdpOptions, Result};
use crate::agreement::Agreed;
use crate::engine::{Alone, Engine, EngineOptions, EngineSetup, GradSync, Placed};
use crate::error::NotRecordable;

/// A `Ddp` without the model, which the training loop holds.
struct DdpEngine {
    ddp: Ddp<()>,
    mesh: Mesh,
    state: Vec<Placed>,
}

impl DdpEngine {
    /// Runs `body`, inside [`Ddp::no_sync`] if gradients are only accumulated.
    fn synced<R>(&self, sync: GradSync, body: impl FnOnce() -> R) -> R {
        match sync {
            GradSync::Reduce => body(),
            GradSync::Accumulate => self.ddp.no_sync(body),
        }
    }
}

impl Engine for DdpEngine {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn communicates(&self) -> bool {
        self.ddp.others.is_some()
    }

    fn is_lockstep(&self) -> bool {
        self.ddp.sync_group.is_some()
    }

    fn parameters(&self) -> Vec<Named> {
        self.ddp.parameters()
    }

    #[track_caller]
    fn begin_step(&self, agreed: &Agreed) -> Result {
        self.ddp.begin_step(agreed.buffers_of().unwrap_or(0))?;
        self.ddp.norm_calls.begin_step(&self.ddp.group, agreed)
    }

    fn begin_micro_batch(&self) {
        self.ddp.norm_calls.begin_micro_batch();
    }

    #[track_caller]
    fn forward(&self, sync: GradSync, body: &mut dyn FnMut()) -> Result {
        self.ddp.norm_calls.note_forward();
        let site = call_site();
        self.synced(sync, || on_behalf_of(site, || self.ddp.forward_with(|()| body())))
    }

    #[track_caller]
    fn backward(&self, loss: &Tensor, sync: GradSync) -> Result {
        let site = call_site();
        self.synced(sync, || on_behalf_of(site, || self.ddp.backward(loss)))
    }

    #[track_caller]
    fn backward_nothing(&self, sync: GradSync) -> Result {
        let calls = self.ddp.norm_calls.take();
        match (sync, calls) {
            (GradSync::Accumulate, calls) => Ok(self.ddp.norm_calls.shadow(&calls.unwrap_or_default())?),
            (GradSync::Reduce, Some(calls)) => self.ddp.backward_nothing_beside(&calls),
            (GradSync::Reduce, None) => self.ddp.backward_nothing(),
        }
    }

    fn alone(&self, body: &mut dyn FnMut()) {
        self.ddp.no_sync(|| match &self.ddp.sync_group {
            Some(group) => group.alone(body),
            None => body(),
        });
    }

    #[track_caller]
    fn sync_buffers(&self) -> Result {
        self.ddp.sync_buffers()
    }

    fn state(&self) -> Vec<Placed> {
        self.state.clone()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.ddp.is_recordable()
    }

    fn abort(&self, cause: &str) {
        self.ddp.abort(cause);
    }
}

impl EngineOptions for DdpOptions {
    fn mesh_shape(&self, num_ranks: usize) -> std::result::Result<MeshShape, ShapeError> {
        Ok(MeshShape::default().with(Axis::Dp, num_ranks))
    }

    #[track_caller]
    fn engine(mut self: Box<Self>, setup: EngineSetup<'_>) -> Result<Box<dyn Engine>> {
        let EngineSetup { store, mesh, observer } = setup;
        if mesh.whole().size() == 1 && !self.reduces_alone {
            return Ok(Box::new(Alone::new(store, mesh)));
        }
        self.observer = both(self.observer.take(), observer);
        let site = call_site();
        let ddp = on_behalf_of(site, || Ddp::new((), store, mesh.axis(Axis::Dp), *self))?;
        Ok(Box::new(DdpEngine { ddp, mesh: mesh.clone(), state: Placed::all_of(store) }))
    }
}

type Observer = Arc<dyn ReductionObserver>;

/// Forwards each call to two observers.
struct Both(Observer, Observer);

impl ReductionObserver for Both {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        self.0.bucket_reduced(bucket);
        self.1.bucket_reduced(bucket);
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.0.waited(begin, end);
        self.1.waited(begin, end);
    }
}

fn both(one: Option<Observer>, other: Option<Observer>) -> Option<Observer> {
    match (one, other) {
        (Some(one), Some(other)) => Some(Arc::new(Both(one, other))),
        (one, other) => one.or(other),
    }
}
