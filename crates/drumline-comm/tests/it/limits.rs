//! Very long buffers, and invalid arguments: these are errors, and nothing is sent.

use drumline_comm::{CommError, ProcessGroup, ReduceOp, Transport};

use crate::threads::{BOTH, Result, run};

/// More bytes than an `i32` can count, and not a round number.
const HUGE: usize = (1 << 31) + 8191;

/// Whether every byte is `byte`, compared in large pieces.
fn all_are(data: &[u8], byte: u8) -> bool {
    let pattern = vec![byte; 1 << 20];
    data.chunks(1 << 20).all(|chunk| *chunk == pattern[..chunk.len()])
}

#[test]
fn more_than_two_to_the_31_bytes() {
    run(2, Transport::Shm, |group| {
        let me = group.rank();
        let mut data = vec![3 + me as u8; HUGE];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        assert!(all_are(&data, 7));
        let half = HUGE / 2;
        let input = vec![5 + me as u8; half];
        group.all_gather(&input, &mut data[..2 * half])?;
        assert!(all_are(&data[..half], 5) && all_are(&data[half..2 * half], 6));
        Ok(())
    });
}

type Act = fn(&ProcessGroup) -> Result;

/// An invalid call, and its error.
const INVALID: [(Act, &str); 16] = [
    (|group| group.broadcast(&mut [0u8], 2), "root 2 is not in group `world` of 2 ranks"),
    (|group| group.reduce(&mut [0u8], 9, ReduceOp::Sum), "root 9 is not in group"),
    (|group| group.gather(&[0u8], None, 2), "root 2 is not in group"),
    (|group| group.scatter(None, &mut [0u8], 2), "root 2 is not in group"),
    (
        |group| group.all_reduce(&mut [0f32], ReduceOp::BitXor),
        "bxor is not defined for f32; try an integer type",
    ),
    (|group| group.all_reduce(&mut [true], ReduceOp::Avg), "avg is not defined for bool; try Sum"),
    (|group| group.reduce(&mut [0f64], 0, ReduceOp::BitAnd), "band is not defined for f64"),
    (|group| group.all_gather(&[0u8; 2], &mut [0; 5]), "`output` has 5 elements, expected 4 for 2 ranks"),
    (
        |group| group.all_gather_uneven(&[0u8], &mut [0; 2], &[2]),
        "`counts` has 1 entries, the group has 2 ranks",
    ),
    (|group| group.all_gather_uneven(&[0u8], &mut [0; 6], &[3, 3]), "has 1 elements, counts say 3"),
    (
        |group| group.reduce_scatter(&[0u8; 3], &mut [0; 2], ReduceOp::Sum),
        "`input` has 3 elements, expected 4",
    ),
    (
        |group| group.reduce_scatter_uneven(&[0u8; 4], &mut [0; 1], &[2, 2], ReduceOp::Sum),
        "has 1 elements, counts say 2",
    ),
    (|group| group.all_to_all(&[0u8; 3], &mut [0; 3]), "try all_to_all_uneven"),
    (|group| group.all_to_all_uneven(&[0u8; 2], &[1, 1], &mut [0; 2], &[2]), "`receives` has 1 entries"),
    (
        |group| group.all_to_all_uneven(&[0u8; 3], &[1, 1], &mut [0; 2], &[1, 1]),
        "`input` has 3 elements, expected 2",
    ),
    (|group| group.heap_alloc::<f64>(usize::MAX / 4).map(drop), "is too long"),
];

#[test]
fn invalid_arguments_are_errors_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            for (index, (act, expected)) in INVALID.iter().enumerate() {
                // Only one rank makes the mistake, so nothing may have been sent.
                if index % 3 == group.rank() || index % 3 == 2 {
                    match act(group) {
                        Err(CommError::Invalid { what }) => assert!(what.contains(expected), "{what}"),
                        other => panic!("{expected}: {other:?}"),
                    }
                }
                let mut x = [1u8];
                group.all_reduce(&mut x, ReduceOp::Sum)?;
                assert_eq!(x, [2]);
            }
            Ok(())
        });
    }
}

#[test]
fn a_root_without_a_buffer_is_an_error() {
    run(2, Transport::Auto, |group| {
        if group.rank() == 1 {
            for outcome in [
                group.gather(&[0u8], None, 1),
                group.scatter(None, &mut [0u8], 1),
                group.gather(&[0u8], Some(&mut [0; 3]), 1),
                group.scatter(Some(&[0u8; 5]), &mut [0; 2], 1),
            ] {
                assert!(matches!(outcome, Err(CommError::Invalid { .. })), "{outcome:?}");
            }
        }
        // Buffers of the other ranks are ignored.
        let mut all = [9u8; 2];
        group.gather(&[group.rank() as u8], Some(&mut all), 1)?;
        assert_eq!(all, if group.rank() == 1 { [0, 1] } else { [9, 9] });
        group.barrier()
    });
}

#[test]
fn too_much_memory_is_an_error_on_all_ranks_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            for bytes in [1 << 46, usize::MAX / 2, usize::MAX] {
                let error = group.heap_alloc::<u8>(bytes).expect_err("no machine has that much").to_string();
                assert!(error.contains("memory") || error.contains("too long"), "{error}");
                group.barrier()?;
            }
            let mut data = group.heap_alloc::<u8>(40_000)?;
            data.fill(1);
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            assert!(data.iter().all(|&x| x == 2));
            Ok(())
        });
    }
}
