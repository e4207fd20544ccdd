//! All-to-all: ranks of one node pass their cells through shared memory, all other pairs over their links, at the same time.

use super::Tiers;
use crate::element::Element;
use crate::shm::{Context, Input, Keep, Node, Stop};
use crate::slices::{Cells, CellsMut, Selection, cells, offsets};
use crate::tcp::Team;

impl Tiers {
    /// Cell `i` of `input` goes to rank `i`; cell `i` of `output` comes from it.
    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        sends: Cells<'_, T>,
        receives: CellsMut<'_, T>,
        lengths: CellLengths,
    ) -> Result<(), Stop> {
        if let Some(node) = self.one_node() {
            return all_to_all_in_node(node, cx, sends, receives, lengths);
        }
        let Cells { data: input, counts: sends } = sends;
        let CellsMut { data: output, counts: receives } = receives;
        let (here, everybody) = (self.topology.here(), self.topology.everybody());
        let is_away = |rank: &usize| !here.contains(rank);
        let starts = offsets(sends);
        let gives = everybody.iter().copied().filter(is_away);
        let gives = gives.map(|rank| (rank, &input[starts[rank]..][..sends[rank]]));
        let mut team = Team::new(&mut self.fabric, &everybody);
        let step = team.begin(cx, gives)?;
        let of_here = |counts: &[usize]| here.iter().map(|&rank| counts[rank]).collect::<Vec<_>>();
        let input = Selection::new(sends, here.iter().copied()).pick(input);
        Selection::new(receives, here.iter().copied()).fill(output, |output| match &mut self.node {
            Some(node) => {
                let (sends, receives) = (of_here(sends), of_here(receives));
                let sends = Cells { data: &input, counts: &sends };
                let receives = CellsMut { data: output, counts: &receives };
                all_to_all_in_node(node, cx, sends, receives, lengths)
            }
            None => {
                output.copy_from_slice(&input);
                Ok(())
            }
        })?;
        let takes = cells(output, receives.iter().copied()).enumerate();
        step.finish(takes.filter(|(rank, _)| is_away(rank)))
    }

    /// Compares the counts of all ranks, without moving the cells.
    pub(crate) fn compare_cells(
        &mut self,
        cx: &Context<'_>,
        sends: &[usize],
        receives: &[usize],
    ) -> Result<(), Stop> {
        let (me, mine) = (self.fabric.me(), numbers(sends));
        let mut all = vec![0u64; mine.len() * mine.len()];
        self.gather_all(cx, &mine, &mut all, &vec![mine.len(); mine.len()])?;
        check_counts(&all, me, receives, |peer| peer)
    }
}

/// All-to-all among the ranks of a node.
fn all_to_all_in_node<T: Element>(
    node: &mut Node,
    cx: &Context<'_>,
    sends: Cells<'_, T>,
    receives: CellsMut<'_, T>,
    lengths: CellLengths,
) -> Result<(), Stop> {
    let longest = match lengths {
        CellLengths::Equal => sends.counts[0],
        CellLengths::PerRank => longest_cell(node, cx, sends.counts, receives.counts)?,
    };
    node.all_to_all(cx, sends, receives, longest)
}

/// What the ranks know about the lengths of the cells of an all-to-all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CellLengths {
    /// All cells of all ranks are equally long; the fingerprint says so.
    Equal,
    /// Each rank knows only its own counts.
    PerRank,
}

/// Compares the counts of all ranks and returns the length of the longest cell.
fn longest_cell(
    node: &mut Node,
    cx: &Context<'_>,
    sends: &[usize],
    receives: &[usize],
) -> Result<usize, Stop> {
    let mine = numbers(sends);
    let mut all = vec![0u64; mine.len() * mine.len()];
    node.gather(cx, Input::private(&mine), Some(&mut all), &vec![mine.len(); mine.len()], Keep::All)?;
    check_counts(&all, node.me(), receives, |peer| node.members()[peer])?;
    Ok(all.into_iter().max().unwrap_or(0) as usize)
}

fn numbers(counts: &[usize]) -> Vec<u64> {
    counts.iter().map(|&count| count as u64).collect()
}

/// An error unless the others send what rank `me` expects. `all` are their counts; `rank_of` maps an index to a rank.
fn check_counts(
    all: &[u64],
    me: usize,
    receives: &[usize],
    rank_of: impl Fn(usize) -> usize,
) -> Result<(), Stop> {
    for (peer, (row, &expected)) in all.chunks(receives.len()).zip(receives).enumerate() {
        let given = row[me];
        if given != expected as u64 {
            let cause = format!("it sends {given} elements to this rank, which expects {expected}");
            return Err(Stop::Link { peer: rank_of(peer), cause });
        }
    }
    Ok(())
}
