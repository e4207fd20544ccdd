//! Groups that form, fail and form again a thousand times: memory, descriptors and threads do not grow.

use std::time::Duration;

use drumline_comm::{CommError, GroupOptions, LocalGroup, ProcessGroup, ReduceOp, Source, Transport};
use rank_test::anyhow::{Result, ensure};
use rank_test::ranks_test;

/// Cycles before the first measurement: what is set up once exists by then.
const WARM_UP: usize = 100;
const CYCLES: usize = 1000;

/// The resources that this process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    kib: usize,
    descriptors: usize,
    threads: usize,
}

impl Held {
    fn now() -> Result<Self> {
        let pages: usize =
            std::fs::read_to_string("/proc/self/statm")?.split(' ').nth(1).unwrap_or("").parse()?;
        let (descriptors, threads) = (count("/proc/self/fd")?, count("/proc/self/task")?);
        Ok(Self { kib: pages * rustix::param::page_size() / 1024, descriptors, threads })
    }

    /// The least of several measurements: a thread that is done may take a moment to end.
    fn at_rest() -> Result<Self> {
        let mut least = Self::now()?;
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(5));
            let now = Self::now()?;
            least.descriptors = least.descriptors.min(now.descriptors);
            least.threads = least.threads.min(now.threads);
        }
        Ok(least)
    }

    /// An error if this is more than before.
    fn is_flat_since(self, before: Held) -> Result<()> {
        ensure!(self.descriptors <= before.descriptors, "descriptors: {before:?}, then {self:?}");
        ensure!(self.threads <= before.threads, "threads: {before:?}, then {self:?}");
        ensure!(self.kib <= before.kib + 2048, "memory: {before:?}, then {self:?}");
        Ok(())
    }
}

fn count(folder: &str) -> Result<usize> {
    Ok(std::fs::read_dir(folder)?.count())
}

/// Two ranks form a group, use every part of it, make different calls, and give it up.
fn one_cycle(index: usize) {
    let transport = if index.is_multiple_of(2) { Transport::Shm } else { Transport::Tcp };
    let options = GroupOptions { transport, timeout: Duration::from_secs(20), ..GroupOptions::default() };
    let outcomes = LocalGroup::outcomes(2, &options, |group| use_and_disagree(&group));
    for outcome in outcomes {
        let text = outcome.expect_err("the ranks disagree").to_string();
        assert!(text.contains("made different calls"), "{text}");
    }
}

fn use_and_disagree(group: &ProcessGroup) -> Result<(), CommError> {
    let mut heap = group.heap_alloc::<f32>(10_000)?;
    group.all_reduce(&mut heap, ReduceOp::Sum)?;
    let child = group.new_group(&[1, 0])?.expect("both are in it");
    child.all_reduce(&mut vec![1u8; 100_000], ReduceOp::Max)?;
    group.scope(|scope| scope.start(|group| group.barrier()).wait())?;
    let other = 1 - group.rank();
    group.send(&[1u8; 100], other, 0)?;
    group.recv(&mut [0u8; 100], Source::Rank(other), 0)?;
    // Nobody receives this one.
    group.send(&[2u8; 1000], other, 1)?;
    match group.rank() {
        0 => group.barrier(),
        _ => group.all_reduce(&mut [0u8], ReduceOp::Sum),
    }
}

/// Runs the cycles and compares; leaks one descriptor in each cycle if `LEAK` is set.
fn run_cycles() -> Result<()> {
    let leak = std::env::var("LEAK").is_ok();
    let mut before = Held::now()?;
    for index in 0..WARM_UP + if leak { 10 } else { CYCLES } {
        if index == WARM_UP {
            before = Held::now()?;
        }
        one_cycle(index);
        if leak {
            std::mem::forget(std::fs::File::open("/dev/null")?);
        }
    }
    Held::at_rest()?.is_flat_since(before)
}

ranks_test!(a_thousand_cycles_leave_nothing, 1, { run_cycles()? }, |ranks| {
    let control = ranks.clone().env([("LEAK", "1")]).pass();
    let text = control.expect_err("a leak is noticed").to_string();
    ensure!(text.contains("descriptors: "), "{text}");
    ranks.pass()?;
});

/// Makes and drops subgroups of one long-lived group.
fn subgroups_come_and_go() -> Result<()> {
    for transport in [Transport::Shm, Transport::Tcp] {
        let options = GroupOptions { transport, timeout: Duration::from_secs(20), ..GroupOptions::default() };
        let cycle = |group: &ProcessGroup| {
            let child = group.new_group(&[0, 1])?.expect("both are in it");
            child.all_reduce(&mut [1u8; 1000], ReduceOp::Sum)?;
            let other = 1 - group.rank();
            child.send(&[1u8], other, 0)?;
            child.recv(&mut [0u8], Source::Any, 0)?;
            drop(child.heap_alloc::<u8>(5000)?);
            drop(child);
            group.barrier()
        };
        // Both are idle while one of them measures, since measuring needs a descriptor.
        let look = |group: &ProcessGroup| {
            group.barrier()?;
            let held = (group.rank() == 0).then(Held::at_rest);
            group.barrier()?;
            Ok::<_, CommError>(held)
        };
        let outcomes = LocalGroup::run_with(2, &options, |group| {
            (0..WARM_UP).try_for_each(|_| cycle(&group))?;
            let before = look(&group)?;
            (0..400).try_for_each(|_| cycle(&group))?;
            Ok(before.zip(look(&group)?))
        });
        for (before, now) in outcomes?.into_iter().flatten() {
            now?.is_flat_since(before?)?;
        }
    }
    Ok(())
}

ranks_test!(subgroups_leave_nothing, 1, { subgroups_come_and_go()? });
