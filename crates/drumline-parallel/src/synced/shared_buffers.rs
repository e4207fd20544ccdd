//! The model's buffers, such as running means. They are moved into the symmetric heap, so that a broadcast is one call
//! without copies.

use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::Named;

use crate::arena::Arena;
use crate::error::ParallelError;
use crate::layout::Caps;

#[derive(Debug)]
pub(super) struct SharedBuffers {
    group: Arc<ProcessGroup>,
    arena: Arena,
}

impl SharedBuffers {
    pub(super) fn new(group: Arc<ProcessGroup>, buffers: Vec<Named>) -> Result<Self, ParallelError> {
        let order: Vec<usize> = (0..buffers.len()).collect();
        let arena = Arena::new(&group, buffers, &order, Caps::NONE)?;
        Ok(Self { group, arena })
    }

    /// Broadcasts the buffers of `root`.
    pub(super) fn broadcast(&self, root: usize) -> Result<(), ParallelError> {
        self.move_in()?;
        self.arena.broadcast_places(&self.group, root)
    }

    /// Moves buffers into the heap: all of them at first, later those that the program has replaced.
    fn move_in(&self) -> Result<(), ParallelError> {
        let _no_grad = tch::no_grad_guard();
        for (buffer, place) in self.arena.tensors.iter().zip(&self.arena.places) {
            if buffer.tensor.data_ptr() != place.data_ptr() {
                place.shallow_clone().f_copy_(&buffer.tensor)?;
                buffer.tensor.shallow_clone().f_set_data(place)?;
            }
        }
        Ok(())
    }
}
