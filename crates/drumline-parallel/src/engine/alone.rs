//! The engine of a job with one rank, which does not communicate.

use drumline_comm::Mesh;
use drumline_torch::{Named, Optimizer, parameters};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::{Engine, GradSync, Moved, Placed, Result, move_to};
use crate::agreement::Agreed;
use crate::error::NotRecordable;

/// One rank, which has the whole model and all samples.
#[derive(Debug)]
pub struct Alone {
    mesh: Mesh,
    parameters: Vec<Named>,
    state: Vec<Placed>,
    moved: Moved,
}

impl Alone {
    /// The engine of the model whose variables are in `store`.
    pub fn new(store: &VarStore, mesh: &Mesh) -> Self {
        let (parameters, state) = (parameters(store), Placed::all_of(store, 0));
        Self { mesh: mesh.clone(), parameters, state, moved: Moved::No }
    }

    /// The same, for a model that trains on this device.
    pub(crate) fn on(device: Device, store: &VarStore, mesh: &Mesh) -> Result<Self> {
        let moved = move_to(store, device, |_| false)?;
        Ok(Self { moved, ..Self::new(store, mesh) })
    }
}

impl Engine for Alone {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn communicates(&self) -> bool {
        false
    }

    fn is_lockstep(&self) -> bool {
        false
    }

    fn parameters(&self) -> Vec<Named> {
        self.parameters.clone()
    }

    fn begin_step(&self, _: &Agreed) -> Result {
        Ok(())
    }

    fn begin_micro_batch(&self) {}

    fn forward(&self, _: GradSync, body: &mut dyn FnMut()) -> Result {
        body();
        Ok(())
    }

    fn backward(&self, loss: &Tensor, _: GradSync) -> Result {
        Ok(loss.f_backward()?)
    }

    fn backward_nothing(&self, _: GradSync) -> Result {
        Ok(())
    }

    fn alone(&self, body: &mut dyn FnMut()) {
        body();
    }

    fn sync_buffers(&self) -> Result {
        Ok(())
    }

    fn adopt(&self, optimizer: &mut dyn Optimizer) -> Result {
        self.moved.adopt(optimizer)
    }

    fn state(&self) -> Vec<Placed> {
        self.state.clone()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        Ok(())
    }

    fn abort(&self, cause: &str) {
        self.mesh.whole().abort(cause);
    }
}
