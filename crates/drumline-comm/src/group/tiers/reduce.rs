//! All-reduce and reduce: inside each node first, then along the rails, then shared inside.
//!
//! Inside a node the inputs are combined in rank order, along a rail in the order of nodes. This is the same on all ranks.

use super::Tiers;
use crate::element::Element;
use crate::reduce::{ReduceOp, divide, reduce_alone};
use crate::shm::{Context, Keep, Reduction, Stop};
use crate::slices::part;
use crate::tcp::Team;

impl Tiers {
    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let heap = self.heap.find(data);
        if let Some(node) = self.one_node() {
            return node.all_reduce(cx, data, Reduction { op, keep: Keep::All }, heap);
        }
        if self.is_alone() {
            reduce_alone(data, op);
            return Ok(());
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.fabric, &everybody).all_reduce(cx, data, op);
        }
        if T::WIDENS {
            // Rounded once, after the last node.
            let mut wide: Vec<T::Wide> = data.iter().map(|x| x.widen()).collect();
            self.all_reduce(cx, &mut wide, op)?;
            data.iter_mut().zip(wide).for_each(|(x, wide)| *x = T::narrow(wide));
            return Ok(());
        }
        let (outer, rails) = (op.in_two_stages().1, self.topology.rails());
        self.reduce_in_node(cx, data, op)?;
        if let Some(rail) = self.topology.rail() {
            let mine = part(data.len(), rails, self.topology.place, size_of::<T>());
            Team::new(&mut self.fabric, &rail).all_reduce(cx, &mut data[mine], outer)?;
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
            return node.all_reduce(cx, data, Reduction { op, keep: Keep::Only(root) }, None);
        }
        if self.is_alone() {
            reduce_alone(data, op);
            return Ok(());
        }
        if self.topology.is_flat() {
            let everybody = self.topology.everybody();
            return Team::new(&mut self.fabric, &everybody).reduce(cx, data, op, root);
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
            if self.fabric.me() == root {
                data.iter_mut().zip(wide).for_each(|(x, wide)| *x = T::narrow(wide));
            }
            return Ok(());
        }
        let (home, rails) = (self.topology.locate(root).0, self.topology.rails());
        let mut work = data.to_vec();
        self.reduce_in_node(cx, &mut work, op)?;
        if let Some(rail) = self.topology.rail() {
            let mine = part(work.len(), rails, self.topology.place, size_of::<T>());
            Team::new(&mut self.fabric, &rail).reduce(cx, &mut work[mine], op.in_two_stages().1, home)?;
        }
        if self.topology.node != home {
            return Ok(());
        }
        if let Some(node) = &mut self.node {
            node.share_parts(cx, &mut work, rails)?;
        }
        if self.fabric.me() == root {
            data.copy_from_slice(&work);
            self.finish_average(data, op);
        }
        Ok(())
    }

    /// The first of two stages: this rank's part of `data` becomes the node's reduction.
    fn reduce_in_node<T: Element>(
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

    /// Divides sums over all ranks by their number, if `op` is an average.
    pub(super) fn finish_average<T: Element>(&self, data: &mut [T], op: ReduceOp) {
        if op == ReduceOp::Avg {
            divide(data, self.topology.nodes.iter().map(Vec::len).sum());
        }
    }
}
