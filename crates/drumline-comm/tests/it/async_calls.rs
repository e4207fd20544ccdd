//! Started calls: they run in the background, in order, and whoever waits gets their errors.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ReduceOp, Transport};

use crate::threads::{BOTH, outcomes, run};

/// Long enough to be observed, short enough to wait for.
const MOMENT: Duration = Duration::from_millis(100);

#[test]
fn the_program_continues_while_a_call_runs() {
    for transport in BOTH {
        run(2, transport, |group| {
            let (mut x, begin) = (vec![1.0f32; 100_000], Instant::now());
            let computed = group.scope(|scope| {
                if group.rank() == 1 {
                    std::thread::sleep(MOMENT);
                }
                let work = scope.start(|group| group.all_reduce(&mut x, ReduceOp::Sum));
                if group.rank() == 0 {
                    assert!(begin.elapsed() < MOMENT && !work.is_done(), "started, and nobody has waited");
                }
                let computed = (1..=20).product::<u64>();
                work.wait()?;
                Ok(computed)
            })?;
            assert_eq!(computed, 2_432_902_008_176_640_000);
            assert!(x.iter().all(|&x| x == 2.0));
            Ok(())
        });
    }
}

#[test]
fn started_calls_run_in_the_order_of_starting() {
    for transport in BOTH {
        run(3, transport, |group| {
            let order = Mutex::new(Vec::new());
            let order = &order;
            group.scope(|scope| {
                let works: Vec<_> = (0..20)
                    .map(|i| {
                        scope.start(move |group| {
                            let mut x = [i];
                            group.all_reduce(&mut x, ReduceOp::Sum)?;
                            order.lock().unwrap().push(i);
                            Ok(x[0])
                        })
                    })
                    .collect();
                for (i, work) in works.into_iter().enumerate().rev() {
                    assert_eq!(work.wait()?, 3 * i as u64);
                }
                Ok(())
            })?;
            assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<u64>>());
            Ok(())
        });
    }
}

#[test]
fn polling_sees_the_end_of_a_call() {
    run(2, Transport::Shm, |group| {
        group.scope(|scope| {
            let work = scope.start(|group| group.barrier());
            let deadline = Instant::now() + Duration::from_secs(20);
            while !work.is_done() {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
            work.wait()
        })
    });
}

#[test]
fn a_direct_call_comes_after_the_started_ones() {
    for transport in BOTH {
        run(2, transport, |group| {
            let mut x = [1u64; 1000];
            group.scope(|scope| {
                let work = scope.start(|group| {
                    std::thread::sleep(MOMENT / 4);
                    group.all_reduce(&mut x, ReduceOp::Sum)
                });
                let mut y = [3.0f32];
                group.all_reduce(&mut y, ReduceOp::Max)?;
                assert!(work.is_done() && y == [3.0]);
                work.wait()
            })?;
            assert_eq!(x, [2; 1000]);
            group.barrier()
        });
    }
}

#[test]
fn a_call_on_the_outer_group_inside_a_started_one_does_not_wait_for_itself() {
    run(2, Transport::Shm, |group| {
        let mut x = [1u64];
        group.scope(|scope| scope.start(|_| group.all_reduce(&mut x, ReduceOp::Sum)).wait())?;
        assert_eq!(x, [2]);
        Ok(())
    });
}

#[test]
fn calls_that_nobody_waits_for_are_done_when_the_scope_ends() {
    for transport in BOTH {
        run(2, transport, |group| {
            let mut x = vec![1u32; 50_000];
            group.scope(|scope| {
                drop(scope.start(|group| group.all_reduce(&mut x, ReduceOp::Sum)));
                Ok(())
            })?;
            assert!(x.iter().all(|&x| x == 2));
            Ok(())
        });
    }
}

#[test]
fn an_error_reaches_the_waiting_program_and_all_later_calls() {
    for transport in BOTH {
        let outcomes = outcomes(2, transport, Duration::from_secs(20), |group| {
            group.scope(|scope| {
                let first = scope.start(|group| match group.rank() {
                    0 => group.barrier(),
                    _ => group.all_reduce(&mut [0u8], ReduceOp::Sum),
                });
                let second = scope.start(|group| group.barrier());
                let (first, second) = (first.wait().unwrap_err(), second.wait().unwrap_err());
                assert_eq!(first.to_string(), second.to_string());
                Err::<(), _>(first)
            })
        });
        for outcome in outcomes {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("barrier()") && text.contains("all_reduce(1 u8, sum)"), "{text}");
        }
    }
}

#[test]
fn an_invalid_started_call_leaves_the_group_usable() {
    run(2, Transport::Auto, |group| {
        let outcome = group.scope(|scope| {
            let work = scope.start(|group| group.broadcast(&mut [0u8], 7));
            let outcome = work.wait();
            scope.start(|group| group.barrier()).wait()?;
            Ok(outcome)
        })?;
        assert!(matches!(outcome, Err(CommError::Invalid { .. })), "{outcome:?}");
        group.barrier()
    });
}

/// Rank 1's started call runs `act` before its all-reduce. Returns both ranks' outcomes, and how long it took.
fn after(transport: Transport, act: fn()) -> (Vec<String>, Duration) {
    let begin = Instant::now();
    let outcomes = outcomes(2, transport, Duration::from_secs(20), move |group| {
        let mut x = [1u8];
        group.scope(|scope| {
            let work = scope.start(|group| {
                if group.rank() == 1 {
                    act();
                }
                group.all_reduce(&mut x, ReduceOp::Sum)
            });
            work.wait()
        })?;
        Ok(x[0].to_string())
    });
    let text = |outcome: Result<String, CommError>| outcome.unwrap_or_else(|error| error.to_string());
    (outcomes.into_iter().map(text).collect(), begin.elapsed())
}

#[test]
fn a_panic_in_a_started_call_is_an_error_on_all_ranks() {
    for transport in BOTH {
        let (texts, time) = after(transport, || panic!("on purpose"));
        for text in &texts {
            assert!(text.contains("rank 1") && text.contains("panicked"), "{text}");
        }
        assert!(time < Duration::from_secs(2), "{time:?}");
        assert_eq!(after(transport, || {}).0, ["2", "2"]);
    }
}

#[test]
fn a_scope_whose_body_fails_still_ends_its_calls() {
    run(2, Transport::Auto, |group| {
        let mut x = [1u8];
        let outcome = group.scope(|scope| {
            drop(scope.start(|group| group.all_reduce(&mut x, ReduceOp::Sum)));
            Err::<(), _>(CommError::Object { what: "something", cause: "of the program's own".into() })
        });
        assert!(matches!(outcome, Err(CommError::Object { .. })));
        assert_eq!(x, [2]);
        group.barrier()
    });
}
