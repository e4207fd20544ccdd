//! Corner cases in which groups once failed, and which the grids do not cover.

use std::time::Duration;

use drumline_comm::{CommError, P2p, ProcessGroup, ReduceOp, Source, Transport, f16};
use rank_test::ranks_test;

use crate::threads::{BOTH, outcomes, run};

/// Two NaNs with different payloads must not leave ranks with different bits.
#[test]
fn all_ranks_hold_the_same_nan() {
    for transport in BOTH {
        for len in [1, 64, 5_000] {
            let bits = run(2, transport, move |group| {
                let nan = f32::from_bits(if group.rank() == 0 { 0x7fc0_0001 } else { 0xffc0_0002 });
                let mut data = vec![nan; len];
                group.all_reduce(&mut data, ReduceOp::Sum)?;
                Ok(data.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            });
            assert!(bits[0] == bits[1], "{len} over {transport:?}");
        }
    }
}

/// The sum does not fit the type, but the average does.
#[test]
fn halves_are_averaged_before_they_are_rounded() {
    for transport in BOTH {
        let means = run(4, transport, |group| {
            let mut data = vec![f16::from_f32(30_000.0); 20_000];
            group.all_reduce(&mut data, ReduceOp::Avg)?;
            Ok(data[19_999].to_f32())
        });
        assert_eq!(means, [30_000.0; 4], "{transport:?}");
    }
}

/// What a rank sent before it left normally still counts.
#[test]
fn the_last_data_of_a_rank_that_leaves_arrives() {
    for _ in 0..40 {
        let sums = run(2, Transport::Tcp, |group| {
            let mut all = [0u32; 2];
            let mine = [group.rank() as u32 + 1];
            group.gather(&mine, (group.rank() == 0).then_some(&mut all[..]), 0)?;
            Ok(all.iter().sum::<u32>())
        });
        assert_eq!(sums[0], 3);
    }
}

/// Bytes of another type must not stay in a buffer of `bool`s.
#[test]
fn a_mismatch_leaves_only_valid_bools_in_a_buffer() {
    let are_valid = outcomes(2, Transport::Tcp, Duration::from_secs(5), |group| {
        let mut bools = vec![true; 1000];
        let outcome = match group.rank() {
            0 => group.all_gather(&[0xabu8; 500], &mut [0; 1000]),
            _ => group.all_gather(&[true; 500], &mut bools),
        };
        assert!(outcome.is_err());
        // Checked as numbers: a `bool` that is neither 0 nor 1 would be undefined behaviour.
        Ok(bools.iter().map(|&value| u8::from(value)).all(|number| number < 2))
    });
    assert!(are_valid.into_iter().all(|is_valid| matches!(is_valid, Ok(true))));
}

/// Two ranks that both only send never read each other's header.
#[test]
fn ranks_that_both_only_send_get_a_mismatch() {
    let errors = outcomes(2, Transport::Tcp, Duration::from_secs(20), |group| {
        let mut data = vec![1u8; 16 << 20];
        match group.rank() {
            0 => group.broadcast(&mut data, 0),
            _ => group.gather(&data, None, 0),
        }
    });
    for error in errors {
        assert!(matches!(error, Err(CommError::Mismatch { .. } | CommError::CalledOff { .. })), "{error:?}");
    }
}

/// A mismatch of two ranks matters more than a third rank that is late.
#[test]
fn a_late_rank_does_not_hide_a_mismatch() {
    let errors = outcomes(3, Transport::Shm, Duration::from_secs(2), |group| match group.rank() {
        0 => group.barrier(),
        1 => group.all_reduce(&mut [1u8], ReduceOp::Sum),
        _ => {
            std::thread::sleep(Duration::from_secs(4));
            group.barrier()
        }
    });
    for error in &errors[..2] {
        assert!(matches!(error, Err(CommError::Mismatch { .. } | CommError::CalledOff { .. })), "{error:?}");
    }
}

/// An error that nobody waited for is returned at the end of the scope.
#[test]
fn an_error_that_nobody_waited_for_is_not_lost() {
    run(2, Transport::Shm, |group| {
        let outcome = group.scope(|scope| {
            let _ = scope.start(|group| group.broadcast(&mut [0u8], 7));
            Ok(())
        });
        assert!(matches!(outcome, Err(CommError::Invalid { .. })), "{outcome:?}");
        Ok(())
    });
}

/// Counts must not wrap around to a length that fits.
#[test]
fn counts_that_no_memory_holds_are_an_error_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            let huge = [usize::MAX, 5];
            // Fits a `usize`, but not as bytes.
            let long = [1 << 61, 5];
            for counts in [huge, long] {
                let mine = vec![1.0f64; 4];
                let mut four = [0.0f64; 4];
                let outcomes = [
                    group.all_gather_uneven(&mine, &mut four, &counts),
                    group.gather_uneven(&mine, Some(&mut four), &counts, group.rank()),
                    group.gather_uneven(&mine, None, &counts, 1 - group.rank()),
                    group.reduce_scatter_uneven(&mine, &mut four, &counts, ReduceOp::Sum),
                    group.all_to_all_uneven(&mine, &counts, &mut four, &[2, 2]),
                    group.all_to_all_uneven(&mine, &[2, 2], &mut four, &counts),
                ];
                for outcome in outcomes {
                    let error = outcome.expect_err("no buffer is that long");
                    assert!(matches!(error, CommError::Invalid { .. }), "{error}");
                    assert!(error.to_string().contains("than memory can hold"), "{error}");
                }
            }
            group.barrier()
        });
    }
}

#[test]
fn counts_in_which_a_rank_disagrees_with_itself_are_an_error_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            let me = group.rank();
            let (mut sends, mut receives) = ([2, 2], [2, 2]);
            sends[me] = 3;
            receives[me] = 1;
            let error = group.all_to_all_uneven(&[0u8; 5], &sends, &mut [0; 3], &receives).unwrap_err();
            let text = format!("rank {me} sends itself 3 elements, but expects 1 from itself");
            assert!(error.to_string().starts_with(&format!("{text} (at ")), "{error}");
            group.barrier()
        });
    }
}

#[test]
fn coalesced_buffers_that_do_not_fit_are_an_error_and_the_group_stays_usable() {
    run(2, Transport::Shm, |group| {
        let (four, mut two) = ([1u8; 4], [0u8; 2]);
        let outcomes = [
            (
                group.all_gather_coalesced(&[&four], &mut []),
                "1 `inputs` and 0 `outputs`, expected equally many",
            ),
            (
                group.all_gather_coalesced(&[&four], &mut [&mut two]),
                "`outputs[0]` has 2 elements, expected 2 ranks times the 4 of `inputs[0]`",
            ),
            (
                group.reduce_scatter_coalesced(&[&four[..1]], &mut [&mut two], ReduceOp::Sum),
                "`inputs[0]` has 1 elements, expected 2 ranks times the 2 of `outputs[0]`",
            ),
        ];
        for (outcome, text) in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text} (at ")), "{error}");
        }
        group.barrier()
    });
}

/// Equal numbers with different meanings: lengths of buffers on one rank, of the ranks' inputs on the other.
#[test]
fn coalesced_and_uneven_are_different_calls() {
    let errors = outcomes(2, Transport::Shm, Duration::from_secs(5), |group| match group.rank() {
        0 => group.all_gather_coalesced(&[&[1u8][..], &[2]], &mut [&mut [0u8; 2], &mut [0; 2]]),
        _ => group.all_gather_uneven(&[1u8], &mut [0; 2], &[1, 1]),
    });
    for error in errors {
        assert!(matches!(error, Err(CommError::Mismatch { .. } | CommError::CalledOff { .. })), "{error:?}");
    }
}

ranks_test!(ranks_meet_again_after_a_failed_group, 2, {
    for meeting in 0..3 {
        let group = ProcessGroup::from_env()?;
        let mut data = vec![group.rank() as f32; 100];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        assert_eq!(data, [1.0; 100], "meeting {meeting}");
        // The group fails, and the ranks meet again.
        let outcome =
            if group.rank() == 0 { group.barrier() } else { group.all_reduce(&mut data, ReduceOp::Sum) };
        assert!(outcome.is_err());
    }
});

/// The error of an invalid call names the call's place in the program.
#[test]
fn an_invalid_call_is_named_by_its_place_in_the_program() {
    run(2, Transport::Shm, |group| {
        let first = line!() + 2;
        let outcomes = [
            group.broadcast(&mut [0u8], 7),
            group.all_reduce(&mut [0f32], ReduceOp::BitAnd),
            group.all_gather(&[0u8; 2], &mut [0; 3]),
            group.reduce_scatter(&[0u8; 3], &mut [0; 2], ReduceOp::Sum),
            group.gather(&[0u8], None, group.rank()),
            group.send(&[0u8], 9, 0),
            group.recv(&mut [0u8], Source::Rank(9), 0).map(drop),
            group.batch(vec![P2p::send(&[0u8], 9, 0)]).map(drop),
            group.scope(|scope| scope.isend(&[0u8], 9, 0).map(drop)),
            group.new_group(&[]).map(drop),
            group.new_group(&[0, 0]).map(drop),
            group.broadcast_object(Some(&1u8), 9).map(drop),
        ];
        for (line, outcome) in (first..).zip(outcomes) {
            let Err(CommError::Invalid { what }) = outcome else { panic!("{outcome:?}") };
            assert!(what.ends_with(&format!("corners.rs:{line})")), "line {line}: {what}");
        }
        group.barrier()
    });
}
