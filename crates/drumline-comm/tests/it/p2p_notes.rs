//! Messages together with other calls: other ranks know a rank's last call, and fixed properties can be read at any time.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, P2p, ProcessGroup, ReduceOp, Source, Transport};

use crate::threads::{BOTH, Result, outcomes, run};

const TIMEOUT: Duration = Duration::from_millis(300);

/// Longer than reading a value takes that is neither waited for nor computed.
const AT_ONCE: Duration = Duration::from_millis(50);

/// How long rank 1 keeps the others waiting.
const LATE: Duration = Duration::from_millis(900);

/// The time that `act` takes: the shortest of a few, since other processes may take the core away.
fn fastest(mut act: impl FnMut()) -> Duration {
    let times = (0..5).map(|_| {
        let begin = Instant::now();
        act();
        begin.elapsed()
    });
    times.min().unwrap()
}

fn properties(group: &ProcessGroup) -> (usize, &'static str, String) {
    let last = group.last_call().map_or_else(String::new, |call| call.to_string());
    (group.num_nodes(), group.transport(), last)
}

#[test]
fn fixed_properties_can_be_read_while_a_started_call_waits() {
    for transport in BOTH {
        run(2, transport, move |group| {
            let expected = if transport == Transport::Shm { (1, "shm") } else { (2, "tcp") };
            // The control: nothing is started.
            assert!(fastest(|| drop(properties(group))) < AT_ONCE);
            group.barrier()?;
            if group.rank() == 1 {
                std::thread::sleep(LATE);
                return group.all_reduce(&mut [1u8], ReduceOp::Sum);
            }
            let mut data = [1u8];
            group.scope(|scope| {
                let work = scope.start(|group| group.all_reduce(&mut data, ReduceOp::Sum));
                std::thread::sleep(LATE / 3);
                let time = fastest(|| drop(properties(group)));
                let (nodes, transport_name, last) = properties(group);
                assert!(!work.is_done(), "too late to measure");
                assert!(time < AT_ONCE, "{transport:?}: {time:?}");
                assert_eq!((nodes, transport_name), expected);
                assert!(last.starts_with("all_reduce(1 u8, sum) #2 at "), "{transport:?}: {last}");
                work.wait()
            })
        });
    }
}

#[test]
fn a_message_that_does_not_fit_is_an_error_while_a_started_call_waits() {
    for transport in BOTH {
        let outcomes = outcomes(2, transport, Duration::from_secs(30), |group| {
            if group.rank() == 1 {
                group.send(&[1u8; 3], 0, 4)?;
                std::thread::sleep(LATE);
                return group.all_reduce(&mut [1u8], ReduceOp::Sum);
            }
            let mut data = [1u8];
            group.scope(|scope| {
                let work = scope.start(|group| group.all_reduce(&mut data, ReduceOp::Sum));
                std::thread::sleep(LATE / 3);
                let begin = Instant::now();
                let error = group.recv(&mut [0u8; 2], Source::Rank(1), 4).unwrap_err();
                assert!(begin.elapsed() < LATE / 3, "{:?}", begin.elapsed());
                assert!(matches!(error, CommError::Message { .. }), "{error}");
                work.wait()
            })
        });
        for outcome in outcomes {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("does not fit: rank 1 sent 3 u8 with tag 4"), "{text}");
        }
    }
}

type Act = fn(&ProcessGroup) -> Result;

/// How rank 0's error shows rank 2, which waits for ever in `act`, while rank 0 waits for it in a barrier.
fn shown_by_rank_0(transport: Transport, act: Act) -> String {
    let outcomes = outcomes(3, transport, Duration::from_secs(30), move |group| {
        group.barrier()?;
        match group.rank() {
            0 => {
                std::thread::sleep(TIMEOUT / 3);
                group.monitored_barrier(TIMEOUT)
            }
            1 => {
                std::thread::sleep(3 * TIMEOUT);
                Ok(())
            }
            _ => act(group),
        }
    });
    let text = outcomes[0].as_ref().unwrap_err().to_string();
    let line = text.lines().find(|line| line.starts_with("  rank 2: (")).unwrap_or_else(|| panic!("{text}"));
    line.to_owned()
}

#[test]
fn a_rank_that_waits_for_a_message_is_named_with_that_message() {
    let acts: [(&str, u32, Act); 5] = [
        ("recv(4 u8, from 1, tag 7) #1", line!(), |group| {
            group.recv(&mut [0u8; 4], Source::Rank(1), 7).map(drop)
        }),
        ("recv(1 f32, from any rank, tag 8) #1", line!(), |group| {
            group.recv(&mut [0f32], Source::Any, 8).map(drop)
        }),
        ("send(40000000 u8, to 1, tag 9) #1", line!(), |group| group.send(&vec![1u8; 40_000_000], 1, 9)),
        ("batch(2 messages) #1", line!(), |group| {
            group.batch(vec![P2p::send(&[1u8], 1, 0), P2p::recv(&mut [0u8], Source::Rank(1), 0)]).map(drop)
        }),
        ("recv(2 u8, from 0, tag 3) #2", line!(), |group| {
            let mut data = [0u8; 2];
            group
                .scope(|scope| {
                    let message = scope.irecv(&mut data, Source::Rank(0), 3)?;
                    scope.wait_for(message)
                })
                .map(drop)
        }),
    ];
    for transport in BOTH {
        for (expected, line, act) in acts {
            let text = shown_by_rank_0(transport, act);
            assert!(text.contains(&format!("whose last call was {expected} at ")), "{transport:?}: {text}");
            let place = text.rsplit("p2p_notes.rs:").next().unwrap().parse::<u32>().unwrap();
            assert!((line..line + 9).contains(&place), "{transport:?}: {text}, begun in line {line}");
        }
    }
}

/// The control: of a message and a collective the later one is shown.
#[test]
fn the_last_call_may_be_a_collective_after_a_message() {
    for transport in BOTH {
        run(2, transport, |group| {
            let (me, other) = (group.rank(), 1 - group.rank());
            let last = || group.last_call().unwrap().to_string();
            assert_eq!(last(), "no call yet");
            group.barrier()?;
            assert!(last().starts_with("barrier() #1 at "), "{}", last());
            group.send(&[me as u64], other, 5)?;
            assert!(last().starts_with(&format!("send(1 u64, to {other}, tag 5) #1 at ")), "{}", last());
            group.recv(&mut [0u64], Source::Any, 5)?;
            assert!(last().starts_with("recv(1 u64, from any rank, tag 5) #2 at "), "{}", last());
            group.barrier()?;
            assert!(last().starts_with("barrier() #2 at "), "{}", last());
            Ok(())
        });
    }
}

/// Nanoseconds of CPU time that this thread has used.
fn core_time() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_rank_that_waits_for_itself_sleeps_and_times_out() {
    for transport in BOTH {
        let outcomes = outcomes(2, transport, TIMEOUT, move |group| {
            if group.rank() == 1 {
                std::thread::sleep(2 * TIMEOUT);
                return Ok(());
            }
            let before = (Instant::now(), core_time());
            let error = group.recv(&mut [0u8; 3], Source::Rank(0), 6).unwrap_err();
            let (time, busy) = (before.0.elapsed(), core_time() - before.1);
            assert!(time >= TIMEOUT && time < 5 * TIMEOUT, "{time:?}");
            assert!(busy < TIMEOUT.as_nanos() as u64 / 3, "{transport:?}: used {busy} ns of CPU time");
            Err(error)
        });
        let text = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(text.contains("missing:\n  rank 0: ("), "{transport:?}: {text}");
        assert!(text.contains("last call was recv(3 u8, from 0, tag 6) #1 at "), "{transport:?}: {text}");
    }
}
