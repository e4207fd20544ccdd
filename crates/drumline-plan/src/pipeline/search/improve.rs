//! Local search: one computation of a rank moves to another place in its row, and the program stays if it has become no worse.
//!
//! A backward is divided into its halves first, so that weight gradients can move. A little worse is accepted at the beginning, and
//! less and less later: simulated annealing.

use super::super::action::{Action, Compute, Work};
use super::{Candidate, Random, Search};

/// The farthest that a computation moves.
const REACH: usize = 6;
/// How much worse a change may be at first, as a part of the makespan.
const HEAT: f64 = 0.02;

/// The best program that changes lead to.
pub(super) fn improve(search: &Search, start: Candidate) -> Candidate {
    let mut random = Random(search.seed);
    let mut best = start;
    let mut current = search
        .candidate(halves(&best))
        .filter(|halves| !best.is_better(halves))
        .unwrap_or_else(|| best.clone());
    for number in 0..search.changes {
        let heat = HEAT * (1.0 - number as f64 / search.changes as f64);
        let Some(next) = search.candidate(moved(&current, &mut random)) else { continue };
        let tolerated = heat * random.below(1000) as f64 / 1000.0;
        if next.is_better(&current) || next.makespan <= current.makespan * (1.0 + tolerated) {
            current = next;
        }
        if current.is_better(&best) {
            best = current.clone();
        }
    }
    best
}

/// The computations, with each backward as its halves.
fn halves(candidate: &Candidate) -> Vec<Vec<Action>> {
    let divided = |work: Work| {
        match work.compute {
            Compute::Backward => [Some(Compute::Input), Some(Compute::Weight)],
            compute => [Some(compute), None],
        }
        .map(|compute| compute.map(|compute| Action::Compute(Work { compute, ..work })))
    };
    let row = |row: &Vec<Action>| {
        row.iter().flat_map(|action| action.works()).flat_map(divided).flatten().collect()
    };
    candidate.program.rows.iter().map(row).collect()
}

/// The computations, with one of them in another place.
fn moved(candidate: &Candidate, random: &mut Random) -> Vec<Vec<Action>> {
    let is_computed = |action: &&Action| action.works().next().is_some();
    let row = |row: &Vec<Action>| row.iter().filter(is_computed).copied().collect();
    let mut rows: Vec<Vec<Action>> = candidate.program.rows.iter().map(row).collect();
    let rank = random.below(rows.len());
    let row = &mut rows[rank];
    let from = random.below(row.len());
    let action = row.remove(from);
    let to = (from + random.below(2 * REACH + 1)).saturating_sub(REACH).min(row.len());
    row.insert(to, action);
    rows
}
