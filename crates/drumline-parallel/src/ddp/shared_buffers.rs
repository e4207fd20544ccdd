//! The model's buffers, such as running means: moved into the symmetric heap, so that giving all ranks those of one costs one call
//! and no copy.

use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::{HeapTensor, Named, tensor_within};
use tch::Tensor;

use super::layout::{Caps, Item, Layout};
use crate::error::ParallelError;

#[derive(Debug)]
pub(super) struct SharedBuffers {
    group: Arc<ProcessGroup>,
    buffers: Vec<Named>,
    layout: Layout,
    flats: Vec<HeapTensor>,
    /// For each buffer its place in the heap.
    places: Vec<Tensor>,
}

impl SharedBuffers {
    pub(super) fn new(group: Arc<ProcessGroup>, buffers: Vec<Named>) -> Result<Self, ParallelError> {
        let items: Vec<Item> =
            buffers.iter().map(|b| Item { len: b.tensor.numel(), kind: b.tensor.kind() }).collect();
        let order: Vec<usize> = (0..buffers.len()).collect();
        let layout = Layout::new(&items, &order, Caps { first: usize::MAX, others: usize::MAX });
        let make = |flat: &super::layout::Flat| HeapTensor::zeros(&group, flat.kind, flat.len);
        let flats = layout.flats.iter().map(make).collect::<Result<Vec<_>, _>>()?;
        let place = |(index, buffer): (usize, &Named)| {
            let flat = flats[layout.buckets[layout.bucket_of[index]].flat].tensor();
            tensor_within(flat, layout.offset[index], &buffer.tensor)
        };
        let places = buffers.iter().enumerate().map(place).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { group, buffers, layout, flats, places })
    }

    /// Gives all ranks the buffers of `root`.
    pub(super) fn broadcast(&self, root: usize) -> Result<(), ParallelError> {
        self.move_in()?;
        for (flat, place) in self.flats.iter().zip(&self.layout.flats) {
            flat.broadcast(&self.group, 0..place.len, root)?;
        }
        Ok(())
    }

    /// Moves buffers into the heap that are not there: all of them at first, later those that the program has replaced.
    fn move_in(&self) -> Result<(), ParallelError> {
        let _no_grad = tch::no_grad_guard();
        for (buffer, place) in self.buffers.iter().zip(&self.places) {
            if buffer.tensor.data_ptr() != place.data_ptr() {
                place.shallow_clone().f_copy_(&buffer.tensor)?;
                buffer.tensor.shallow_clone().f_set_data(place)?;
            }
        }
        Ok(())
    }
}
