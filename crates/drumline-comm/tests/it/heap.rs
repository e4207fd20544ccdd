//! Buffers of the symmetric heap: whether ranks pass heap buffers or private ones, the result is the same.

use std::ops::Range;

use drumline_comm::{HeapBuffer, ProcessGroup, ReduceOp, Transport, bf16, f16};

use crate::numbers::{Number, Random, buffer, check, value};
use crate::threads::{BOTH, Result, run};

/// Bytes on both sides of every change of algorithm.
const BYTES: [usize; 9] = [8, 48, 56, 4096, 32760, 32768, 32776, 65536, 300_008];

fn sum(ranks: usize, i: usize) -> i64 {
    (0..ranks).map(|rank| value(rank, i)).sum()
}

fn filled<T: Number>(group: &ProcessGroup, len: usize) -> Result<HeapBuffer<T>> {
    let mut data = group.heap_alloc::<T>(len)?;
    assert!(data.iter().all(|&x| x == T::of(0)), "a new buffer holds zeros");
    data.copy_from_slice(&buffer::<T>(group.rank(), len));
    Ok(data)
}

/// Every collective that knows the heap, with input and output there.
fn every_collective<T: Number>(group: &ProcessGroup, len: usize) -> Result {
    let (me, ranks) = (group.rank(), group.size());
    let what = |name: &str| format!("{name} of {len} {} on {ranks} ranks", T::DTYPE);
    let mut data = filled::<T>(group, len)?;
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    check(&data, |i| T::of(sum(ranks, i)), || what("all_reduce"));

    for root in 0..ranks {
        data.copy_from_slice(&buffer::<T>(me, len));
        group.broadcast(&mut data, root)?;
        check(&data, |i| T::of(value(root, i)), || what("broadcast"));
    }

    data.copy_from_slice(&buffer::<T>(me, len));
    let mut all = group.heap_alloc::<T>(len * ranks)?;
    group.all_gather(&data, &mut all)?;
    check(&all, |i| T::of(value(i / len, i % len)), || what("all_gather"));
    check(&data, |i| T::of(value(me, i)), || what("input of all_gather"));

    all.copy_from_slice(&buffer::<T>(me, len * ranks));
    group.reduce_scatter(&all, &mut data, ReduceOp::Sum)?;
    check(&data, |i| T::of(sum(ranks, me * len + i)), || what("reduce_scatter"));
    check(&all, |i| T::of(value(me, i)), || what("input of reduce_scatter"));

    group.reduce_scatter_in_place(&mut all, ReduceOp::Sum)?;
    let reduced = |i: usize| if i / len == me { sum(ranks, i) } else { value(me, i) };
    check(&all, |i| T::of(reduced(i)), || what("reduce_scatter_in_place"));
    all[..].fill(T::of(0));
    all[me * len..][..len].copy_from_slice(&buffer::<T>(me, len));
    group.all_gather_in_place(&mut all)?;
    check(&all, |i| T::of(value(i / len, i % len)), || what("all_gather_in_place"));
    Ok(())
}

#[test]
fn all_collectives_around_every_threshold() {
    for transport in BOTH {
        for ranks in 1..=5 {
            run(ranks, transport, |group| {
                for bytes in BYTES {
                    every_collective::<f32>(group, bytes / 4)?;
                }
                for bytes in [4096, 32768, 70_000] {
                    every_collective::<f64>(group, bytes / 8)?;
                    every_collective::<bf16>(group, bytes / 2)?;
                    every_collective::<f16>(group, bytes / 2)?;
                    every_collective::<i64>(group, bytes / 8)?;
                    every_collective::<u8>(group, bytes)?;
                }
                Ok(())
            });
        }
    }
}

/// All-reduces `range` of a buffer and checks that nothing outside it has changed.
fn part_only(group: &ProcessGroup, data: &mut [f32], range: Range<usize>) -> Result {
    let (len, start, me) = (data.len(), range.start, group.rank());
    data[range.clone()].copy_from_slice(&buffer::<f32>(me, range.len()));
    group.all_reduce(&mut data[range.clone()], ReduceOp::Sum)?;
    let want = |i: usize| {
        if range.contains(&i) { sum(group.size(), i - start) as f32 } else { value(me, i) as f32 }
    };
    check(data, want, || format!("{range:?} of {len}"));
    Ok(())
}

#[test]
fn a_part_of_a_buffer_is_reduced_alone() {
    for ranks in [2, 3, 5] {
        run(ranks, Transport::Shm, |group| {
            let len = 40_000;
            for range in [0..10_000, 1..9_000, 777..20_778, 30_000..40_000, 16..17, 5..5, 0..40_000] {
                let mut data = filled::<f32>(group, len)?;
                part_only(group, &mut data, range)?;
            }
            Ok(())
        });
    }
}

#[test]
fn the_same_buffer_at_other_offsets_on_other_ranks() {
    run(3, Transport::Shm, |group| {
        let mut data = filled::<f32>(group, 50_000)?;
        let start = 1000 * group.rank();
        part_only(group, &mut data, start..start + 30_000)
    });
}

#[test]
fn heap_on_some_ranks_and_private_on_others() {
    for private in 0..3 {
        run(3, Transport::Shm, move |group| {
            let len = 30_000;
            let mut heap = filled::<f32>(group, len)?;
            let mut own = buffer::<f32>(group.rank(), len);
            let data = if group.rank() == private { &mut own[..] } else { &mut heap[..] };
            group.all_reduce(data, ReduceOp::Sum)?;
            check(data, |i| sum(3, i) as f32, || format!("rank {private} private"));
            data.copy_from_slice(&buffer::<f32>(group.rank(), len));
            group.broadcast(data, 1)?;
            check(data, |i| value(1, i) as f32, || format!("rank {private} private"));
            let mut all = vec![0.0; 3 * len];
            group.all_gather(data, &mut all)?;
            check(&all, |i| value(1, i % len) as f32, || format!("rank {private} private"));
            Ok(())
        });
    }
}

#[test]
fn different_regions_on_different_ranks() {
    run(2, Transport::Shm, |group| {
        let (mut one, mut two) = (filled::<f32>(group, 20_000)?, filled::<f32>(group, 20_000)?);
        let data = if group.rank() == 0 { &mut one } else { &mut two };
        group.all_reduce(data, ReduceOp::Sum)?;
        check(data, |i| sum(2, i) as f32, || "crossed".into());
        let other = if group.rank() == 0 { &two } else { &one };
        check(other, |i| value(group.rank(), i) as f32, || "the other buffer".into());
        Ok(())
    });
}

#[test]
fn many_regions_that_come_and_go() {
    for ranks in [1, 2, 4] {
        run(ranks, Transport::Shm, |group| {
            let mut random = Random::new(7);
            let mut held = Vec::new();
            for _ in 0..120 {
                if held.len() > 10 {
                    held.swap_remove(random.below(held.len()));
                }
                held.push(filled::<f32>(group, 1 + random.below(20_000))?);
                let index = random.below(held.len());
                let (data, ranks) = (&mut held[index], group.size());
                let len = data.len();
                data.copy_from_slice(&buffer::<f32>(group.rank(), len));
                group.all_reduce(data, ReduceOp::Sum)?;
                check(data, |i| sum(ranks, i) as f32, || format!("buffer of {len}"));
            }
            Ok(())
        });
    }
}

#[test]
fn an_empty_buffer_and_one_that_outlives_its_group() {
    let buffers = run(2, Transport::Shm, |group| {
        let mut nothing = group.heap_alloc::<f32>(0)?;
        group.all_reduce(&mut nothing, ReduceOp::Sum)?;
        let mut data = group.heap_alloc::<u32>(10_000)?;
        data.fill(group.rank() as u32 + 1);
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        Ok(data)
    });
    assert!(buffers.iter().all(|buffer| buffer.iter().all(|&x| x == 3)));
}

#[test]
fn a_subgroup_treats_its_parents_buffer_as_private() {
    run(3, Transport::Shm, |group| {
        let mut data = filled::<f32>(group, 20_000)?;
        if let Some(pair) = group.new_group(&[2, 0])? {
            pair.all_reduce(&mut data, ReduceOp::Sum)?;
            check(&data, |i| (value(0, i) + value(2, i)) as f32, || "in the child".into());
        }
        group.barrier()
    });
}
