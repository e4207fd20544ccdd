//! Reduce-scatter between nodes.
//!
//! ```text
//!            rail 0                rail 1            A rail serves the ranks with its index on each node; its column is
//!   [ for 0 | for 2 | for 4 ] [ for 1 | for 3 ]      the data for them. Each rank reduces its rail's column over its
//!                                                    node, then each cell over the nodes along the rail. Then the cell
//!   node A: 0 1    node B: 2 3 4                     is on its rank, or one step through shared memory away.
//! ```
//! So only sums leave a node, each for the node that needs it. Order: ranks inside a node, then nodes, as in all-reduce.

use super::Tiers;
use crate::element::Element;
use crate::reduce::{ReduceOp, reduce_alone};
use crate::shm::{Context, Input, Stop};
use crate::slices::{Cells, CellsMut, Selection};
use crate::tcp::Team;

impl Tiers {
    /// Cell `i` of the reduction of all ranks' `input` becomes rank `i`'s `output`.
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
            return node.reduce_scatter(cx, Input { data: input, heap }, output, counts, op);
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.fabric, &everybody).reduce_scatter(cx, input, output, counts, op);
        }
        if T::WIDENS {
            // Rounded once, after the last node.
            let wide: Vec<T::Wide> = input.iter().map(|x| x.widen()).collect();
            let mut sums = vec![T::zeroed().widen(); output.len()];
            self.reduce_scatter_by_rails(cx, &wide, &mut sums, counts, op)?;
            output.iter_mut().zip(sums).for_each(|(x, sum)| *x = T::narrow(sum));
            return Ok(());
        }
        self.reduce_scatter_by_rails(cx, input, output, counts, op)
    }

    /// This rank's part of `data`, which has equal parts, becomes that of the reduction.
    pub(crate) fn reduce_scatter_in_place<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(data);
        if let Some(node) = self.one_node() {
            return node.reduce_scatter_in_place(cx, data, heap, op);
        }
        let (size, me) = (self.topology.num_ranks(), self.fabric.me());
        let count = data.len() / size;
        let mut own = vec![T::zeroed(); count];
        self.reduce_scatter(cx, data, &mut own, &vec![count; size], op)?;
        data[me * count..][..count].copy_from_slice(&own);
        Ok(())
    }

    fn reduce_scatter_by_rails<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let column = self.reduce_column(cx, input, counts, op.in_two_stages().0)?;
        let mut sums = Vec::new();
        if let Some(rail) = self.topology.rail() {
            let served =
                |node| self.topology.served(node, self.topology.place).map(|rank| counts[rank]).sum();
            let lens: Vec<usize> = (0..rail.len()).map(served).collect();
            sums = vec![T::zeroed(); lens[self.topology.node]];
            let mut team = Team::new(&mut self.fabric, &rail);
            team.reduce_scatter(cx, &column, &mut sums, &lens, op.in_two_stages().1)?;
        }
        self.hand_over(cx, &sums, output, counts)?;
        self.finish_average(output, op);
        Ok(())
    }

    /// The node's reduction of this rank's rail's column; empty on a rank that is on no rail.
    fn reduce_column<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Vec<T>, Stop> {
        let (topology, rails) = (&self.topology, self.topology.rails());
        let column = |rail| (0..topology.nodes.len()).flat_map(move |node| topology.served(node, rail));
        let columns = Selection::new(counts, (0..rails).flat_map(column)).pick(input);
        let Some(node) = &mut self.node else {
            let mut alone = columns.into_owned();
            reduce_alone(&mut alone, op);
            return Ok(alone);
        };
        let mut lens: Vec<usize> =
            (0..rails).map(|rail| column(rail).map(|rank| counts[rank]).sum()).collect();
        lens.resize(node.ranks(), 0);
        let mut mine = vec![T::zeroed(); lens[node.me()]];
        node.reduce_scatter(cx, Input::private(&columns), &mut mine, &lens, op)?;
        Ok(mine)
    }

    /// Passes the cells on to the ranks that the rails of this node serve.
    fn hand_over<T: Element>(
        &mut self,
        cx: &Context<'_>,
        sums: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let (topology, rails) = (&self.topology, self.topology.rails());
        let (here, place) = (topology.here(), topology.place);
        if here.len() == rails {
            output.copy_from_slice(sums);
            return Ok(());
        }
        let node = self.node.as_mut().expect("a node with more ranks than rails has several");
        let sends: Vec<usize> =
            (0..here.len()).map(|to| if to % rails == place { counts[here[to]] } else { 0 }).collect();
        let mut receives = vec![0; here.len()];
        receives[place % rails] = output.len();
        let longest = here.iter().map(|&rank| counts[rank]).max().unwrap_or(0);
        let sends = Cells { data: sums, counts: &sends };
        node.all_to_all(cx, sends, CellsMut { data: output, counts: &receives }, longest)
    }
}
