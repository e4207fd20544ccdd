//! The ranks along `tp`: their collectives, and the parts of the model's variables that this rank has.

use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use drumline_comm::{Axis, Mesh, ProcessGroup, ReduceOp, on_behalf_of};
use drumline_torch::{TensorCollectives, TorchError};
use tch::Tensor;

use super::cut::Cut;
use crate::engine::Part;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Where the program called what communicates, for errors.
pub(crate) type Site = &'static Location<'static>;

/// The ranks along `tp`, each with a part of every layer. Cheap to clone; clones are the same.
///
/// Layers are created with it, and it remembers which parts of their variables this rank has, for the
/// [engine](crate::ModelParallel).
#[derive(Debug, Clone, Default)]
pub struct TensorParallel {
    group: Option<ProcessGroup>,
    parts: Arc<Mutex<Vec<Part>>>,
}

impl TensorParallel {
    /// A model on the ranks of `group`, which are those along `tp`.
    pub fn new(group: &ProcessGroup) -> Self {
        let group = (group.size() > 1).then(|| group.clone());
        Self { group, parts: Arc::default() }
    }

    /// A model on this mesh.
    pub fn on(mesh: &Mesh) -> Self {
        Self::new(mesh.axis(Axis::Tp))
    }

    /// A model that is not cut.
    pub fn alone() -> Self {
        Self::default()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }

    /// This rank's index.
    pub fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, ProcessGroup::rank)
    }

    /// Whether there are several ranks.
    pub fn is_cut(&self) -> bool {
        self.group.is_some()
    }

    /// This rank's parts of the variables of all layers that were created with it.
    pub fn parts(&self) -> Vec<Part> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note(&self, part: Part) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(part);
    }

    /// The cut of a dim of this length.
    pub fn cut(&self, len: i64) -> Cut {
        Cut::new(len, self.size())
    }

    /// The sum of all ranks' tensors.
    pub(super) fn summed(&self, own: &Tensor, site: Site) -> Result<Tensor> {
        self.reduced(own, ReduceOp::Sum, site)
    }

    /// A reduction of all ranks' tensors.
    pub(super) fn reduced(&self, own: &Tensor, op: ReduceOp, site: Site) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own.shallow_clone()) };
        // The collective overwrites it, and autograd may use a gradient elsewhere.
        let mut all = copied(own)?;
        on_behalf_of(site, || group.all_reduce_tensor(&mut all, op))?;
        Ok(all)
    }

    /// The sums of all ranks' tensors, in few calls.
    pub(super) fn all_summed(&self, own: &[Tensor], site: Site) -> Result<Vec<Tensor>> {
        let mut all = own.iter().map(copied).collect::<Result<Vec<_>>>()?;
        if let Some(group) = &self.group {
            on_behalf_of(site, || group.all_reduce_tensors(&mut all, ReduceOp::Sum))?;
        }
        Ok(all)
    }

    /// This rank's part of a tensor that all have.
    pub(super) fn own_part(&self, whole: &Tensor, dim: i64) -> Result<Tensor> {
        let range = self.cut(whole.size()[dim as usize]).range(self.rank());
        Ok(whole.f_narrow(dim, range.start, range.end - range.start)?)
    }

    /// The whole of a tensor that is cut along `dim`.
    pub(super) fn gathered(&self, part: &Tensor, dim: i64, cut: Cut, site: Site) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(part.shallow_clone()) };
        let front = part.f_detach()?.f_movedim_int(dim, 0)?;
        let mut size = front.size();
        size[0] = cut.longest();
        let padded = if front.size() == size { front.f_contiguous()? } else { padded(&front, &size)? };
        size[0] *= self.size() as i64;
        let mut all = part.f_new_empty(&size[..], (part.kind(), part.device()))?;
        on_behalf_of(site, || group.all_gather_into_tensor(&mut all, &padded))?;
        if !cut.is_even() {
            let of_rank = |rank| {
                let range = cut.range(rank);
                all.f_narrow(0, rank as i64 * cut.longest(), range.end - range.start)
            };
            let parts = (0..self.size()).map(of_rank).collect::<std::result::Result<Vec<_>, _>>()?;
            all = Tensor::f_cat(&parts, 0)?;
        }
        Ok(all.f_movedim_int(0, dim)?.f_contiguous()?)
    }

    /// This rank's part, along `dim`, of the sum of all ranks' tensors.
    pub(super) fn scattered(&self, own: &Tensor, dim: i64, site: Site) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own.shallow_clone()) };
        let front = own.f_detach()?.f_movedim_int(dim, 0)?;
        let mut size = front.size();
        let cut = self.cut(size[0]);
        let all = if cut.is_even() { front.f_contiguous()? } else { self.spread(&front, cut)? };
        size[0] = cut.longest();
        let mut part = own.f_new_empty(&size[..], (own.kind(), own.device()))?;
        on_behalf_of(site, || group.reduce_scatter_tensor(&mut part, &all, ReduceOp::Sum))?;
        let range = cut.range(self.rank());
        Ok(part.f_narrow(0, 0, range.end - range.start)?.f_movedim_int(0, dim)?.f_contiguous()?)
    }

    /// The parts of all ranks, each padded to the longest.
    fn spread(&self, front: &Tensor, cut: Cut) -> Result<Tensor> {
        let mut size = front.size();
        size[0] = cut.longest() * self.size() as i64;
        let all = front.f_new_zeros(&size[..], (front.kind(), front.device()))?;
        for rank in 0..self.size() {
            let range = cut.range(rank);
            let len = range.end - range.start;
            let mut place = all.f_narrow(0, rank as i64 * cut.longest(), len)?;
            place.f_copy_(&front.f_narrow(0, range.start, len)?)?;
        }
        Ok(all)
    }
}

/// A contiguous copy.
fn copied(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(tensor.size(), (tensor.kind(), tensor.device()))?;
    copy.f_copy_(&tensor.f_detach()?)?;
    Ok(copy)
}

/// The tensor with zeros after it along the first dim.
fn padded(front: &Tensor, size: &[i64]) -> Result<Tensor> {
    let all = front.f_new_zeros(size, (front.kind(), front.device()))?;
    all.f_narrow(0, 0, front.size()[0])?.f_copy_(front)?;
    Ok(all)
}
