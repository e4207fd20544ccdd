//! Which ranks are on which node, and the rails that connect the nodes. Plain numbers, the same on all ranks.
//!
//! ```text
//!   node A            node B           rail 0 connects the first ranks of all nodes, rail 1 the second ones, …
//!   [0] ──rail 0──── [2]               A rank works on the part of the data that belongs to its rail, so every byte
//!   [1] ──rail 1──── [3]               leaves a node once, and all ranks of a node send at the same time.
//!                    [4]
//! ```
//! A node with more ranks than the smallest node has ranks that are on no rail; they take part only inside the node.

/// Which ranks of a group are on which node. Ranks are counted in the group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Topology {
    /// The ranks of each node, in order.
    pub(crate) nodes: Vec<Vec<usize>>,
    /// This rank's node.
    pub(crate) node: usize,
    /// This rank's index there.
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

    /// The number of ranks.
    pub(super) fn num_ranks(&self) -> usize {
        self.nodes.iter().map(Vec::len).sum()
    }

    /// The number of rails: as many ranks as every node has.
    pub(super) fn rails(&self) -> usize {
        self.nodes.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// This rank's rail, if it is on one: one rank of each node.
    pub(super) fn rail(&self) -> Option<Vec<usize>> {
        (self.place < self.rails()).then(|| self.nodes.iter().map(|node| node[self.place]).collect())
    }

    /// Whether every rank is alone on its node.
    pub(super) fn is_flat(&self) -> bool {
        self.nodes.iter().all(|node| node.len() == 1)
    }

    /// The ranks of this rank's node.
    pub(super) fn here(&self) -> &[usize] {
        &self.nodes[self.node]
    }

    /// The ranks of `node` that rail `rail` serves. Every rank is served by one rail, also a rank that is on none.
    pub(super) fn served(&self, node: usize, rail: usize) -> impl Iterator<Item = usize> + '_ {
        self.nodes[node].iter().copied().skip(rail).step_by(self.rails())
    }

    /// A rank's node, and its index there.
    pub(super) fn locate(&self, rank: usize) -> (usize, usize) {
        locate(&self.nodes, rank)
    }

    /// All ranks.
    pub(super) fn everybody(&self) -> Vec<usize> {
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
        assert_eq!(topology.everybody(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn every_rank_is_served_by_one_rail() {
        let topology = topology(&[7, 8, 7, 8, 8, 8], 0);
        let served = |node, rail| topology.served(node, rail).collect::<Vec<_>>();
        assert_eq!((served(0, 0), served(0, 1)), (vec![0], vec![2]));
        assert_eq!((served(1, 0), served(1, 1)), (vec![1, 4], vec![3, 5]));
    }

    #[test]
    fn a_surplus_rank_is_on_no_rail() {
        assert_eq!(topology(&[7, 8, 7, 8, 8], 4).rail(), None);
    }
}
