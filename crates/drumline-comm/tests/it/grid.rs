//! Every collective × ranks × lengths × types × transport, against closed-form answers.
//!
//! Element `i` of rank `r` is the small number `value(r, i)`, so that every expected result is exact in every type.

use std::time::Duration;

use drumline_comm::{
    CommError, DType, GroupOptions, LocalGroup, ProcessGroup, ReduceOp, Transport, bf16, f16,
};

use crate::numbers::{Number, buffer, check, value};

const RANKS: [usize; 6] = [1, 2, 3, 4, 5, 8];
const LENGTHS: [usize; 8] = [0, 1, 3, 12, 13, 100, 1_000, 70_001];

type Result<T = ()> = std::result::Result<T, CommError>;

fn options(transport: Transport) -> GroupOptions {
    GroupOptions { transport, timeout: Duration::from_secs(60), ..GroupOptions::default() }
}

fn on_grid(transport: Transport, lengths: &[usize], test: impl Fn(&ProcessGroup, usize) -> Result + Sync) {
    for ranks in RANKS {
        LocalGroup::run_with(ranks, &options(transport), |group| {
            lengths.iter().try_for_each(|&len| test(&group, len))
        })
        .unwrap_or_else(|error| panic!("{ranks} ranks over {transport:?}: {error}"));
    }
}

fn expected_reduction(op: ReduceOp, ranks: usize, i: usize) -> i64 {
    let values = (0..ranks).map(|rank| value(rank, i));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Avg => values.sum::<i64>() / ranks as i64,
        ReduceOp::Prod => values.product(),
        ReduceOp::Min => values.min().unwrap_or(0),
        ReduceOp::Max => values.max().unwrap_or(0),
        ReduceOp::BitAnd => values.fold(-1, |a, b| a & b),
        ReduceOp::BitOr => values.fold(0, |a, b| a | b),
        ReduceOp::BitXor => values.fold(0, |a, b| a ^ b),
        ReduceOp::PreMulSum(factor) => values.map(|value| (value as f64 * factor) as i64).sum(),
    }
}

/// Every collective, on `len` elements a rank.
pub(crate) fn every_collective<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    reductions::<T>(group, len)?;
    moves::<T>(group, len)?;
    reduce_scatters::<T>(group, len)?;
    coalesced::<T>(group, len)
}

pub(crate) fn reductions<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    use ReduceOp::*;
    let float = matches!(T::DTYPE, DType::F64 | DType::F32 | DType::F16 | DType::Bf16);
    let ops: &[ReduceOp] = match T::DTYPE {
        DType::Bool => &[Sum, Prod, Min, Max, BitAnd, BitOr, BitXor],
        _ if float => &[Sum, Min, Max, PreMulSum(2.0)],
        _ => &[Sum, Avg, Prod, Min, Max, BitAnd, BitOr, BitXor, PreMulSum(2.0)],
    };
    let ranks = group.size();
    for &op in ops {
        let want = |i: usize| match T::DTYPE {
            DType::Bool => {
                let truths = || (0..ranks).map(|rank| value(rank, i) % 2 != 0);
                T::of(match op {
                    Sum | Max | BitOr => truths().any(|x| x),
                    BitXor => truths().fold(false, |a, b| a ^ b),
                    _ => truths().all(|x| x),
                } as i64)
            }
            // Wrapping in the narrow type is the same as wrapping once at the end.
            _ => T::of(expected_reduction(op, ranks, i)),
        };
        let mut data = buffer::<T>(group.rank(), len);
        group.all_reduce(&mut data, op)?;
        check(&data, want, || format!("all_reduce {op} of {len} {}", T::DTYPE));
        let root = len % ranks;
        let mut data = buffer::<T>(group.rank(), len);
        group.reduce(&mut data, root, op)?;
        if group.rank() == root {
            check(&data, want, || format!("reduce {op} of {len} {}", T::DTYPE));
        } else {
            assert_eq!(data, buffer::<T>(group.rank(), len), "others keep their data");
        }
    }
    Ok(())
}

macro_rules! for_all_types {
    ($function:ident, $group:expr, $len:expr) => {{
        $function::<f64>($group, $len)?;
        $function::<f32>($group, $len)?;
        $function::<f16>($group, $len)?;
        $function::<bf16>($group, $len)?;
        $function::<i8>($group, $len)?;
        $function::<i16>($group, $len)?;
        $function::<i32>($group, $len)?;
        $function::<i64>($group, $len)?;
        $function::<u8>($group, $len)?;
        $function::<u16>($group, $len)?;
        $function::<u32>($group, $len)?;
        $function::<u64>($group, $len)?;
        $function::<bool>($group, $len)?;
        Ok(())
    }};
}

#[test]
fn reductions_over_shared_memory() {
    on_grid(Transport::Shm, &LENGTHS, |group, len| for_all_types!(reductions, group, len));
}

#[test]
fn reductions_over_tcp() {
    on_grid(Transport::Tcp, &LENGTHS[..7], |group, len| for_all_types!(reductions, group, len));
    on_grid(Transport::Tcp, &[70_001], reductions::<f32>);
}

pub(crate) fn moves<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    let (me, ranks) = (group.rank(), group.size());
    let mine = buffer::<T>(me, len);
    let root = len % ranks;
    let at = |counts: &[usize], i: usize| {
        let mut start = 0;
        for (rank, &count) in counts.iter().enumerate() {
            if i < start + count {
                return (rank, i - start);
            }
            start += count;
        }
        unreachable!()
    };

    let mut data = mine.clone();
    group.broadcast(&mut data, root)?;
    assert_eq!(data, buffer::<T>(root, len), "broadcast of {len}");

    let even = vec![len; ranks];
    let from = |counts: &[usize], i: usize| {
        let (rank, j) = at(counts, i);
        T::of(value(rank, j))
    };
    let mut all = vec![T::of(0); len * ranks];
    group.all_gather(&mine, &mut all)?;
    check(&all, |i| from(&even, i), || format!("all_gather of {len}"));
    let mut placed = vec![T::of(0); len * ranks];
    placed[me * len..][..len].copy_from_slice(&mine);
    group.all_gather_in_place(&mut placed)?;
    assert_eq!(placed, all, "all_gather_in_place of {len}");
    let before = buffer::<T>(me, len * ranks);
    let mut reduced = before.clone();
    group.reduce_scatter_in_place(&mut reduced, ReduceOp::Max)?;
    let mut largest = vec![T::of(0); len];
    group.reduce_scatter(&before, &mut largest, ReduceOp::Max)?;
    let mut expected = before;
    expected[me * len..][..len].copy_from_slice(&largest);
    assert_eq!(reduced, expected, "reduce_scatter_in_place of {len}");

    let uneven: Vec<usize> =
        (0..ranks).map(|rank| if rank % 3 == 1 { 0 } else { len / (rank + 1) }).collect();
    let mut some = vec![T::of(0); uneven.iter().sum()];
    group.all_gather_uneven(&mine[..uneven[me]], &mut some, &uneven)?;
    check(&some, |i| from(&uneven, i), || format!("all_gather_uneven of {len}"));

    let mut all = vec![T::of(0); len * ranks];
    group.gather(&mine, (me == root).then_some(&mut all[..]), root)?;
    if me == root {
        check(&all, |i| from(&even, i), || format!("gather of {len}"));
    }

    let whole = buffer::<T>(root, len * ranks);
    let mut part = vec![T::of(0); len];
    group.scatter((me == root).then_some(&whole[..]), &mut part, root)?;
    check(&part, |i| T::of(value(root, me * len + i)), || format!("scatter of {len}"));

    let whole = buffer::<T>(me, len * ranks);
    let mut turned = vec![T::of(0); len * ranks];
    group.all_to_all(&whole, &mut turned)?;
    check(&turned, |i| T::of(value(i / len, me * len + i % len)), || format!("all_to_all of {len}"));

    let cell = |from: usize, to: usize| len * (from + 2 * to) / (3 * ranks);
    let sends: Vec<usize> = (0..ranks).map(|to| cell(me, to)).collect();
    let receives: Vec<usize> = (0..ranks).map(|from| cell(from, me)).collect();
    let input = buffer::<T>(me, sends.iter().sum());
    let mut output = vec![T::of(0); receives.iter().sum()];
    group.all_to_all_uneven(&input, &sends, &mut output, &receives)?;
    let sent = |i: usize| {
        let (rank, j) = at(&receives, i);
        let start: usize = (0..me).map(|to| cell(rank, to)).sum();
        T::of(value(rank, start + j))
    };
    check(&output, sent, || format!("all_to_all_uneven of {len}"));
    Ok(())
}

fn reduce_scatters<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    let (me, ranks) = (group.rank(), group.size());
    let input = buffer::<T>(me, len * ranks);
    let mut output = vec![T::of(0); len];
    group.reduce_scatter(&input, &mut output, ReduceOp::Max)?;
    let want = |i| T::of(expected_reduction(ReduceOp::Max, ranks, i));
    check(&output, |i| want(me * len + i), || format!("reduce_scatter of {len}"));

    let counts: Vec<usize> = (0..ranks).map(|rank| if rank == 1 { 0 } else { len / (rank + 1) }).collect();
    let start: usize = counts[..me].iter().sum();
    let input = buffer::<T>(me, counts.iter().sum());
    let mut output = vec![T::of(0); counts[me]];
    group.reduce_scatter_uneven(&input, &mut output, &counts, ReduceOp::Max)?;
    check(&output, |i| want(start + i), || format!("reduce_scatter_uneven of {len}"));
    group.barrier()
}

/// The coalesced calls, on buffers of several lengths at once.
fn coalesced<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    let (me, ranks) = (group.rank(), group.size());
    let lens = [len, 0, len / 2 + 1, 7];
    let make = |times: usize| lens.map(|len| buffer::<T>(me, len * times));
    let largest = |i| T::of(expected_reduction(ReduceOp::Max, ranks, i));
    let what = |name: &str, len: usize| format!("{name}_coalesced of {len} among {lens:?}");

    let mut data = make(1);
    group.all_reduce_coalesced(&mut data.each_mut().map(Vec::as_mut_slice), ReduceOp::Max)?;
    data.iter().for_each(|data| check(data, largest, || what("all_reduce", data.len())));

    let (mut data, root) = (make(1), len % ranks);
    group.broadcast_coalesced(&mut data.each_mut().map(Vec::as_mut_slice), root)?;
    assert_eq!(data, lens.map(|len| buffer::<T>(root, len)), "{}", what("broadcast", len));

    let (inputs, mut outputs) = (make(1), make(ranks));
    let inputs = inputs.each_ref().map(Vec::as_slice);
    group.all_gather_coalesced(&inputs, &mut outputs.each_mut().map(Vec::as_mut_slice))?;
    for (output, len) in outputs.iter().zip(lens) {
        check(output, |i| T::of(value(i / len, i % len)), || what("all_gather", len));
    }

    let (inputs, mut outputs) = (make(ranks), make(1));
    let inputs = inputs.each_ref().map(Vec::as_slice);
    group.reduce_scatter_coalesced(&inputs, &mut outputs.each_mut().map(Vec::as_mut_slice), ReduceOp::Max)?;
    for output in &outputs {
        let len = output.len();
        check(output, |i| largest(me * len + i), || what("reduce_scatter", len));
    }
    group.all_gather_coalesced::<T>(&[], &mut [])
}

#[test]
fn coalesced_over_both() {
    for transport in [Transport::Shm, Transport::Tcp] {
        on_grid(transport, &LENGTHS, |group, len| {
            coalesced::<f32>(group, len)?;
            coalesced::<i8>(group, len)?;
            coalesced::<f16>(group, len)
        });
    }
}

#[test]
fn moves_over_shared_memory() {
    on_grid(Transport::Shm, &LENGTHS[..7], |group, len| for_all_types!(moves, group, len));
    on_grid(Transport::Shm, &[70_001, 200_003], moves::<f32>);
}

#[test]
fn moves_over_tcp() {
    on_grid(Transport::Tcp, &LENGTHS[..7], |group, len| {
        moves::<f32>(group, len)?;
        moves::<bool>(group, len)
    });
    on_grid(Transport::Tcp, &[70_001], moves::<f64>);
}

#[test]
fn reduce_scatters_over_both() {
    for transport in [Transport::Shm, Transport::Tcp] {
        on_grid(transport, &LENGTHS, |group, len| {
            reduce_scatters::<f32>(group, len)?;
            reduce_scatters::<u8>(group, len)?;
            reduce_scatters::<bf16>(group, len)
        });
    }
}
