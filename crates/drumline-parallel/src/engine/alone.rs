//! The engine of a rank that is the only one with its part of the model, and reduces nothing.

use std::cell::RefCell;

use drumline_comm::Mesh;
use drumline_torch::{Named, Optimizer, parameters};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::{Engine, GradSync, ModelParts, Moved, Placed, Result, move_to};
use crate::agreement::Agreed;
use crate::error::NotRecordable;
use crate::offload::{Offload, StatePlace, Units, held_gradients};
use crate::shard::names_of_units;

/// One rank, which has all samples, and the whole model or a part of it that no other rank has.
pub struct Alone {
    mesh: Mesh,
    parts: ModelParts,
    parameters: Vec<Named>,
    state: Vec<Placed>,
    moved: Moved,
    offload: Offload,
    place: RefCell<StatePlace>,
}

impl std::fmt::Debug for Alone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mesh, parts, parameters, state, moved, offload, place: _ } = self;
        f.debug_struct("Alone")
            .field("mesh", mesh)
            .field("parts", parts)
            .field("parameters", parameters)
            .field("state", state)
            .field("moved", moved)
            .field("offload", offload)
            .finish_non_exhaustive()
    }
}

impl Alone {
    /// The engine of the model whose variables are in `store`.
    pub fn new(store: &VarStore, mesh: &Mesh) -> Self {
        Self::with(store, mesh, ModelParts::default())
    }

    fn with(store: &VarStore, mesh: &Mesh, parts: ModelParts) -> Self {
        let (parameters, state) = (parameters(store), parts.placed(Placed::all_of(store, 0)));
        let (offload, place) = (Offload::default(), RefCell::default());
        Self { mesh: mesh.clone(), parts, parameters, state, moved: Moved::No, offload, place }
    }

    /// The same, with an optimizer whose state lies elsewhere.
    pub(crate) fn offloading(self, offload: Offload) -> Self {
        Self { offload, ..self }
    }

    /// The same, for a model that trains on this device.
    pub(crate) fn on(device: Device, store: &VarStore, mesh: &Mesh, parts: ModelParts) -> Result<Self> {
        let moved = move_to(store, device, |_| false)?;
        Ok(Self { moved, ..Self::with(store, mesh, parts) })
    }
}

impl Engine for Alone {
    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn communicates(&self) -> bool {
        self.parts.is_cut()
    }

    fn is_lockstep(&self) -> bool {
        self.parts.waits(&self.mesh)
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
        self.parts.check_optimizer(optimizer)?;
        self.moved.adopt(optimizer)?;
        let bytes = |named: &Named| (named.tensor.numel() * named.tensor.kind().elt_size_in_bytes()) as u64;
        let device = self.parameters.first().map_or(Device::Cpu, |named| named.tensor.device());
        let gradients: u64 = self.parameters.iter().map(bytes).sum();
        let units = Units {
            device,
            names: names_of_units(&self.parameters),
            gradients: gradients.saturating_sub(held_gradients(&self.parameters)?),
        };
        self.place.borrow_mut().adopt(&self.offload, &units, optimizer, self.mesh.whole())
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

    fn step(&self, optimizer: &mut dyn Optimizer) -> Result {
        self.place.borrow_mut().step(optimizer)
    }

    fn backward_and_step(&self, loss: &Tensor, optimizer: &mut dyn Optimizer) -> Result {
        let backward = &mut || self.backward(loss, GradSync::Reduce);
        self.place.borrow_mut().backward_and_step(optimizer, backward)
    }

    fn state(&self) -> Vec<Placed> {
        self.state.clone()
    }

    fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.parts.is_recordable(&self.mesh)?;
        self.place.borrow().is_recordable()
    }

    fn abort(&self, cause: &str) {
        self.mesh.whole().abort(cause);
        self.parts.abort(&self.mesh, cause);
    }
}
