//! Messages in pieces, messages without a receive, and messages of a group that was given up.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::router::Router;
use super::slot::{Halt, Slot};
use super::trickle::Trickle;
use super::{P2p, Source};
use crate::process::{GroupOptions, Transport};
use crate::shm::{Stop, Watch};
use crate::tcp::frame::MailHeader;
use crate::{CommError, LocalGroup, ProcessGroup};

const BOTH: [Transport; 2] = [Transport::Shm, Transport::Tcp];

/// A message from rank 1 or 2: sender, tag, elements.
type Sent = (usize, u64, usize);

fn stream(sent: &[Sent], rank: usize) -> VecDeque<u8> {
    let mut bytes = VecDeque::new();
    for (index, &(from, tag, elements)) in sent.iter().enumerate().filter(|(_, sent)| sent.0 == rank) {
        let header = MailHeader { dtype: crate::DType::U8, tag, elements: elements as u64 };
        debug_assert_eq!(from, rank);
        bytes.extend(header.encode());
        bytes.extend(vec![index as u8; elements]);
    }
    bytes
}

proptest! {
    /// However the streams are cut, and in whatever order receives are made, each gets its own message whole.
    #[test]
    fn every_message_finds_its_receive(
        sent in prop::collection::vec((1usize..3, 0u64..3, 0usize..200), 1..12),
        pieces in prop::collection::vec(0usize..90, 0..60),
        order in any::<u64>(),
    ) {
        let mut streams = Trickle::new(3);
        (streams.from[1], streams.from[2]) = (stream(&sent, 1), stream(&sent, 2));
        streams.pieces = pieces.into();
        let mut post = Router::over(streams, 0, 3);
        let (given_up, left) = (AtomicBool::new(false), [const { AtomicBool::new(false) }; 3]);
        let watch = Watch { given_up: &given_up, left: &left, board: None, timeout: Duration::from_secs(5) };
        // Receives of one sender and tag in the order sent, all else in any order.
        let mut turns: Vec<usize> = (0..sent.len()).collect();
        turns.sort_by_key(|&index| (sent[index].0 * 3 + sent[index].1 as usize).wrapping_mul(order as usize | 1) % 7);
        for index in turns {
            let (from, tag, elements) = sent[index];
            let mut data = vec![0u8; elements];
            let mut slots = [Slot::from(P2p::recv(&mut data, Source::Rank(from), tag))];
            let outcome = post.drive(&mut slots, &watch, |slots| slots[0].done.is_some());
            prop_assert!(outcome.is_ok(), "{:?}", outcome);
            prop_assert_eq!(slots[0].done, Some(from));
            prop_assert!(data.iter().all(|&byte| byte == index as u8));
        }
        prop_assert!(post.waiting.is_empty());
    }
}

/// Receives `len` bytes with a tag, checks that all are `expected`, and returns the sender.
fn receive(
    post: &mut Router<Trickle>,
    (from, tag, len): (Source, u64, usize),
    expected: u8,
) -> Result<usize, Halt> {
    let (given_up, left) = (AtomicBool::new(false), [const { AtomicBool::new(false) }; 3]);
    let watch = Watch { given_up: &given_up, left: &left, board: None, timeout: Duration::from_secs(5) };
    let mut data = vec![0u8; len];
    let mut slots = [Slot::from(P2p::recv(&mut data, from, tag))];
    post.drive(&mut slots, &watch, |slots| slots[0].done.is_some())?;
    let from = slots[0].done.expect("it has ended well");
    assert!(data.iter().all(|&byte| byte == expected), "{data:?}");
    Ok(from)
}

#[test]
fn a_long_message_stays_with_its_sender_until_it_is_received() {
    for (limit, is_kept) in [(100, false), (200, true)] {
        let mut streams = Trickle::new(3);
        let sent = [(1, 1, 200), (1, 2, 10), (2, 5, 10)];
        (streams.from[1], streams.from[2]) = (stream(&sent, 1), stream(&sent, 2));
        let mut post = Router::over(streams, 0, 3);
        post.most_unexpected = limit;
        assert_eq!(receive(&mut post, (Source::Any, 5, 10), 2).unwrap(), 2);
        assert_eq!(post.streams.from[1].len() >= 200, !is_kept, "nothing is read of what cannot be kept");
        let silent = receive(&mut post, (Source::Rank(2), 6, 10), 2);
        assert!(matches!(silent, Err(Halt::Stop(Stop::TimedOut))), "rank 1 is not to blame: {silent:?}");
        let behind = receive(&mut post, (Source::Rank(1), 2, 10), 1);
        match (&behind, is_kept) {
            (Ok(1), true) => {}
            (Err(Halt::BadMessage { from: 1, what }), false) => {
                assert!(
                    what.contains("200 u8 with tag 1") && what.contains("try receiving them first"),
                    "{what}"
                )
            }
            _ => panic!("{behind:?}"),
        }
        assert_eq!(receive(&mut post, (Source::Any, 1, 200), 0).unwrap(), 1);
        assert!(is_kept || receive(&mut post, (Source::Rank(1), 2, 10), 1).is_ok());
        assert!(post.waiting.is_empty() && post.streams.from[1].is_empty());
    }
}

#[test]
fn many_short_messages_together_take_no_more_than_one_long_one() {
    for (limit, all_are_kept) in [(1000, false), (1 << 20, true)] {
        let mut streams = Trickle::new(3);
        let mut sent = vec![(1, 1, 100); 30];
        sent.extend([(1, 1, 0), (1, 2, 10), (2, 5, 10)]);
        (streams.from[1], streams.from[2]) = (stream(&sent, 1), stream(&sent, 2));
        let mut post = Router::over(streams, 0, 3);
        post.most_unexpected = limit;
        assert_eq!(receive(&mut post, (Source::Any, 5, 10), 32).unwrap(), 2);
        assert!(post.arriving[1].kept <= limit + 200, "{}", post.arriving[1].kept);
        assert_eq!(post.streams.from[1].is_empty(), all_are_kept);
        // Each that is received makes room for one that is kept.
        for index in 0..30 {
            assert_eq!(receive(&mut post, (Source::Rank(1), 1, 100), index).unwrap(), 1);
        }
        assert_eq!(receive(&mut post, (Source::Rank(1), 2, 10), 31).unwrap(), 1);
        assert_eq!(receive(&mut post, (Source::Rank(1), 1, 0), 30).unwrap(), 1);
        assert_eq!((post.arriving[1].kept, post.waiting.len()), (0, 0));
    }
}

fn outcomes(
    ranks: usize,
    (transport, timeout): (Transport, Duration),
    body: impl Fn(ProcessGroup) -> Result<(), CommError> + Sync,
) -> Vec<Result<(), CommError>> {
    LocalGroup::outcomes(ranks, &GroupOptions { transport, timeout, ..GroupOptions::default() }, body)
}

/// Longer than rings and socket buffers, so that its sender notices that nobody reads it.
const LONG: usize = 24 << 20;

#[test]
fn the_sender_of_a_long_message_waits_and_nothing_is_lost() {
    for transport in BOTH {
        let outcomes = outcomes(3, (transport, Duration::from_secs(30)), |group| {
            let mut data = [0u8; 3];
            match group.rank() {
                0 => group.send(&vec![7u8; LONG], 1, 1)?,
                1 => {
                    group.inner.post().most_unexpected = 1000;
                    for _ in 0..3 {
                        assert_eq!(group.recv(&mut data, Source::Any, 2)?, 2);
                    }
                    assert!(group.inner.post().waiting.is_empty());
                    let mut long = vec![0u8; LONG];
                    group.recv(&mut long, Source::Any, 1)?;
                    assert!(long.iter().all(|&byte| byte == 7));
                }
                _ => {
                    for _ in 0..3 {
                        std::thread::sleep(Duration::from_millis(50));
                        group.send(&data, 1, 2)?;
                    }
                }
            }
            group.barrier()
        });
        assert!(outcomes.iter().all(Result::is_ok), "{transport:?}: {outcomes:?}");
    }
}

#[test]
fn a_receive_behind_a_long_message_reports_what_blocks_it() {
    for transport in BOTH {
        let begin = Instant::now();
        let outcomes = outcomes(2, (transport, Duration::from_millis(300)), |group| {
            if group.rank() == 0 {
                group.scope(|scope| {
                    scope.isend(&[7u8; 2000], 1, 1)?;
                    scope.isend(&[8u8; 3], 1, 2).map(drop)
                })?;
                std::thread::sleep(Duration::from_millis(900));
                return Ok(());
            }
            group.inner.post().most_unexpected = 1000;
            group.recv(&mut [0u8; 3], Source::Rank(0), 2).map(drop)
        });
        let text = outcomes[1].as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 0 sent 2000 u8 with tag 1"), "{text}");
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }
}

#[test]
fn a_silent_rank_is_named_though_another_rank_blocks_itself() {
    for transport in BOTH {
        let outcomes = outcomes(3, (transport, Duration::from_secs(1)), |group| {
            match group.rank() {
                0 => group.scope(|scope| scope.isend(&[7u8; 2000], 1, 1).map(drop))?,
                1 => {
                    group.inner.post().most_unexpected = 1000;
                    group.recv(&mut [0u8; 3], Source::Any, 5)?;
                    return group.recv(&mut [0u8; 3], Source::Rank(2), 6).map(drop);
                }
                _ => {
                    std::thread::sleep(Duration::from_millis(200));
                    group.send(&[1u8; 3], 1, 5)?;
                }
            }
            std::thread::sleep(Duration::from_secs(2));
            Ok(())
        });
        match &outcomes[1] {
            Err(CommError::Timeout { missing, .. }) if matches!(missing[..], [(2, _)]) => {}
            other => panic!("{transport:?}: {other:?}"),
        }
    }
}

/// Rank 0 learns that rank 1 has left, and then receives what rank 1 sends `late`. The link exists if messages were sent
/// `before`. Returns how long the receive took.
fn receive_after_the_leave_event(before: usize, late: Option<Duration>) -> Result<Duration, CommError> {
    let took = std::sync::Mutex::new(Duration::ZERO);
    let mut outcomes = outcomes(2, (Transport::Tcp, Duration::from_secs(30)), |group| {
        let mut data = [0u8];
        for _ in 0..before {
            match group.rank() {
                0 => group.recv(&mut data, Source::Rank(1), 1).map(drop)?,
                _ => group.send(&data, 0, 1)?,
            }
        }
        if group.rank() == 1 {
            let Some(late) = late else { return Ok(()) };
            std::thread::sleep(late);
            return group.send(&[5u8], 0, 2);
        }
        std::thread::sleep(Duration::from_millis(100));
        group.inner.state.left[1].store(true, Ordering::Release);
        let begin = Instant::now();
        let outcome = group.recv(&mut data, Source::Any, 2);
        *took.lock().unwrap() = begin.elapsed();
        outcome.map(|_| assert_eq!(data, [5]))
    });
    outcomes.swap_remove(0)?;
    Ok(took.into_inner().unwrap())
}

#[test]
fn the_event_that_a_rank_has_left_may_overtake_its_message() {
    for (before, limit) in [(1, Duration::from_secs(2)), (0, Duration::from_secs(5))] {
        let took = receive_after_the_leave_event(before, Some(Duration::from_millis(1100))).unwrap();
        assert!(took > Duration::from_millis(800), "the event came first: {took:?}");
        let begin = Instant::now();
        let nothing = receive_after_the_leave_event(before, None);
        assert!(matches!(nothing, Err(CommError::PeerLeft { rank: 1, .. })), "{nothing:?}");
        assert!(begin.elapsed() < limit, "{before} messages before: {:?}", begin.elapsed());
    }
}

/// Rank 0 receives what rank 1 sends `late`; the group is given up after 100 ms.
fn receive_in_a_lost_group(transport: Transport, late: Duration) -> Result<(), CommError> {
    let mut outcomes = outcomes(2, (transport, Duration::from_secs(30)), move |group| {
        // Makes the link.
        let mut data = [0u8];
        match group.rank() {
            0 => group.recv(&mut data, Source::Rank(1), 1)?,
            _ => group.send(&data, 0, 1).map(|()| 0)?,
        };
        if group.rank() == 1 {
            std::thread::sleep(late);
            return group.send(&[5u8], 0, 2);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                group.inner.state.give_up(CommError::Store { group: "world".into(), cause: "a test".into() });
            });
            group.recv(&mut data, Source::Rank(1), 2)
        })?;
        assert_eq!(data, [5]);
        Ok(())
    });
    outcomes.swap_remove(0)
}

#[test]
fn a_message_on_its_way_still_arrives_in_a_group_that_was_given_up() {
    receive_in_a_lost_group(Transport::Tcp, Duration::from_millis(200)).unwrap();
    let begin = Instant::now();
    let error = receive_in_a_lost_group(Transport::Tcp, Duration::from_millis(1500)).unwrap_err();
    assert!(error.to_string().contains("a test"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

/// As for the links of collectives: both ends notice within seconds that the other no longer answers.
#[test]
fn links_for_messages_end_when_the_other_side_no_longer_answers() {
    use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt};
    let outcomes = outcomes(2, (Transport::Tcp, Duration::from_secs(30)), |group| {
        let other = 1 - group.rank();
        group.send(&[1u8], other, 0)?;
        group.recv(&mut [0u8], Source::Any, 0)?;
        let post = group.inner.post();
        for links in [&post.streams.out, &post.streams.inward] {
            let links = links.lock();
            let stream = links[&other].descriptor().unwrap();
            assert!(socket_keepalive(stream).unwrap());
            assert_eq!(tcp_keepcnt(stream).unwrap(), 5);
        }
        // The links end with the other side's group.
        group.barrier()
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}
