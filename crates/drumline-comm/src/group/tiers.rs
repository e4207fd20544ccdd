//! The two tiers of a group, and how a collective uses both: reduce inside the node, exchange between nodes, share inside.
//!
//! ```text
//!   node A            node B           rail 0 joins the first ranks of all nodes, rail 1 the second ones, …
//!   [0] ──rail 0──── [2]               A rank works on the part of the data that belongs to its rail, so every byte
//!   [1] ──rail 1──── [3]               leaves a node once, and all ranks of a node send at the same time.
//! ```
//! A node with more ranks than the smallest one has some that are on no rail; they only take part inside.

use crate::call::Call;
use crate::element::Element;
use crate::monitor::Fate;
use crate::reduce::{ReduceOp, divide, reduce_alone};
use crate::shm::{Context, Heap, Keep, Node, Stop};
use crate::slices::{offsets, part};
use crate::tcp::{Mesh, Team};

/// Which ranks of a group are on which node. Ranks are counted in the group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Topology {
    /// The ranks of each node, in order.
    pub(crate) nodes: Vec<Vec<usize>>,
    /// This rank's node.
    pub(crate) node: usize,
    /// This rank's place there.
    pub(crate) place: usize,
}

impl Topology {
    /// Groups the ranks by `same_node`, in the order of each node's first rank.
    pub(crate) fn new(size: usize, me: usize, same_node: impl Fn(usize, usize) -> bool) -> Self {
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for rank in 0..size {
            match nodes.iter_mut().find(|node| same_node(node[0], rank)) {
                Some(node) => node.push(rank),
                None => nodes.push(vec![rank]),
            }
        }
        let (node, place) = locate(&nodes, me);
        Self { nodes, node, place }
    }

    /// Ranks that every node can give: the number of rails.
    fn rails(&self) -> usize {
        self.nodes.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// This rank's rail, if it is on one: one rank of each node.
    fn rail(&self) -> Option<Vec<usize>> {
        (self.place < self.rails()).then(|| self.nodes.iter().map(|node| node[self.place]).collect())
    }

    /// Whether all nodes have equally many ranks.
    fn is_even(&self) -> bool {
        self.nodes.iter().all(|node| node.len() == self.nodes[0].len())
    }

    /// Whether every rank is alone on its node.
    fn is_flat(&self) -> bool {
        self.nodes.iter().all(|node| node.len() == 1)
    }

    /// All ranks.
    fn everybody(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.nodes.iter().flatten().copied().collect();
        ranks.sort_unstable();
        ranks
    }
}

fn locate(nodes: &[Vec<usize>], rank: usize) -> (usize, usize) {
    for (index, node) in nodes.iter().enumerate() {
        if let Some(place) = node.iter().position(|&member| member == rank) {
            return (index, place);
        }
    }
    unreachable!("every rank of the group is on a node")
}

/// Shared memory with the ranks of this node, links to the others.
#[derive(Debug)]
pub(crate) struct Tiers {
    /// Absent where this rank is alone on its node.
    pub(crate) node: Option<Node>,
    pub(crate) mesh: Mesh,
    /// Buffers that the ranks of this node can reach directly.
    pub(crate) heap: Heap,
    pub(crate) topology: Topology,
    /// Groups and heap regions made from this group so far.
    pub(crate) children: u64,
}

impl Tiers {
    /// Notes the call where those who may ask for it can see it; says whether ranks of other nodes have asked.
    #[inline]
    pub(crate) fn note(&mut self, call: &Call, sequence: u64, fate: &Fate) -> bool {
        if let Some(node) = &mut self.node {
            node.note(call, sequence);
        }
        self.topology.nodes.len() > 1 && fate.note(*call, sequence)
    }

    fn one_node(&mut self) -> Option<&mut Node> {
        self.node.as_mut().filter(|_| self.topology.nodes.len() == 1)
    }

    fn is_alone(&self) -> bool {
        self.topology.nodes.len() == 1 && self.node.is_none()
    }

    /// A barrier of the node's ranks; on a lone rank nothing.
    fn node_round(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        self.node.as_mut().map_or(Ok(()), |node| node.round(cx, &[]))
    }

    pub(crate) fn barrier(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        self.node_round(cx)?;
        if self.topology.nodes.len() > 1 {
            if self.topology.place == 0 {
                let leaders: Vec<usize> = self.topology.nodes.iter().map(|node| node[0]).collect();
                Team::new(&mut self.mesh, &leaders).barrier(cx)?;
            }
            self.node_round(cx)?;
        }
        Ok(())
    }

    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(data);
        if let Some(node) = self.one_node() {
            return node.all_reduce(cx, data, op, Keep::All, heap);
        }
        if self.is_alone() {
            reduce_alone(data, op);
            return Ok(());
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.mesh, &everybody).all_reduce(cx, data, op);
        }
        if T::WIDENS {
            // Rounded once, after the last node.
            let mut wide: Vec<T::Wide> = data.iter().map(|x| x.widen()).collect();
            self.all_reduce(cx, &mut wide, op)?;
            data.iter_mut().zip(wide).for_each(|(x, wide)| *x = T::narrow(wide));
            return Ok(());
        }
        let (outer, rails) = (op.in_two_stages().1, self.topology.rails());
        self.reduce_inside(cx, data, op)?;
        if let Some(rail) = self.topology.rail() {
            let mine = part(data.len(), rails, self.topology.place, size_of::<T>());
            Team::new(&mut self.mesh, &rail).all_reduce(cx, &mut data[mine], outer)?;
        }
        if let Some(node) = &mut self.node {
            node.share_parts(cx, data, rails)?;
        }
        self.finish_average(data, op);
        Ok(())
    }

    pub(crate) fn reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Stop> {
        if let Some(node) = self.one_node() {
            return node.all_reduce(cx, data, op, Keep::Only(root), None);
        }
        if self.is_alone() {
            reduce_alone(data, op);
            return Ok(());
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.mesh, &everybody).reduce(cx, data, op, root);
        }
        self.reduce_by_rails(cx, data, op, root)
    }

    /// Reduces inside each node, then each rail towards the root's node, then collects the parts there.
    fn reduce_by_rails<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Stop> {
        if T::WIDENS {
            let mut wide: Vec<T::Wide> = data.iter().map(|x| x.widen()).collect();
            self.reduce_by_rails(cx, &mut wide, op, root)?;
            if self.mesh.me() == root {
                data.iter_mut().zip(wide).for_each(|(x, wide)| *x = T::narrow(wide));
            }
            return Ok(());
        }
        let (home, rails) = (locate(&self.topology.nodes, root).0, self.topology.rails());
        let mut work = data.to_vec();
        self.reduce_inside(cx, &mut work, op)?;
        if let Some(rail) = self.topology.rail() {
            let mine = part(work.len(), rails, self.topology.place, size_of::<T>());
            Team::new(&mut self.mesh, &rail).reduce(cx, &mut work[mine], op.in_two_stages().1, home)?;
        }
        if self.topology.node != home {
            return Ok(());
        }
        if let Some(node) = &mut self.node {
            node.share_parts(cx, &mut work, rails)?;
        }
        if self.mesh.me() == root {
            data.copy_from_slice(&work);
            self.finish_average(data, op);
        }
        Ok(())
    }

    /// The first stage of a reduction in two: this rank's part of `data` becomes the node's reduction.
    fn reduce_inside<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        // An average over nodes of averages is wrong when nodes differ in size: sum everywhere, divide once.
        let (inner, rails) = (op.in_two_stages().0, self.topology.rails());
        if let Some(node) = &mut self.node {
            return node.reduce_parts(cx, data, rails, inner);
        }
        reduce_alone(data, inner);
        Ok(())
    }

    fn finish_average<T: Element>(&self, data: &mut [T], op: ReduceOp) {
        if op == ReduceOp::Avg {
            divide(data, self.topology.nodes.iter().map(Vec::len).sum());
        }
    }

    pub(crate) fn broadcast<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(data);
        let (home, place) = locate(&self.topology.nodes, root);
        // Between nodes: from the root to the first rank of each other node.
        if self.topology.nodes.len() > 1 {
            let ends: Vec<usize> = (self.topology.nodes.iter().enumerate())
                .map(|(index, node)| if index == home { root } else { node[0] })
                .collect();
            if ends.contains(&self.mesh.me()) {
                Team::new(&mut self.mesh, &ends).broadcast(cx, data, home)?;
            }
        }
        let local_root = if self.topology.node == home { place } else { 0 };
        match &mut self.node {
            Some(node) => node.broadcast(cx, data, local_root, heap),
            None => Ok(()),
        }
    }

    pub(crate) fn gather_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let heap = self.heap.find(input);
        if let Some(node) = self.one_node() {
            return node.gather(cx, input, Some(output), counts, None, heap);
        }
        let even = self.topology.is_even() && counts.iter().all(|&count| count == counts[0]);
        if self.node.is_some() && even {
            return self.gather_all_by_rails(cx, input, output);
        }
        let everybody = self.topology.everybody();
        Team::new(&mut self.mesh, &everybody).gather_all(cx, input, output, counts)
    }

    /// Each rank collects the inputs of its rail over links, then the ranks of a node share what they collected.
    fn gather_all_by_rails<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), Stop> {
        let (count, nodes) = (input.len(), self.topology.nodes.len());
        let rail = self.topology.rail().expect("nodes of equal size have every rank on a rail");
        let mut column = vec![T::zeroed(); count * nodes];
        Team::new(&mut self.mesh, &rail).gather_all(cx, input, &mut column, &vec![count; nodes])?;
        let node = self.node.as_mut().expect("checked by the caller");
        let mut columns = vec![T::zeroed(); column.len() * node.ranks()];
        node.gather(cx, &column, Some(&mut columns), &vec![column.len(); node.ranks()], None, None)?;
        for (place, column) in columns.chunks(column.len().max(1)).enumerate() {
            for (ranks, cell) in self.topology.nodes.iter().zip(column.chunks(count.max(1))) {
                output[ranks[place] * count..][..count].copy_from_slice(cell);
            }
        }
        Ok(())
    }

    pub(crate) fn gather<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<(), Stop> {
        if let Some(node) = self.one_node() {
            let output = output.filter(|_| node.me() == root);
            return node.gather(cx, input, output, counts, Some(root), None);
        }
        let everybody = self.topology.everybody();
        Team::new(&mut self.mesh, &everybody).gather(cx, input, output, counts, root)
    }

    pub(crate) fn scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        if let Some(node) = self.one_node() {
            return node.scatter(cx, input, output, root);
        }
        let everybody = self.topology.everybody();
        Team::new(&mut self.mesh, &everybody).scatter(cx, input, output, root)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(input);
        if let Some(node) = self.one_node() {
            return node.reduce_scatter(cx, input, output, counts, op, heap);
        }
        if !self.topology.is_flat() {
            // Ranks of one node want different parts, so the whole must cross between nodes once in any case.
            let mut work = input.to_vec();
            self.all_reduce(cx, &mut work, op)?;
            let start = offsets(counts)[self.mesh.me()];
            output.copy_from_slice(&work[start..][..output.len()]);
            return Ok(());
        }
        let everybody = self.topology.everybody();
        Team::new(&mut self.mesh, &everybody).reduce_scatter(cx, input, output, counts, op)
    }

    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        (input, sends): (&[T], &[usize]),
        (output, receives): (&mut [T], &[usize]),
        evenness: Evenness,
    ) -> Result<(), Stop> {
        if let Some(node) = self.one_node() {
            let longest = match evenness {
                Evenness::Equal => sends[0],
                Evenness::Lists => longest_cell(node, cx, sends, receives)?,
            };
            return node.all_to_all(cx, (input, sends), (output, receives), longest);
        }
        let everybody = self.topology.everybody();
        Team::new(&mut self.mesh, &everybody).all_to_all(cx, (input, sends), (output, receives))
    }
}

/// What the ranks know of the cells of an all-to-all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Evenness {
    /// All cells of all ranks are equally long; the fingerprint says so.
    Equal,
    /// Each rank knows its own lists.
    Lists,
}

/// Compares everybody's lists and returns the longest cell.
fn longest_cell(
    node: &mut Node,
    cx: &Context<'_>,
    sends: &[usize],
    receives: &[usize],
) -> Result<usize, Stop> {
    let mine: Vec<u64> = sends.iter().map(|&count| count as u64).collect();
    let mut all = vec![0u64; mine.len() * mine.len()];
    node.gather(cx, &mine, Some(&mut all), &vec![mine.len(); mine.len()], None, None)?;
    for (peer, (row, &expected)) in all.chunks(mine.len()).zip(receives).enumerate() {
        let given = row[node.me()];
        if given != expected as u64 {
            let cause = format!("it sends {given} elements to this rank, which expects {expected}");
            return Err(Stop::Link { peer: node.members()[peer], cause });
        }
    }
    Ok(all.into_iter().max().unwrap_or(0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(nodes: &[usize], me: usize) -> Topology {
        Topology::new(nodes.len(), me, |a, b| nodes[a] == nodes[b])
    }

    #[test]
    fn ranks_are_grouped_by_node_and_joined_by_rails() {
        let topology = topology(&[7, 8, 7, 8, 8], 3);
        assert_eq!(topology.nodes, [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!((topology.node, topology.place), (1, 1));
        assert_eq!(topology.rail(), Some(vec![2, 3]));
        assert!(!topology.is_even());
        assert_eq!(topology.everybody(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_surplus_rank_is_on_no_rail() {
        assert_eq!(topology(&[7, 8, 7, 8, 8], 4).rail(), None);
    }
}
