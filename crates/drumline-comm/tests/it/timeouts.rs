//! A rank that does not come in time is named, with its last call; one that is only late is waited for.

use std::time::{Duration, Instant};

use drumline_comm::{ProcessGroup, ReduceOp, Source, Transport};

use crate::threads::{BOTH, Result, outcomes};

const TIMEOUT: Duration = Duration::from_millis(300);

type Act = fn(&ProcessGroup) -> Result;

/// Keeps the others waiting until they give up.
fn stay_away() -> Result {
    std::thread::sleep(4 * TIMEOUT);
    Ok(())
}

/// The outcomes of `call` when rank 2 comes `late`.
fn with_a_late_rank(
    transport: Transport,
    late: Duration,
    call: impl Fn(&ProcessGroup) -> Result + Send + Sync + 'static,
) -> Vec<Result> {
    outcomes(4, transport, TIMEOUT, move |group| {
        group.all_reduce(&mut [0u8; 5], ReduceOp::Max)?;
        if group.rank() == 2 {
            std::thread::sleep(late);
        }
        call(group)
    })
}

fn check_named(transport: Transport, call: &str, begin: Instant, outcomes: Vec<Result>) {
    let time = begin.elapsed();
    assert!(time < Duration::from_secs(3), "{time:?}");
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let text = outcome.unwrap_err().to_string();
        let who = format!("rank {rank} over {transport:?}: {text}");
        assert!(text.contains(call) && text.contains("timed out after 300ms"), "{who}");
        let missing = text.split("missing:").nth(1).expect(&who);
        let missing = missing.split("\ntry").next().unwrap();
        assert!(missing.contains("rank 2: ("), "{who}");
        assert!(missing.contains("whose last call was all_reduce(5 u8, max) #1 at "), "{who}");
        assert!(missing.contains("timeouts.rs:"), "{who}");
        assert_eq!(missing.matches("rank ").count(), 1, "only rank 2 is missing: {who}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_with_its_last_call() {
    for transport in BOTH {
        let calls: [(&str, Act); 5] = [
            ("barrier() #2", |group| group.barrier()),
            ("all_reduce(3 f32, sum) #2", |group| group.all_reduce(&mut [0f32; 3], ReduceOp::Sum)),
            ("all_reduce(90000 f32, sum) #2", |group| {
                group.all_reduce(&mut vec![0f32; 90_000], ReduceOp::Sum)
            }),
            ("all_gather(10 u8) #2", |group| group.all_gather(&[0u8; 10], &mut [0; 40])),
            ("broadcast(10 u8, root 2) #2", |group| group.broadcast(&mut [0u8; 10], 2)),
        ];
        for (text, call) in calls {
            let begin = Instant::now();
            let outcomes = with_a_late_rank(transport, 4 * TIMEOUT, call);
            check_named(transport, text, begin, outcomes);
        }
    }
}

#[test]
fn a_monitored_barrier_has_its_own_deadline() {
    for transport in BOTH {
        let begin = Instant::now();
        let outcomes = outcomes(4, transport, Duration::from_secs(30), |group| {
            group.all_reduce(&mut [0u8; 5], ReduceOp::Max)?;
            if group.rank() == 2 {
                std::thread::sleep(4 * TIMEOUT);
            }
            group.monitored_barrier(TIMEOUT)
        });
        check_named(transport, "monitored_barrier() #2", begin, outcomes);
    }
}

#[test]
fn all_missing_ranks_are_named() {
    for transport in BOTH {
        let outcomes = outcomes(4, transport, Duration::from_secs(30), |group| {
            group.barrier()?;
            match group.rank() {
                0 => group.monitored_barrier(TIMEOUT),
                _ => stay_away(),
            }
        });
        let text = outcomes[0].as_ref().unwrap_err().to_string();
        for rank in 1..4 {
            assert!(text.contains(&format!("\n  rank {rank}: (")), "{transport:?}: {text}");
        }
        assert_eq!(text.matches("whose last call was barrier() #1").count(), 3, "{transport:?}: {text}");
    }
}

/// The control: a rank that is late but comes in time changes nothing.
#[test]
fn a_rank_that_comes_in_time_is_waited_for() {
    for transport in BOTH {
        for outcome in with_a_late_rank(transport, TIMEOUT / 6, |group| group.barrier()) {
            outcome.unwrap();
        }
        for outcome in with_a_late_rank(transport, TIMEOUT / 6, |group| group.monitored_barrier(10 * TIMEOUT))
        {
            outcome.unwrap();
        }
    }
}

#[test]
fn a_receive_from_a_silent_rank_names_it() {
    for transport in BOTH {
        let begin = Instant::now();
        let outcomes = outcomes(3, transport, TIMEOUT, |group| {
            group.barrier()?;
            match group.rank() {
                0 => group.recv(&mut [0u8; 4], Source::Rank(1), 6).map(drop),
                _ => stay_away(),
            }
        });
        let text = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(text.starts_with("recv(4 u8") && text.contains("timed out after 300ms"), "{text}");
        let named = "missing:\n  rank 1: (";
        assert!(text.contains(named) && text.contains("last call was barrier() #1"), "{transport:?}: {text}");
        assert!(begin.elapsed() < Duration::from_secs(3));
    }
}

#[test]
fn a_receive_from_any_rank_names_all_of_them() {
    for transport in BOTH {
        let outcomes = outcomes(3, transport, TIMEOUT, |group| {
            group.barrier()?;
            match group.rank() {
                0 => group.recv(&mut [0u8; 4], Source::Any, 6).map(drop),
                _ => stay_away(),
            }
        });
        let text = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 1: (") && text.contains("rank 2: ("), "{transport:?}: {text}");
    }
}

#[test]
fn a_timeout_can_be_recovered_from_and_a_mismatch_cannot() {
    for transport in BOTH {
        for outcome in with_a_late_rank(transport, 4 * TIMEOUT, |group| group.barrier()) {
            assert!(outcome.unwrap_err().is_recoverable());
        }
        let outcomes = outcomes(2, transport, Duration::from_secs(20), |group| match group.rank() {
            0 => group.barrier(),
            _ => group.broadcast(&mut [0u8], 0),
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(!error.is_recoverable(), "{error:?}");
        }
    }
}

/// Longer than a link would wait for room in a peer's window, if there were a limit.
const BUSY: Duration = Duration::from_secs(8);

/// Rank 1 is busy with other things while what rank 0 sends fills all buffers on the way.
fn wait_for_a_busy_rank(call: impl Fn(&ProcessGroup) -> Result + Send + Sync + 'static) {
    let outcomes = outcomes(2, Transport::Tcp, Duration::from_secs(30), move |group| {
        group.barrier()?;
        if group.rank() == 1 {
            std::thread::sleep(BUSY);
        }
        call(group)
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn a_rank_that_is_busy_for_long_is_waited_for_with_a_collective() {
    wait_for_a_busy_rank(|group| {
        let mut data = vec![1f32; 8 << 20];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        assert!(data.iter().all(|x| *x == 2.0));
        Ok(())
    });
}

#[test]
fn a_rank_that_is_busy_for_long_is_waited_for_with_a_message() {
    wait_for_a_busy_rank(|group| {
        let mut data = vec![1u8; 32 << 20];
        if group.rank() == 0 {
            return group.send(&data, 1, 0);
        }
        data.fill(0);
        group.recv(&mut data, Source::Rank(0), 0)?;
        assert!(data.iter().all(|x| *x == 1));
        Ok(())
    });
}
