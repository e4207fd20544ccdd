//! The fuzzer's view of messages: any bytes as what other ranks send, in pieces of any size, to any receives.
#![allow(unreachable_pub, missing_docs)]

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::router::Router;
use super::trickle::Trickle;
use super::{P2p, Slot, Source};
use crate::shm::Watch;

const RANKS: usize = 3;

/// The first bytes choose the receives and how the streams are cut; the rest is what two ranks send.
pub fn messages(bytes: &[u8]) {
    let Some((plan, sent)) = bytes.split_at_checked(24) else { return };
    let mut streams = Trickle::new(RANKS);
    let (one, two) = sent.split_at(sent.len() * usize::from(plan[0]) / 255);
    (streams.from[1], streams.from[2]) = (one.iter().copied().collect(), two.iter().copied().collect());
    streams.pieces = plan[1..8].iter().map(|&piece| usize::from(piece)).collect::<VecDeque<_>>();
    let mut post = Router::over(streams, 0, RANKS);
    let (given_up, left) = (AtomicBool::new(false), [const { AtomicBool::new(false) }; RANKS]);
    let watch = Watch { given_up: &given_up, left: &left, board: None, timeout: Duration::from_secs(1) };
    for receives in plan[8..].chunks(4) {
        if receive(&mut post, &watch, receives).is_err() {
            break;
        }
        // Only bytes that were sent are kept: an announced length takes no memory.
        assert!(post.num_kept() <= sent.len(), "{} kept of {}", post.num_kept(), sent.len());
    }
}

/// Two receives at once; an error if the router accepts no more.
fn receive(post: &mut Router<Trickle>, watch: &Watch<'_>, receives: &[u8]) -> Result<(), ()> {
    let source = |byte: u8| match byte % 4 {
        3 => Source::Any,
        rank => Source::Rank(usize::from(rank)),
    };
    let [first, second, short, long] = receives else { return Err(()) };
    let (mut one, mut two) = (vec![0u8; usize::from(*short)], vec![0u32; usize::from(*long)]);
    let mut slots = [
        Slot::from(P2p::recv(&mut one, source(*first), u64::from(first >> 4))),
        Slot::from(P2p::recv(&mut two, source(*second), u64::from(second >> 4))),
    ];
    // Like a program that waits for both, or fails.
    post.drive(&mut slots, watch, |slots| slots.iter().all(|slot| slot.done.is_some())).map_err(drop)
}
