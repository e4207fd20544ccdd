//! All ranks on one core: a waiting rank must yield the core, or else every step costs a time slice of the scheduler.

use std::time::{Duration, Instant};

use drumline_comm::{P2p, ProcessGroup, ReduceOp, Source};
use rank_test::anyhow::{Context, Result, ensure};
use rank_test::ranks_test;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const SMALL_CALLS: usize = 1_000;

/// For all of the work below. A wait that spins until its time slice ends would take some milliseconds per call instead of
/// about ten microseconds.
const LIMIT: Duration = Duration::from_secs(8);

/// From now on this thread, and those it starts, run on the first core only.
fn stay_on_one_core() -> Result<()> {
    let all = sched_getaffinity(None)?;
    let first = (0..CpuSet::MAX_CPU).find(|&core| all.is_set(core)).context("no core at all")?;
    let mut one = CpuSet::new();
    one.set(first);
    Ok(sched_setaffinity(None, &one)?)
}

fn work(group: &ProcessGroup) -> Result<Duration> {
    let begin = Instant::now();
    let (me, ranks) = (group.rank(), group.size());
    let right = (1..=ranks).sum::<usize>() as f32;
    for _ in 0..SMALL_CALLS {
        let mut data = [me as f32 + 1.0; 4];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        ensure!(data == [right; 4], "a wrong sum: {data:?}");
    }
    let small = begin.elapsed();
    for len in [5_000, 300_000] {
        let mut heap = group.heap_alloc::<f32>(len)?;
        let mut data = vec![me as f32 + 1.0; len];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        heap.fill(me as f32 + 1.0);
        group.all_reduce(&mut heap, ReduceOp::Sum)?;
        ensure!(data.iter().chain(heap.iter()).all(|&x| x == right), "a wrong sum of {len}");
    }
    for turn in 0..200 {
        let (mine, mut theirs) = ([me as u64 + turn; 20], [0; 20]);
        let left = (me + ranks - 1) % ranks;
        let write = P2p::send(&mine, (me + 1) % ranks, turn);
        group.batch(vec![write, P2p::recv(&mut theirs, Source::Rank(left), turn)])?;
        ensure!(theirs == [left as u64 + turn; 20], "a wrong message");
    }
    println!("rank {me}: {SMALL_CALLS} small all-reduces took {small:?}, all {:?}", begin.elapsed());
    Ok(begin.elapsed())
}

ranks_test!(
    four_ranks_of_one_core_yield_to_each_other,
    4,
    {
        stay_on_one_core()?;
        let time = work(&ProcessGroup::from_env()?)?;
        ensure!(time < LIMIT, "took {time:?}");
    },
    |ranks| {
        for transport in ["shm", "tcp"] {
            let report = ranks.clone().env([("DRUMLINE_TRANSPORT", transport)]).pass()?;
            print!("{transport}, {}", report.ranks[0].stdout_text());
        }
    }
);

// They had a core each when they met, and cannot know that they no longer do.
ranks_test!(
    ranks_that_are_confined_to_one_core_later_yield_too,
    2,
    {
        let group = ProcessGroup::from_env()?;
        work(&group)?;
        stay_on_one_core()?;
        let time = work(&group)?;
        ensure!(time < LIMIT, "took {time:?}");
    },
    |ranks| {
        for transport in ["shm", "tcp"] {
            let report = ranks.clone().env([("DRUMLINE_TRANSPORT", transport)]).pass()?;
            print!("{transport}, {}", report.ranks[0].stdout_text());
        }
    }
);
