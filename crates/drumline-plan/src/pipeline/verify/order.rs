//! Two ranks list their messages in the same order: where one sends, the other receives.
//!
//! NCCL needs this, and every transport in which messages of a pair pass in order. Each row alone has exactly the messages that
//! it needs (`rows`), so two lists of a pair have the same messages, and can differ in their order only.

use super::super::program::{Place, Program};
use super::VerifyError;

pub(super) fn check(program: &Program) -> Result<(), VerifyError> {
    // Of each rank, its messages with each peer. A rank has few peers: its neighbours.
    let lists: Vec<_> = (0..program.rows.len()).map(|rank| messages(program, rank)).collect();
    for (rank, list) in lists.iter().enumerate() {
        for (peer, ours) in list.iter().filter(|(peer, _)| *peer > rank) {
            let theirs =
                lists[*peer].iter().find(|(of, _)| *of == rank).map_or(&[][..], |(_, theirs)| theirs);
            let differ = |(first, second): &(&Place, &Place)| first.action.mirrored() != Some(second.action);
            if let Some((&first, &second)) = ours.iter().zip(theirs).find(differ) {
                return Err(VerifyError::Order(Box::new([first, second])));
            }
        }
    }
    Ok(())
}

/// The peers of a rank, and its messages with each.
fn messages(program: &Program, rank: usize) -> Vec<(usize, Vec<Place>)> {
    let mut lists: Vec<(usize, Vec<Place>)> = Vec::new();
    for (position, &action) in program.rows[rank].iter().enumerate() {
        let Some(peer) = program.peer_of(&action) else { continue };
        let place = Place { rank, position, action };
        match lists.iter_mut().find(|(of, _)| *of == peer) {
            Some((_, list)) => list.push(place),
            None => lists.push((peer, vec![place])),
        }
    }
    lists
}
