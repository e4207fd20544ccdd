//! Scatter: the root deals out to its node through shared memory, to all others over its links.

use super::Tiers;
use crate::element::Element;
use crate::shm::{Context, Stop};
use crate::slices::Selection;
use crate::tcp::Team;

impl Tiers {
    /// Cell `i` of the root's `input` becomes rank `i`'s `output`.
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
        let (home, place) = self.topology.locate(root);
        let input = input.filter(|_| self.mesh.me() == root);
        if self.topology.node != home {
            return Team::new(&mut self.mesh, &everybody).exchange(cx, [], [(root, output)]);
        }
        let (here, count) = (self.topology.here(), output.len());
        if let Some(input) = input {
            let away = everybody.iter().copied().filter(|rank| !here.contains(rank));
            let gives = away.map(|rank| (rank, &input[rank * count..][..count]));
            Team::new(&mut self.mesh, &everybody).exchange(cx, gives, [])?;
        }
        let counts = vec![count; everybody.len()];
        let local = input.map(|input| Selection::new(&counts, here.iter().copied()).pick(input));
        match (&mut self.node, local) {
            (Some(node), local) => node.scatter(cx, local.as_deref(), output, place),
            (None, Some(local)) => {
                output.copy_from_slice(&local);
                Ok(())
            }
            (None, None) => unreachable!("a rank alone on the root's node is the root"),
        }
    }
}
