//! Scatter: the root sends to the ranks of its node through shared memory, to all others over its links.

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
        let (here, everybody) = (self.topology.here(), self.topology.everybody());
        let (home, place) = self.topology.locate(root);
        let mut team = Team::new(&mut self.fabric, &everybody);
        if self.topology.node != home {
            return team.exchange(cx, [], [(root, output)]);
        }
        let Some(input) = input.filter(|_| here[self.topology.place] == root) else {
            let node = self.node.as_mut().expect("a rank alone on the root's node is the root");
            return node.scatter(cx, None, output, place);
        };
        let count = output.len();
        let away = everybody.iter().copied().filter(|rank| !here.contains(rank));
        let step = team.begin(cx, away.map(|rank| (rank, &input[rank * count..][..count])))?;
        let local = Selection::new(&vec![count; everybody.len()], here.iter().copied()).pick(input);
        match &mut self.node {
            Some(node) => node.scatter(cx, Some(&local), output, place)?,
            None => output.copy_from_slice(&local),
        }
        step.finish::<T>([])
    }
}
