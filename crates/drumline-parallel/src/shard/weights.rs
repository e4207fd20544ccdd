//! The memory of a unit's parameters, and the rows of them that this rank owns.
//!
//! ```text
//!   stages 1 and 2   each rank has a flat memory with all rows, and steps its own;
//!                    then an all-gather copies each rank's rows to the others
//!   stage 3, CPU     the ranks of a node have one flat memory together, and each steps its own rows in it;
//!                    other nodes get them by an all-gather
//!   stage 3, GPU     each rank has the memory of its own rows, and steps them; the others' rows are gathered when an
//!                    operation uses the unit (`gathered.rs`)
//! ```
//! Parameters are views of the flat memory, so that a step in place is all that changes them.

use std::ops::Range;
use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::{HeapTensor, Movable, Named, TensorCollectives, node_shared_zeros, tensor_within};
use tch::{Device, Tensor};

use super::gathered::GatheredUnit;
use super::groups::Groups;
use super::unit::UnitPlan;
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Who has a copy of the flat memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copies {
    OnEachRank,
    OnEachNode,
    /// Nobody: ranks have their rows, which are gathered when they are used.
    WhenUsed,
}

/// Where the flat memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) copies: Copies,
    pub(super) device: Device,
}

/// The rows of a parameter that this rank owns.
#[derive(Debug)]
pub(super) struct OwnRows {
    /// The index of the parameter among all that were planned.
    pub(super) param: usize,
    /// The rows, as a leaf that an optimizer can step.
    pub(super) tensor: Tensor,
    /// The first of them.
    pub(super) first: usize,
    /// Their elements in the flat memory.
    pub(super) range: Range<usize>,
}

enum Flat {
    OnEachRank(HeapTensor),
    OnEachNode(Tensor),
    WhenUsed { movable: Arc<Movable>, own: Tensor },
}

/// A unit's parameters.
pub(super) struct Weights {
    pub(super) plan: UnitPlan,
    flat: Flat,
    pub(super) own: Vec<OwnRows>,
}

impl Weights {
    /// Moves a unit's parameters into flat memory. All ranks call it, and get the values of rank 0.
    pub(super) fn new(groups: &Groups, plan: UnitPlan, params: &[Named], held: Held) -> Result<Self> {
        let (shard, len, kind) = (&groups.shard, plan.layout.flat_len(), plan.kind);
        let Held { copies, device } = held;
        let flat = match copies {
            Copies::OnEachRank => Flat::OnEachRank(HeapTensor::zeros_on(shard, device, kind, len)?),
            Copies::OnEachNode => Flat::OnEachNode(node_shared_zeros(shard, kind, len)?),
            Copies::WhenUsed => Flat::WhenUsed {
                movable: Arc::new(Movable::new(kind, len, device)?),
                own: Tensor::f_zeros([plan.layout.shard_len() as i64], (kind, device))?,
            },
        };
        let mut weights = Self { plan, flat, own: Vec::new() };
        weights.fill(groups, params)?;
        weights.own = weights.own_rows(params, shard.rank())?;
        Ok(weights)
    }

    fn flat(&self) -> &Tensor {
        match &self.flat {
            Flat::OnEachRank(flat) => flat.tensor(),
            Flat::OnEachNode(flat) => flat,
            Flat::WhenUsed { movable, .. } => movable.tensor(),
        }
    }

    /// What gathers it when it is used, if it is divided among ranks.
    pub(super) fn gathered(&self) -> Option<GatheredUnit> {
        match &self.flat {
            Flat::WhenUsed { movable, own } => Some(GatheredUnit::new(&self.plan, movable, own)),
            Flat::OnEachRank(_) | Flat::OnEachNode(_) => None,
        }
    }

    /// The parameters, each with its place in `flat`.
    fn places<'a>(
        &'a self,
        params: &'a [Named],
        flat: &'a Tensor,
    ) -> impl Iterator<Item = Result<(&'a Tensor, Tensor)>> {
        self.plan.members.iter().zip(self.plan.layout.offsets()).map(move |(member, offset)| {
            let param = &params[*member].tensor;
            Ok((param, tensor_within(flat, *offset, &with_whole_rows(param)?)?))
        })
    }

    /// Fills the flat memory with rank 0's parameters, and makes the parameters views of it.
    fn fill(&self, groups: &Groups, params: &[Named]) -> Result {
        let _no_grad = tch::no_grad_guard();
        let is_on_one_node = groups.all.size() == groups.shard.ranks_on_node().len();
        if matches!(self.flat, Flat::OnEachNode(_)) && is_on_one_node {
            if groups.all.rank() == 0 {
                self.copy_into(params, self.flat())?;
            }
        } else {
            let mut received = Tensor::f_zeros(
                [self.plan.layout.flat_len() as i64],
                (self.plan.kind, self.flat().device()),
            )?;
            if groups.all.rank() == 0 {
                self.copy_into(params, &received)?;
            }
            groups.all.broadcast_tensor(&mut received, 0)?;
            self.keep(groups, &received)?;
        }
        groups.shard.barrier()?;
        for place in self.places(params, self.flat()) {
            let (param, place) = place?;
            param.shallow_clone().f_set_data(&place)?;
        }
        Ok(())
    }

    /// Keeps what this rank has to hold of a whole unit.
    fn keep(&self, groups: &Groups, whole: &Tensor) -> Result {
        match &self.flat {
            Flat::OnEachRank(flat) => flat.tensor().shallow_clone().f_copy_(whole)?,
            // The memory is written by one rank that has it.
            Flat::OnEachNode(flat) if groups.shard.ranks_on_node()[0] == groups.shard.rank() => {
                flat.shallow_clone().f_copy_(whole)?;
            }
            Flat::OnEachNode(_) => {}
            Flat::WhenUsed { own, .. } => {
                let mut before = 0;
                for range in self.plan.layout.shards(groups.shard.rank()) {
                    let len = range.len() as i64;
                    own.f_narrow(0, before, len)?.f_copy_(&whole.f_narrow(0, range.start as i64, len)?)?;
                    before += len;
                }
            }
        }
        Ok(())
    }

    fn copy_into(&self, params: &[Named], flat: &Tensor) -> Result {
        for place in self.places(params, flat) {
            let (param, mut place) = place?;
            place.f_copy_(param)?;
        }
        Ok(())
    }

    fn own_rows(&self, params: &[Named], rank: usize) -> Result<Vec<OwnRows>> {
        let mut own = Vec::new();
        for piece in self.plan.layout.pieces(rank) {
            let param = self.plan.members[piece.parameter];
            let whole = params[param].tensor.f_detach()?;
            let like = if whole.dim() == 0 {
                whole
            } else {
                whole.f_narrow(0, piece.rows.start as i64, piece.rows.len() as i64)?
            };
            let (memory, place) = match &self.flat {
                Flat::WhenUsed { own, .. } => (own, self.plan.own_place(rank, piece.range.start)),
                _ => (self.flat(), piece.range.start),
            };
            let rows = tensor_within(memory, place, &like)?.f_set_requires_grad(true)?;
            own.push(OwnRows { param, tensor: rows, first: piece.rows.start, range: piece.range });
        }
        Ok(own)
    }

    /// Copies what other ranks have written to their rows. All ranks of the group call it after they have written.
    pub(super) fn gather(&self, group: &ProcessGroup, scratch: &mut Option<Tensor>) -> Result {
        let layout = &self.plan.layout;
        for segment in layout.segments() {
            let range = segment.start..segment.start + segment.shard_len * group.size();
            match &self.flat {
                Flat::OnEachRank(flat) => flat.all_gather_in_place(group, range)?,
                Flat::OnEachNode(flat) if group.num_nodes() > 1 => {
                    let own = range.start + group.rank() * segment.shard_len;
                    let own = flat.f_narrow(0, own as i64, segment.shard_len as i64)?;
                    let scratch = scratch.get_or_insert_with(|| flat.empty_like());
                    if scratch.numel() < range.len() || scratch.kind() != flat.kind() {
                        *scratch = flat.empty_like();
                    }
                    let mut all = scratch.f_narrow(0, 0, range.len() as i64)?;
                    group.all_gather_into_tensor(&mut all, &own)?;
                    copy_remote(group, &all, &flat.f_narrow(0, range.start as i64, range.len() as i64)?)?;
                }
                Flat::OnEachNode(_) | Flat::WhenUsed { .. } => {}
            }
        }
        Ok(())
    }

    /// Whether other ranks read what this rank writes.
    pub(super) fn is_node_shared(&self) -> bool {
        matches!(self.flat, Flat::OnEachNode(_))
    }
}

/// Copies the parts of ranks on other nodes. Each rank of this node copies some of them.
fn copy_remote(group: &ProcessGroup, all: &Tensor, flat: &Tensor) -> Result {
    let here = group.ranks_on_node();
    let place = here.iter().position(|rank| *rank == group.rank()).unwrap_or(0);
    let len = all.size1()? / group.size() as i64;
    let remote = (0..group.size()).filter(|rank| !here.contains(rank));
    for (index, rank) in remote.enumerate() {
        if index % here.len() == place {
            let start = rank as i64 * len;
            flat.f_narrow(0, start, len)?.f_copy_(&all.f_narrow(0, start, len)?)?;
        }
    }
    Ok(())
}

/// The tensor itself if each of its rows is contiguous in memory, as with channels last; otherwise a contiguous copy.
fn with_whole_rows(tensor: &Tensor) -> Result<Tensor> {
    let (size, stride) = (tensor.size(), tensor.stride());
    let row_len: i64 = size.iter().skip(1).product();
    let has_whole_rows = stride.first().is_none_or(|stride| *stride == row_len || size[0] == 1);
    // Elements of a row may be in any order, but without gaps.
    let span: i64 = size.iter().zip(&stride).map(|(size, stride)| (size - 1).max(0) * stride).sum();
    let is_dense = tensor.numel() == 0 || span + 1 == tensor.numel() as i64;
    Ok(if has_whole_rows && is_dense { tensor.f_detach()? } else { tensor.f_detach()?.f_contiguous()? })
}
