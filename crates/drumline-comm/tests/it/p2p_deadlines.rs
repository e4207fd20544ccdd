//! The deadline of a receive while other messages arrive, and scopes of several threads on one group.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drumline_comm::{CommError, P2p, Source, Transport};

use crate::threads::{BOTH, Result, outcomes, run};

const TIMEOUT: Duration = Duration::from_secs(1);

/// Rank 0 waits for four messages with tag 5, while rank 1 sends others and now and then one of the `num_awaited`. Returns rank
/// 0's outcome, and how long it took.
fn wait_among_others(transport: Transport, pause: Duration, num_awaited: u32) -> (Result, Duration) {
    let begin = Instant::now();
    let mut outcomes = outcomes(2, transport, TIMEOUT, move |group| {
        if group.rank() == 0 {
            let mut data = [[0u8; 1]; 4];
            let receives = data.iter_mut().map(|data| P2p::recv(data, Source::Any, 5));
            return group.batch(receives.collect()).map(drop);
        }
        let (begin, mut num_sent) = (Instant::now(), 0);
        // Ends when rank 0 has given up, or has all it waits for.
        while begin.elapsed() < Duration::from_secs(10) && num_sent < 4 {
            std::thread::sleep(pause);
            group.send(&[9u8], 0, 9)?;
            if num_sent < num_awaited && begin.elapsed() > TIMEOUT / 2 * (num_sent + 1) {
                group.send(&[5u8], 0, 5)?;
                num_sent += 1;
            }
        }
        Ok(())
    });
    (outcomes.swap_remove(0), begin.elapsed())
}

#[test]
fn other_messages_do_not_extend_the_deadline() {
    for transport in BOTH {
        for pause in [Duration::from_millis(300), Duration::from_micros(100)] {
            let (outcome, took) = wait_among_others(transport, pause, 0);
            match outcome {
                Err(CommError::Timeout { missing, .. }) if matches!(missing[..], [(1, _)]) => {}
                other => panic!("{transport:?}, a message each {pause:?}: {other:?}"),
            }
            assert!(took < TIMEOUT * 4, "{transport:?}, a message each {pause:?}: {took:?}");
        }
        // Its own messages do, though all of them together take longer.
        let (outcome, took) = wait_among_others(transport, Duration::from_millis(50), 4);
        outcome.unwrap();
        assert!(took > TIMEOUT, "{took:?}");
    }
}

/// Both threads continue within less time than a wake-up takes.
fn together(arrived: &AtomicUsize) {
    arrived.fetch_add(1, Ordering::AcqRel);
    while arrived.load(Ordering::Acquire) < 2 {
        std::thread::yield_now();
    }
}

#[test]
fn only_one_of_two_threads_has_a_scope_with_messages() {
    const ROUNDS: usize = 300;
    for transport in BOTH {
        run(2, transport, move |group| {
            if group.rank() == 1 {
                let mut go = [0u8];
                return (0..ROUNDS).try_for_each(|_| {
                    group.recv(&mut go, Source::Rank(0), 1)?;
                    group.send(&[5u32], 0, 5)
                });
            }
            (0..ROUNDS).try_for_each(|_| {
                let (start, tried) = (AtomicUsize::new(0), Barrier::new(2));
                let receive = || {
                    let mut data = [0u32];
                    let outcome = group.scope(|scope| {
                        together(&start);
                        let message = scope.irecv(&mut data, Source::Rank(1), 5);
                        tried.wait();
                        let message = message?;
                        scope.isend(&[1u8], 1, 1)?;
                        scope.wait_for(message)
                    });
                    outcome.map(|_| data)
                };
                let both = std::thread::scope(|threads| {
                    let other = threads.spawn(receive);
                    [receive(), other.join().unwrap()]
                });
                match &both {
                    [Ok([5]), Err(CommError::Invalid { .. })] | [Err(CommError::Invalid { .. }), Ok([5])] => {
                        Ok(())
                    }
                    _ => panic!("{transport:?}: {both:?}"),
                }
            })
        });
    }
}
