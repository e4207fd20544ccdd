//! Flat memory with a place for every tensor of a list, so that one collective processes all of them. It is in the
//! symmetric heap, or on the GPU of the tensors.

use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::{HeapTensor, Named, TorchError, move_grad, tensor_within};
use tch::{Device, Tensor};

use crate::error::ParallelError;
use crate::layout::{Bucket, Caps, Flat, Item, Layout};

/// Tensors, and for each a place with its sizes and strides in flat memory.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) tensors: Vec<Named>,
    pub(crate) layout: Layout,
    pub(crate) flats: Vec<Arc<HeapTensor>>,
    pub(crate) places: Vec<Tensor>,
    items: Vec<Item>,
    caps: Caps,
}

impl Arena {
    /// Creates the places, filled with zeros, in `order`. All ranks of the group call it together.
    pub(crate) fn new(
        group: &ProcessGroup,
        tensors: Vec<Named>,
        order: &[usize],
        caps: Caps,
    ) -> Result<Self, ParallelError> {
        let item = |named: &Named| Item { len: named.tensor.numel(), kind: named.tensor.kind() };
        let items: Vec<Item> = tensors.iter().map(item).collect();
        let layout = Layout::new(&items, order, caps);
        let device = one_device(&tensors)?;
        let make = |flat: &Flat| HeapTensor::zeros_on(group, device, flat.kind, flat.len).map(Arc::new);
        let flats = layout.flats.iter().map(make).collect::<Result<Vec<_>, _>>()?;
        let places = find_places(&tensors, &layout, &flats)?;
        Ok(Self { tensors, layout, flats, places, items, caps })
    }

    /// Changes the order of the places. Their contents are lost.
    pub(crate) fn reorder(&mut self, order: &[usize]) -> Result<(), ParallelError> {
        self.layout = Layout::new(&self.items, order, self.caps);
        self.clear();
        self.places = find_places(&self.tensors, &self.layout, &self.flats)?;
        Ok(())
    }

    /// Broadcasts the tensors of `root` through their places, which are zeros afterwards.
    pub(crate) fn broadcast_tensors(&self, group: &ProcessGroup, root: usize) -> Result<(), ParallelError> {
        let _no_grad = tch::no_grad_guard();
        let pairs = || self.tensors.iter().zip(&self.places);
        pairs().try_for_each(|(named, place)| place.shallow_clone().f_copy_(&named.tensor))?;
        self.broadcast_places(group, root)?;
        pairs().try_for_each(|(named, place)| named.tensor.shallow_clone().f_copy_(place))?;
        self.clear();
        Ok(())
    }

    /// Broadcasts the places of `root`.
    pub(crate) fn broadcast_places(&self, group: &ProcessGroup, root: usize) -> Result<(), ParallelError> {
        for (flat, Flat { len, .. }) in self.flats.iter().zip(&self.layout.flats) {
            flat.broadcast(group, 0..*len, root)?;
        }
        Ok(())
    }

    /// Moves the gradient of a tensor to its place. Without a gradient the place becomes zeros. Returns whether there
    /// was one.
    pub(crate) fn collect_grad(&self, index: usize) -> Result<bool, TorchError> {
        let had_gradient = move_grad(&self.tensors[index].tensor, &self.places[index])?;
        if !had_gradient {
            let _ = self.places[index].shallow_clone().f_zero_()?;
        }
        Ok(had_gradient)
    }

    /// The device of the tensors.
    pub(crate) fn device(&self) -> Device {
        self.flats.first().map_or(Device::Cpu, |flat| flat.device())
    }

    /// Whether `tensor` is in this memory.
    pub(crate) fn holds(&self, tensor: &Tensor) -> bool {
        self.flats.iter().any(|flat| flat.holds(tensor))
    }

    /// The size of a bucket in bytes.
    pub(crate) fn bytes(&self, bucket: &Bucket) -> usize {
        bucket.range.len() * self.layout.flats[bucket.flat].kind.elt_size_in_bytes()
    }

    fn clear(&self) {
        self.flats.iter().for_each(|flat| drop(flat.tensor().shallow_clone().zero_()));
    }
}

/// The device of all tensors; an error if they are on different devices.
fn one_device(tensors: &[Named]) -> Result<Device, ParallelError> {
    let Some(first) = tensors.first() else { return Ok(Device::Cpu) };
    let device = first.tensor.device();
    match tensors.iter().find(|named| named.tensor.device() != device) {
        None => Ok(device),
        Some(Named { name, tensor }) => Err(ParallelError::DifferentDevices {
            name: name.clone(),
            device: tensor.device(),
            first: first.name.clone(),
            first_device: device,
        }),
    }
}

fn find_places(
    tensors: &[Named],
    layout: &Layout,
    flats: &[Arc<HeapTensor>],
) -> Result<Vec<Tensor>, ParallelError> {
    let place = |(index, named): (usize, &Named)| {
        let flat = &flats[layout.buckets[layout.bucket_of[index]].flat];
        Ok(tensor_within(flat.tensor(), layout.offset[index], &named.tensor)?)
    };
    tensors.iter().enumerate().map(place).collect()
}
