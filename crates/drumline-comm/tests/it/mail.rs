//! Messages from one rank to another: tags, order, any source, sizes, batches, scopes, and messages that do not fit.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, P2p, ProcessGroup, Source, Transport};

use crate::numbers::{Number, Random, buffer};
use crate::threads::{BOTH, Result, outcomes, run};

/// Longer than any ring or socket buffer.
const LARGE: usize = 1_500_000;

#[test]
fn a_message_of_any_type_and_length_arrives() {
    fn pass<T: Number>(group: &ProcessGroup, len: usize) -> Result {
        match group.rank() {
            0 => group.send(&buffer::<T>(0, len), 1, 5),
            1 => {
                let mut data = vec![T::of(0); len];
                assert_eq!(group.recv(&mut data, Source::Rank(0), 5)?, 0);
                assert_eq!(data, buffer::<T>(0, len));
                Ok(())
            }
            _ => Ok(()),
        }
    }
    for transport in BOTH {
        run(3, transport, |group| {
            for len in [0, 1, 7, 1000, 40_000, LARGE] {
                pass::<f32>(group, len)?;
            }
            pass::<u8>(group, 131)?;
            pass::<f64>(group, 131)?;
            pass::<bool>(group, 131)?;
            group.barrier()
        });
    }
}

#[test]
fn tags_are_received_in_any_order() {
    for transport in BOTH {
        run(2, transport, |group| {
            if group.rank() == 0 {
                for tag in 0..50 {
                    group.send(&[tag], 1, tag)?;
                }
                return group.barrier();
            }
            for tag in (0..50).rev() {
                let mut data = [99];
                group.recv(&mut data, Source::Rank(0), tag)?;
                assert_eq!(data, [tag]);
            }
            group.barrier()
        });
    }
}

#[test]
fn messages_with_one_tag_keep_their_order() {
    for transport in BOTH {
        run(2, transport, |group| {
            for i in 0..500u64 {
                if group.rank() == 0 {
                    group.send(&vec![i; i as usize], 1, 3)?;
                } else {
                    let mut data = vec![0; i as usize];
                    group.recv(&mut data, Source::Any, 3)?;
                    assert!(data.iter().all(|&x| x == i));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn from_any_source_every_message_comes_once() {
    for transport in BOTH {
        run(4, transport, |group| {
            if group.rank() != 0 {
                for i in 0..20 {
                    group.send(&[group.rank() as u32, i], 0, 1)?;
                }
                return group.barrier();
            }
            let mut seen = [0; 4];
            for _ in 0..60 {
                let mut data = [0u32; 2];
                let from = group.recv(&mut data, Source::Any, 1)?;
                assert_eq!(data, [from as u32, seen[from]], "in order from each rank");
                seen[from] += 1;
            }
            assert_eq!(seen, [0, 20, 20, 20]);
            group.barrier()
        });
    }
}

#[test]
fn a_rank_sends_to_itself() {
    for transport in BOTH {
        run(2, transport, |group| {
            let me = group.rank();
            let mine = buffer::<f32>(me, 100_000);
            group.send(&mine, me, 8)?;
            group.send(&[1u8], me, 9)?;
            let mut data = vec![0f32; 100_000];
            assert_eq!(group.recv(&mut data, Source::Rank(me), 8)?, me);
            assert_eq!(data, mine);
            assert_eq!(group.recv(&mut [0u8], Source::Any, 9)?, me);
            let mut back = [0u16];
            group.batch(vec![P2p::recv(&mut back, Source::Rank(me), 2), P2p::send(&[7u16], me, 2)])?;
            assert_eq!(back, [7]);
            Ok(())
        });
    }
}

#[test]
fn all_send_first_and_receive_afterwards() {
    for transport in BOTH {
        run(3, transport, |group| {
            let (me, ranks) = (group.rank(), group.size());
            let others = || (0..ranks).filter(move |&rank| rank != me);
            let mine = buffer::<f32>(me, LARGE);
            others().try_for_each(|to| group.send(&mine, to, 0))?;
            for from in others() {
                let mut data = vec![0f32; LARGE];
                group.recv(&mut data, Source::Rank(from), 0)?;
                assert_eq!(data, buffer::<f32>(from, LARGE));
            }
            Ok(())
        });
    }
}

#[test]
fn a_ring_passes_large_messages_in_one_batch() {
    for transport in BOTH {
        for ranks in [2, 3, 5] {
            run(ranks, transport, |group| {
                let (me, ranks) = (group.rank(), group.size());
                let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
                let mine = buffer::<f32>(me, 300_000);
                let (mut theirs, mut small) = (vec![0f32; 300_000], [0u64]);
                let peers = group.batch(vec![
                    P2p::send(&mine, right, 0),
                    P2p::send(&[me as u64], left, 1),
                    P2p::recv(&mut small, Source::Rank(right), 1),
                    P2p::recv(&mut theirs, Source::Rank(left), 0),
                ])?;
                assert_eq!(peers, [right, left, right, left]);
                assert_eq!((theirs, small), (buffer::<f32>(left, 300_000), [right as u64]));
                group.batch(Vec::new())?;
                Ok(())
            });
        }
    }
}

#[test]
fn a_scopes_messages_move_while_others_are_waited_for() {
    for transport in BOTH {
        run(2, transport, |group| {
            let other = 1 - group.rank();
            let (one, two) = (buffer::<f32>(group.rank(), LARGE), [group.rank() as u32]);
            let (mut first, mut second) = (vec![0f32; LARGE], [9]);
            group.scope(|scope| {
                let large = scope.isend(&one, other, 1)?;
                let late = scope.irecv(&mut second, Source::Rank(other), 2)?;
                let early = scope.irecv(&mut first, Source::Any, 1)?;
                assert_eq!(scope.wait_for(early)?, other);
                scope.isend(&two, other, 2)?;
                assert_eq!(scope.wait_for(late)?, other);
                scope.wait_for(large)?;
                assert!(scope.is_delivered(large)? && scope.is_delivered(early)?);
                Ok(())
            })?;
            assert_eq!((first, second), (buffer::<f32>(other, LARGE), [other as u32]));
            group.barrier()
        });
    }
}

#[test]
fn a_scope_ends_when_its_messages_have_arrived() {
    for transport in BOTH {
        run(3, transport, |group| {
            let me = group.rank();
            let mut got = [[0u8; 1000]; 3];
            let mine = [me as u8; 1000];
            group.scope(|scope| {
                for (from, data) in got.iter_mut().enumerate() {
                    scope.irecv(data, Source::Rank(from), 4)?;
                }
                (0..3).try_for_each(|to| scope.isend(&mine, to, 4).map(drop))
            })?;
            assert!(got.iter().enumerate().all(|(from, data)| data.iter().all(|&x| x == from as u8)));
            Ok(())
        });
    }
}

#[test]
fn a_call_while_a_scope_has_messages_is_an_error() {
    for transport in BOTH {
        run(2, transport, |group| {
            let other = 1 - group.rank();
            let mut data = [0u32];
            let mine = [7u32];
            group.scope(|scope| {
                let message = scope.irecv(&mut data, Source::Rank(other), 0)?;
                let direct = group.send(&[1], other, 1);
                assert!(matches!(direct, Err(CommError::Invalid { .. })), "{direct:?}");
                let nested = group.scope(|inner| inner.isend(&mine, other, 1).map(drop));
                assert!(matches!(nested, Err(CommError::Invalid { .. })), "{nested:?}");
                // Nobody sends before all have tried.
                group.barrier()?;
                scope.isend(&mine, other, 0)?;
                scope.wait_for(message).map(drop)
            })?;
            assert_eq!(data, [7]);
            group.send(&[1u8], other, 9)?;
            group.recv(&mut [0u8], Source::Any, 9).map(drop)
        });
    }
}

/// The outcomes of ranks 0 and 1 if rank 1's receive does not fit.
fn bad_receive(transport: Transport, receive: fn(&ProcessGroup) -> Result<usize>) -> Vec<Result> {
    outcomes(2, transport, Duration::from_secs(20), move |group| {
        if group.rank() == 0 {
            group.send(&[1.5f32; 10], 1, 3)?;
        } else {
            receive(group)?;
        }
        group.barrier()
    })
}

#[test]
fn a_message_that_does_not_fit_is_an_error_on_both_sides() {
    for transport in BOTH {
        let receives: [fn(&ProcessGroup) -> Result<usize>; 3] = [
            |group| group.recv(&mut [0f32; 9], Source::Rank(0), 3),
            |group| group.recv(&mut [0f32; 11], Source::Any, 3),
            |group| group.recv(&mut [0u32; 10], Source::Rank(0), 3),
        ];
        for receive in receives {
            let begin = Instant::now();
            for outcome in bad_receive(transport, receive) {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains("rank 0 sent 10 f32 with tag 3"), "{text}");
                assert!(text.contains("recv(") && text.contains("mail.rs:"), "{text}");
            }
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        }
        let control = bad_receive(transport, |group| group.recv(&mut [0f32; 10], Source::Any, 3));
        assert!(control.iter().all(Result::is_ok), "{control:?}");
    }
}

#[test]
fn nobody_waits_for_a_rank_that_has_left() {
    for transport in BOTH {
        for source in [Source::Rank(1), Source::Any] {
            let begin = Instant::now();
            let outcomes = outcomes(2, transport, Duration::from_secs(20), move |group| {
                if group.rank() == 1 {
                    // What it sent before it left still arrives.
                    return group.send(&[4u8], 0, 0);
                }
                let mut data = [0u8];
                group.recv(&mut data, source, 0)?;
                assert_eq!(data, [4]);
                group.recv(&mut data, source, 0).map(drop)
            });
            assert!(outcomes[1].is_ok(), "{:?}", outcomes[1]);
            match &outcomes[0] {
                Err(error @ CommError::PeerLeft { rank: 1, .. }) => {
                    assert!(error.to_string().contains("mail.rs:"), "{error}")
                }
                other => panic!("{other:?}"),
            }
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        }
    }
}

#[test]
fn sending_to_a_rank_that_does_not_exist_is_an_error() {
    run(2, Transport::Auto, |group| {
        for outcome in [group.send(&[1u8], 2, 0), group.recv(&mut [0u8], Source::Rank(7), 0).map(drop)] {
            assert!(matches!(outcome, Err(CommError::Invalid { .. })), "{outcome:?}");
        }
        group.barrier()
    });
}

/// Sender, receiver, tag and length of each message of one turn: the same on all ranks.
fn plan(random: &mut Random, ranks: usize) -> Vec<(usize, usize, u64, usize)> {
    let message = |random: &mut Random| {
        let scale = random.below(14);
        let len = random.below(4 << scale);
        (random.below(ranks), random.below(ranks), random.below(3) as u64, len)
    };
    (0..1 + random.below(12)).map(|_| message(random)).collect()
}

#[test]
fn random_traffic_arrives_whole() {
    for transport in BOTH {
        run(4, transport, |group| {
            let (me, ranks) = (group.rank(), group.size());
            let mut random = Random::new(11);
            for turn in 0..150u64 {
                let plan = plan(&mut random, ranks);
                let content = |index: usize, len| vec![turn * 1000 + index as u64; len];
                let sent: Vec<_> =
                    plan.iter().enumerate().map(|(i, &(_, _, _, len))| content(i, len)).collect();
                let mut got: Vec<_> = plan.iter().map(|&(_, _, _, len)| vec![0u64; len]).collect();
                let mut messages = Vec::new();
                for ((&(from, to, tag, _), data), into) in plan.iter().zip(&sent).zip(&mut got) {
                    if from == me {
                        messages.push(P2p::send(data, to, tag));
                    }
                    if to == me {
                        messages.push(P2p::recv(into, Source::Rank(from), tag));
                    }
                }
                group.batch(messages)?;
                for (((_, to, _, _), data), into) in plan.iter().zip(&sent).zip(&got) {
                    assert!(*to != me || into == data, "turn {turn}");
                }
                if turn % 16 == 0 {
                    group.barrier()?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn messages_and_collectives_run_at_the_same_time() {
    for transport in BOTH {
        run(2, transport, |group| {
            let other = 1 - group.rank();
            std::thread::scope(|scope| {
                let mail = scope.spawn(|| {
                    (0..100u64).try_for_each(|i| {
                        let mut data = [0];
                        group.send(&[i], other, i)?;
                        group.recv(&mut data, Source::Rank(other), i)?;
                        assert_eq!(data, [i]);
                        Ok(())
                    })
                });
                (0..300).try_for_each(|_| group.barrier())?;
                mail.join().unwrap()
            })
        });
    }
}
