//! The two tiers of a group, and how a collective uses both: data between ranks of one node goes through their shared
//! memory, data between nodes over links.
//!
//! ```text
//!   all_reduce       reduce inside the node, exchange along the rails, share inside
//!   reduce_scatter   reduce inside the node, reduce along the rails, pass on inside to ranks that are on no rail
//!   all_gather       collect inside the node, exchange along the rails, share inside
//!   broadcast        to one rank of each node, then inside
//!   gather, scatter, all_to_all: every cell goes straight to its rank, through shared memory or over a link
//! ```
//! There is a file for each in `tiers/`; `topology` explains rails. Barrier and broadcast are here.

mod all_to_all;
mod gather;
mod reduce;
mod reduce_scatter;
mod scatter;
mod topology;

pub(crate) use all_to_all::CellLengths;
pub(crate) use topology::Topology;

use crate::call::Call;
use crate::element::Element;
use crate::monitor::GroupState;
use crate::shm::{Context, Heap, Node, Stop};
use crate::tcp::{Fabric, Team};

/// Shared memory with the ranks of this node, links to the others.
#[derive(Debug)]
pub(crate) struct Tiers {
    /// Absent where this rank is alone on its node.
    pub(crate) node: Option<Node>,
    pub(crate) fabric: Fabric,
    /// Buffers that the ranks of this node can reach directly.
    pub(crate) heap: Heap,
    pub(crate) topology: Topology,
    /// Groups and heap regions made from this group so far.
    pub(crate) children: u64,
}

impl Tiers {
    /// Records the call where other ranks can read it; returns whether ranks of other nodes have asked for it.
    #[inline]
    pub(crate) fn note(&mut self, call: &Call, sequence: u64, state: &GroupState) -> bool {
        if let Some(node) = &mut self.node {
            node.note(call, sequence);
        }
        self.topology.nodes.len() > 1 && state.note(*call, sequence)
    }

    fn one_node(&mut self) -> Option<&mut Node> {
        self.node.as_mut().filter(|_| self.topology.nodes.len() == 1)
    }

    fn is_alone(&self) -> bool {
        self.topology.nodes.len() == 1 && self.node.is_none()
    }

    /// A barrier of the node's ranks; nothing if this rank is alone there.
    fn node_round(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        self.node.as_mut().map_or(Ok(()), |node| node.round(cx, &[]))
    }

    pub(crate) fn barrier(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        self.node_round(cx)?;
        if self.topology.nodes.len() > 1 {
            if self.topology.place == 0 {
                let leaders: Vec<usize> = self.topology.nodes.iter().map(|node| node[0]).collect();
                Team::new(&mut self.fabric, &leaders).barrier(cx)?;
            }
            self.node_round(cx)?;
        }
        Ok(())
    }

    pub(crate) fn broadcast<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(data);
        let (home, place) = self.topology.locate(root);
        // Between nodes: from the root to the first rank of each other node.
        if self.topology.nodes.len() > 1 {
            let ends: Vec<usize> = (self.topology.nodes.iter().enumerate())
                .map(|(index, node)| if index == home { root } else { node[0] })
                .collect();
            if ends.contains(&self.fabric.me()) {
                Team::new(&mut self.fabric, &ends).broadcast(cx, data, home)?;
            }
        }
        let local_root = if self.topology.node == home { place } else { 0 };
        match &mut self.node {
            Some(node) => node.broadcast(cx, data, local_root, heap),
            None => Ok(()),
        }
    }
}
