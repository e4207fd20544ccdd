//! A rank that drops a group while others still need it: they learn that at once, not at the deadline.

use std::time::{Duration, Instant};

use drumline_comm::{CommError, ProcessGroup, ReduceOp, Source, Transport};

use crate::threads::{BOTH, Result, outcomes};

/// Long after any of the tests must be over.
const TIMEOUT: Duration = Duration::from_secs(30);

const SOON: Duration = Duration::from_secs(2);

type Act = fn(&ProcessGroup) -> Result;

const BARRIER: Act = |group| group.barrier();
const NOTHING: Act = |_| Ok(());
/// Makes the links of collectives and those of messages.
const BOTH_KINDS: Act = |group| group.barrier().and_then(|()| write_round(group));

/// Three ranks make two calls on a group of theirs; rank 1 comes late to the second, or has dropped the group. Returns the
/// outcomes of the second.
fn second_call(
    transport: Transport,
    [before, act]: [Act; 2],
    drops: impl Fn(ProcessGroup) -> Option<ProcessGroup> + Send + Sync + 'static,
) -> Vec<Result> {
    outcomes(3, transport, TIMEOUT, move |group| {
        let child = group.new_group(&[0, 1, 2])?.unwrap();
        before(&child)?;
        let outcome = match group.rank() {
            1 => {
                std::thread::sleep(Duration::from_millis(200));
                drops(child).map_or(Ok(()), |child| act(&child))
            }
            _ => act(&child),
        };
        // Its other groups still work.
        let mut x = [1u8];
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        assert_eq!(x, [3]);
        outcome
    })
}

/// A message travels around the ring.
fn write_round(group: &ProcessGroup) -> Result {
    let me = group.rank();
    group.send(&[me as u64], (me + 1) % 3, 7)?;
    group.recv(&mut [0u64], Source::Rank((me + 2) % 3), 7).map(drop)
}

const ACTS: [Act; 3] =
    [BARRIER, |group| group.all_reduce(&mut vec![1f32; 200_000], ReduceOp::Sum), write_round];

#[test]
fn ranks_that_wait_for_a_rank_that_dropped_the_group_learn_it_at_once() {
    for (index, act) in ACTS.into_iter().enumerate() {
        let begin = Instant::now();
        let outcomes = second_call(Transport::Shm, [BARRIER, act], |_| None);
        assert!(begin.elapsed() < SOON, "{index}: {:?}", begin.elapsed());
        assert!(outcomes[1].is_ok(), "{:?}", outcomes[1]);
        let texts = [&outcomes[0], &outcomes[2]].map(|outcome| match outcome {
            Err(error) => error.to_string(),
            Ok(()) => String::new(),
        });
        assert!(
            texts.iter().any(|text| text.contains("rank 1 has left group `world/1`")),
            "{index}: {texts:?}"
        );
        assert!(
            texts.iter().all(|text| text.is_empty() || text.contains("leaving.rs:")),
            "{index}: {texts:?}"
        );
        // In the ring of messages rank 0 waits for rank 2 only.
        assert!(index == 2 || !texts.iter().any(String::is_empty), "{texts:?}");
    }
}

/// Links that exist are closed; without them it takes longer.
#[test]
fn over_links_they_learn_it_too() {
    for (index, act) in ACTS.into_iter().enumerate() {
        for (before, limit) in [(BOTH_KINDS, SOON), (NOTHING, 5 * SOON)] {
            let begin = Instant::now();
            let outcomes = second_call(Transport::Tcp, [before, act], |_| None);
            assert!(begin.elapsed() < limit, "{index}: {:?}", begin.elapsed());
            let failed =
                |outcome: &&Result| matches!(outcome, Err(error) if error.to_string().contains("rank 1"));
            assert!(outcomes.iter().any(|outcome| failed(&outcome)), "{index}: {outcomes:?}");
        }
    }
}

/// The control: a rank that is only late, and keeps the group, is waited for.
#[test]
fn ranks_that_wait_for_a_late_rank_keep_waiting() {
    for transport in BOTH {
        for act in ACTS {
            let outcomes = second_call(transport, [BARRIER, act], Some);
            assert!(outcomes.iter().all(Result::is_ok), "{transport:?}: {outcomes:?}");
        }
    }
}

/// Calls that were complete before a rank drops the group count, however far behind the others are.
#[test]
fn dropping_the_group_after_the_last_call_disturbs_nobody() {
    for transport in BOTH {
        let outcomes = outcomes(3, transport, TIMEOUT, |group| {
            for turn in 0..30 {
                let child = group.new_group(&[2, 0, 1])?.unwrap();
                let mut x = [turn];
                child.all_reduce(&mut x, ReduceOp::Sum)?;
                assert_eq!(x, [3 * turn]);
                child.barrier()?;
            }
            Ok(())
        });
        assert!(outcomes.iter().all(Result::is_ok), "{transport:?}: {outcomes:?}");
    }
}

/// The error of a failed group is its cause, not that other ranks have left it since.
#[test]
fn the_cause_is_not_hidden_by_ranks_that_leave_because_of_it() {
    for _ in 0..20 {
        let outcomes = outcomes(3, Transport::Shm, TIMEOUT, |group| match group.rank() {
            0 => group.all_reduce(&mut [1u8], ReduceOp::Sum),
            _ => group.barrier(),
        });
        for outcome in outcomes {
            assert!(
                matches!(outcome, Err(CommError::Mismatch { .. } | CommError::CalledOff { .. })),
                "{outcome:?}"
            );
        }
    }
}
