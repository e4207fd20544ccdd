//! Which collectives a rank is in: seen from another thread while it waits, and not before or afterwards.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, ProcessGroup, ReduceOp, Source};

use crate::threads::{BOTH, outcomes, run};

const LONGEST: Duration = Duration::from_secs(20);

fn calls(group: &ProcessGroup) -> Vec<String> {
    group.calls_under_way().iter().map(ToString::to_string).collect()
}

/// Waits until the rank is in `number` calls, and returns them.
fn wait_for_calls(group: &ProcessGroup, number: usize) -> Vec<String> {
    let begin = Instant::now();
    while calls(group).len() != number {
        assert!(begin.elapsed() < LONGEST, "{:?}", calls(group));
        std::thread::sleep(Duration::from_millis(1));
    }
    calls(group)
}

/// Rank 0 makes a call and checks meanwhile. The others, who are in none, make it once rank 0 has seen that.
fn looked_at(group: &ProcessGroup, call: impl Fn() -> Result<(), CommError> + Sync) -> Result<(), CommError> {
    if group.rank() > 0 {
        group.recv(&mut [0u8], Source::Rank(0), 0)?;
        assert_eq!(calls(group), [""; 0], "a rank that has not called is in no call");
        return call();
    }
    std::thread::scope(|scope| {
        let called = scope.spawn(&call);
        let seen = wait_for_calls(group, 1);
        assert_eq!(wait_for_calls(group, 1), seen, "it is the same one as long as it lasts");
        assert!(seen[0].contains(" of world at ") && seen[0].contains("under_way.rs:"), "{seen:?}");
        let place = format!("#{} ", group.last_call().map_or(0, |call| call.sequence));
        assert!(seen[0].contains(&place), "{seen:?}, expected {place}");
        for other in 1..group.size() {
            group.send(&[0u8], other, 0)?;
        }
        called.join().unwrap()
    })?;
    assert_eq!(calls(group), [""; 0]);
    Ok(())
}

#[test]
fn a_call_is_reported_while_it_waits_and_not_afterwards() {
    for transport in BOTH {
        run(3, transport, |group| {
            assert_eq!(calls(group), [""; 0]);
            looked_at(group, || group.barrier())?;
            looked_at(group, || group.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum))?;
            group.barrier()?;
            looked_at(group, || group.scope(|scope| scope.start(|group| group.barrier()).wait()))
        });
    }
}

#[test]
fn calls_in_other_groups_of_the_rank_count_too() {
    for transport in BOTH {
        run(2, transport, |group| {
            let own = group.new_group(&[1, 0])?.unwrap();
            if group.rank() == 1 {
                group.recv(&mut [0u8], Source::Rank(0), 0)?;
                own.barrier()?;
                return group.barrier();
            }
            std::thread::scope(|scope| {
                let calls = [scope.spawn(|| own.barrier()), scope.spawn(|| group.barrier())];
                let seen = wait_for_calls(group, 2).join(" and ");
                assert!(seen.contains("barrier() #2 of world at "), "{seen}");
                assert!(seen.contains("barrier() #1 of world/1 at "), "{seen}");
                group.send(&[0u8], 1, 0)?;
                calls.into_iter().try_for_each(|call| call.join().unwrap())
            })?;
            assert!(group.calls_under_way().is_empty());
            Ok(())
        });
    }
}

#[test]
fn a_call_that_has_failed_is_no_longer_reported() {
    for transport in BOTH {
        let outcomes = outcomes(2, transport, LONGEST, |group| {
            let failed = match group.rank() {
                0 => group.barrier(),
                _ => Err(CommError::CalledOff {
                    group: group.name().into(),
                    by: 1,
                    cause: "on purpose".into(),
                    recoverable: true,
                }),
            };
            assert!(failed.is_err() && group.calls_under_way().is_empty());
            failed
        });
        assert!(outcomes.iter().all(Result::is_err));
    }
}
