//! Gather and all-gather.
//!
//! A gather sends every cell to the root. In an all-gather the inputs of a node are its **block**: its ranks collect the
//! block in shared memory, each rail carries an equal part of it to all other nodes, whatever the lengths of the inputs, and
//! the ranks there share the parts.

use super::Tiers;
use crate::element::Element;
use crate::shm::{Context, Input, Keep, Stop};
use crate::slices::{Selection, cells, part};
use crate::tcp::Team;

impl Tiers {
    /// Every rank's `input`, end to end in rank order, in every rank's `output`.
    pub(crate) fn gather_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let heap = self.heap.find(input);
        if let Some(node) = self.one_node() {
            return node.gather(cx, Input { data: input, heap }, Some(output), counts, Keep::All);
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.fabric, &everybody).gather_all(cx, input, output, counts);
        }
        let blocks = Selection::new(counts, self.topology.nodes.iter().flatten().copied());
        blocks.fill(output, |blocks| self.gather_blocks(cx, Input { data: input, heap }, blocks, counts))
    }

    /// Part `i` of `data`, which has equal parts, becomes rank `i`'s, on every rank.
    pub(crate) fn gather_all_in_place<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
    ) -> Result<(), Stop> {
        let (size, me) = (self.topology.num_ranks(), self.fabric.me());
        let count = data.len() / size;
        let heap = self.heap.find(data);
        if let Some(node) = self.one_node() {
            return node.gather_in_place(cx, data, heap);
        }
        let own = data[me * count..][..count].to_vec();
        self.gather_all(cx, &own, data, &vec![count; size])
    }

    /// Fills the blocks of all nodes, which lie end to end.
    fn gather_blocks<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Input<'_, T>,
        blocks: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let (here, rails, place) = (self.topology.node, self.topology.rails(), self.topology.place);
        let lens = self.topology.nodes.iter().map(|ranks| ranks.iter().map(|&rank| counts[rank]).sum());
        let mut blocks: Vec<&mut [T]> = cells(blocks, lens).collect();
        let local: Vec<usize> = self.topology.here().iter().map(|&rank| counts[rank]).collect();
        match &mut self.node {
            Some(node) => node.gather(cx, input, Some(&mut *blocks[here]), &local, Keep::All)?,
            None => blocks[here].copy_from_slice(input.data),
        }
        if let Some(rail) = self.topology.rail() {
            let (mut own, mut takes): (&[T], _) = (&[], Vec::new());
            for (node, block) in blocks.iter_mut().enumerate() {
                let mine = part(block.len(), rails, place, size_of::<T>());
                let mine = &mut block[mine];
                if node == here {
                    own = mine;
                } else {
                    takes.push((node, mine));
                }
            }
            let gives: Vec<_> = takes.iter().map(|&(node, _)| (node, own)).collect();
            Team::new(&mut self.fabric, &rail).exchange(cx, gives, takes)?;
        }
        let Some(node) = &mut self.node else { return Ok(()) };
        let away = blocks.into_iter().enumerate().filter(|(node, _)| *node != here);
        away.map(|(_, block)| block).try_for_each(|block| node.share_parts(cx, block, rails))
    }

    /// Every rank's `input`, end to end in rank order, in the root's `output`.
    pub(crate) fn gather<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<(), Stop> {
        let output = output.filter(|_| self.fabric.me() == root);
        if let Some(node) = self.one_node() {
            return node.gather(cx, Input::private(input), output, counts, Keep::Only(root));
        }
        let everybody = self.topology.everybody();
        let (home, place) = self.topology.locate(root);
        if self.topology.node != home {
            return Team::new(&mut self.fabric, &everybody).exchange(cx, [(root, input)], []);
        }
        let here = self.topology.here();
        let local: Vec<usize> = here.iter().map(|&rank| counts[rank]).collect();
        let Some(output) = output else {
            let node = self.node.as_mut().expect("a rank alone on the root's node is the root");
            return node.gather(cx, Input::private(input), None, &local, Keep::Only(place));
        };
        Selection::new(counts, here.iter().copied()).fill(output, |output| match &mut self.node {
            Some(node) => node.gather(cx, Input::private(input), Some(output), &local, Keep::Only(place)),
            None => {
                output.copy_from_slice(input);
                Ok(())
            }
        })?;
        let takes = cells(output, counts.iter().copied()).enumerate();
        let takes = takes.filter(|(rank, _)| !here.contains(rank));
        Team::new(&mut self.fabric, &everybody).exchange(cx, [], takes)
    }
}
