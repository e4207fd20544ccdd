//! The memory of a unit's parameters, and the rows of them that this rank owns.
//!
//! ```text
//!   stages 1 and 2   each rank has a flat memory with all rows, and steps its own;
//!                    then an all-gather copies each rank's rows to the others
//!   stage 3, CPU     the ranks of a node have one flat memory together, and each steps its own rows in it;
//!                    other nodes get them by an all-gather
//!   stage 3, GPU     each rank has the memory of its own rows, and steps them; the others' rows are gathered when an
//!                    operation uses the unit (`gathered.rs`); its own rows may be in a file
//! ```
//! Parameters are views of the flat memory, so that a step in place is all that changes them.

use std::ops::Range;
use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::{
    HeapTensor, Movable, Named, SwapFile, TensorCollectives, ValuesAt, node_shared, tensor_within,
};
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
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) copies: Copies,
    pub(super) device: Device,
    /// The file with this rank's rows, if they are gathered from there, and the place of the unit in it.
    pub(super) file: Option<InFile>,
}

/// Rows in a file.
#[derive(Debug, Clone)]
pub(super) struct InFile {
    pub(super) file: Arc<SwapFile>,
    pub(super) bytes: Range<usize>,
}

impl InFile {
    /// Lets the kernel take back the memory of rows that were used.
    pub(super) fn forget(&self) {
        self.file.forget(self.bytes.clone());
    }

    /// Asks the kernel to read the rows, which are used soon.
    pub(super) fn will_need(&self) {
        self.file.pages().will_need(self.bytes.clone());
    }
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
    WhenUsed { movable: Arc<Movable>, own: Tensor, file: Option<InFile> },
}

impl Drop for Weights {
    /// Parameters that would have no memory are empty: an operation that uses them is an error, and no crash.
    fn drop(&mut self) {
        let Flat::WhenUsed { movable, .. } = &self.flat else { return };
        if movable.rest().is_err() {
            return;
        }
        let memory = movable.addresses();
        for param in self.params.iter().filter(|param| memory.contains(&(param.data_ptr() as usize))) {
            if let Ok(empty) = Tensor::f_empty([0], (self.plan.kind, param.device())) {
                let _ = tch::no_grad(|| param.shallow_clone().f_set_data(&empty));
            }
        }
    }
}

impl Flat {
    /// The flat memory of a unit, with rank 0's values.
    fn filled(groups: &Groups, plan: &UnitPlan, params: &[Named], held: Held) -> Result<Self> {
        let (shard, len, kind) = (&groups.shard, plan.layout.flat_len(), plan.kind);
        let Held { copies, device, file } = held;
        Ok(match copies {
            Copies::OnEachRank => {
                let flat = HeapTensor::zeros_on(shard, device, kind, len)?;
                flat.tensor().shallow_clone().f_copy_(&broadcast(groups, plan, params, device)?)?;
                Self::OnEachRank(flat)
            }
            Copies::OnEachNode => {
                Self::OnEachNode(node_shared(shard, kind, len, &first_values(groups, plan, params)?)?)
            }
            Copies::WhenUsed => {
                let movable = Arc::new(Movable::new(kind, len, device)?);
                let own_len = plan.layout.shard_len();
                let own = match &file {
                    Some(InFile { file, bytes }) => file.pages().tensor(bytes.start, kind, own_len)?,
                    None => Tensor::f_zeros([own_len as i64], (kind, device))?,
                };
                let (whole, mut before) = (broadcast(groups, plan, params, device)?, 0);
                for range in plan.layout.shards(shard.rank()) {
                    let len = range.len() as i64;
                    own.f_narrow(0, before, len)?.f_copy_(&whole.f_narrow(0, range.start as i64, len)?)?;
                    before += len;
                }
                file.iter().for_each(InFile::forget);
                Self::WhenUsed { movable, own, file }
            }
        })
    }
}

/// All of a unit on each rank, with rank 0's values.
fn broadcast(groups: &Groups, plan: &UnitPlan, params: &[Named], device: Device) -> Result<Tensor> {
    let mut whole = Tensor::f_zeros([plan.layout.flat_len() as i64], (plan.kind, device))?;
    if groups.all.rank() == 0 {
        for place in places(plan, params, &whole) {
            let (param, mut place) = place?;
            place.f_copy_(param)?;
        }
    }
    groups.all.broadcast_tensor(&mut whole, 0)?;
    Ok(whole)
}

/// What this rank writes to memory that the ranks of its node share.
fn first_values(groups: &Groups, plan: &UnitPlan, params: &[Named]) -> Result<Vec<ValuesAt>> {
    let here = groups.shard.ranks_on_node();
    if groups.all.size() > here.len() {
        let whole = ValuesAt { offset: 0, values: broadcast(groups, plan, params, Device::Cpu)? };
        return Ok(Vec::from_iter((here[0] == groups.shard.rank()).then_some(whole)));
    }
    if groups.all.rank() != 0 {
        return Ok(Vec::new());
    }
    let offsets = plan.members.iter().zip(plan.layout.offsets());
    let values = offsets.map(|(member, offset)| {
        Ok(ValuesAt { offset: *offset, values: in_memory_order(&params[*member].tensor)? })
    });
    values.collect()
}

/// The parameters of a unit, each with its place in `flat`.
fn places<'a>(
    plan: &'a UnitPlan,
    params: &'a [Named],
    flat: &'a Tensor,
) -> impl Iterator<Item = Result<(&'a Tensor, Tensor)>> {
    plan.members.iter().zip(plan.layout.offsets()).map(move |(member, offset)| {
        let param = &params[*member].tensor;
        Ok((param, tensor_within(flat, *offset, &with_whole_rows(param)?)?))
    })
}

/// A unit's parameters.
pub(super) struct Weights {
    pub(super) plan: UnitPlan,
    flat: Flat,
    /// The parameters that are views of it, in the order of the plan's members.
    params: Vec<Tensor>,
    pub(super) own: Vec<OwnRows>,
}

impl Weights {
    /// Moves a unit's parameters into flat memory. All ranks call it, and get the values of rank 0.
    pub(super) fn new(groups: &Groups, plan: UnitPlan, params: &[Named], held: Held) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let flat = Flat::filled(groups, &plan, params, held)?;
        groups.shard.barrier()?;
        let members = plan.members.iter().map(|member| params[*member].tensor.shallow_clone()).collect();
        let mut weights = Self { plan, flat, params: members, own: Vec::new() };
        for place in places(&weights.plan, params, weights.flat()) {
            let (param, place) = place?;
            param.shallow_clone().f_set_data(&place)?;
        }
        weights.own = weights.own_rows(params, groups.shard.rank())?;
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
            Flat::WhenUsed { movable, own, file } => {
                Some(GatheredUnit::new(&self.plan, movable, own, file.clone()))
            }
            Flat::OnEachRank(_) | Flat::OnEachNode(_) => None,
        }
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

    /// Moves parameters that are gathered when they are used into memory that the ranks of a node share, in which they are
    /// whole.
    pub(super) fn restore(&self, group: &ProcessGroup) -> Result {
        let Flat::WhenUsed { own, .. } = &self.flat else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let first = if group.num_nodes() == 1 {
            self.own_values(own, group.rank())?
        } else {
            // Of each node one rank writes the rows of all.
            let values = self.gathered_values(own, group)?;
            Vec::from_iter((group.ranks_on_node()[0] == group.rank()).then_some(values))
        };
        let flat = node_shared(group, self.plan.kind, self.plan.layout.flat_len(), &first)?;
        group.barrier()?;
        for (param, offset) in self.params.iter().zip(self.plan.layout.offsets()) {
            param.shallow_clone().f_set_data(&tensor_within(&flat, *offset, param)?)?;
        }
        Ok(())
    }

    /// This rank's elements, each range with its place in the whole.
    fn own_values(&self, own: &Tensor, rank: usize) -> Result<Vec<ValuesAt>> {
        let (mut values, mut before) = (Vec::new(), 0);
        for range in self.plan.layout.shards(rank) {
            let part = own.f_narrow(0, before, range.len() as i64)?.f_to_device(Device::Cpu)?;
            values.push(ValuesAt { offset: range.start, values: part });
            before += range.len() as i64;
        }
        Ok(values)
    }

    /// The elements of all ranks.
    fn gathered_values(&self, own: &Tensor, group: &ProcessGroup) -> Result<ValuesAt> {
        let whole = Tensor::f_zeros([self.plan.layout.flat_len() as i64], (self.plan.kind, own.device()))?;
        let mut before = 0;
        for segment in self.plan.layout.segments() {
            let len = segment.shard_len as i64;
            let mut all = whole.f_narrow(0, segment.start as i64, len * group.size() as i64)?;
            group.all_gather_into_tensor(&mut all, &own.f_narrow(0, before, len)?)?;
            before += len;
        }
        Ok(ValuesAt { offset: 0, values: whole.f_to_device(Device::Cpu)? })
    }

    /// Lets the kernel take back the memory of rows that are in a file, after a step.
    pub(super) fn forget(&self) {
        if let Flat::WhenUsed { file: Some(file), .. } = &self.flat {
            file.forget();
        }
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

/// The elements of a parameter in the order in which they lie in flat memory.
fn in_memory_order(param: &Tensor) -> Result<Tensor> {
    Ok(with_whole_rows(param)?.f_as_strided([param.numel() as i64], [1], None)?)
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
