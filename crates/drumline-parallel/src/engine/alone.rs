//! The engine of a job with one rank, which does not communicate.

use drumline_comm::Mesh;
use drumline_torch::{Named, parameters};
use tch::Tensor;
use tch::nn::VarStore;

use super::{Engine, GradSync, Placed, Result};
use crate::agreement::Agreed;
use crate::error::NotRecordable;

/// One rank, which has the whole model and all samples.
#[derive(Debug)]
pub struct Alone {
    mesh: Mesh,
    parameters: Vec<Named>,
    state: Vec<Placed>,
}

impl Alone {
    /// The engine of the model whose variables are in `store`.
    pub fn new(store: &VarStore, mesh: &Mesh) -> Self {
        Self { mesh: mesh.clone(), parameters: parameters(store), state: Placed::all_of(store, 0) }
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
