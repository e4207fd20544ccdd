//! The rank that hosts the store is frozen (SIGSTOP): ranks that do not need the store continue, ranks that do get an error in
//! time, and all ranks can leave.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, ProcessGroup, ReduceOp};
use drumline_rendezvous::InitOptions;
use rank_test::anyhow::{Context, Result, ensure};
use rank_test::{Ranks, fault, ranks_test};

const SOON: Duration = Duration::from_secs(20);

/// The deadline of every call.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long leaving may take if nobody answers.
const GOODBYE: Duration = Duration::from_secs(2);

/// For a busy machine.
const SLACK: Duration = Duration::from_secs(1);

/// Rank 0 hosts the store, and is frozen while it idles; the others continue without it, for longer than any deadline.
fn live() -> Result<()> {
    let method = std::env::var("MEETING")?;
    let member = drumline_rendezvous::init(&method, InitOptions::default())?;
    let world = ProcessGroup::new(member, GroupOptions::from_env()?)?;
    let pair = world.new_group(&[1, 2])?;
    // Links are made when first needed, and ranks find each other through the store.
    pair.iter().try_for_each(sum)?;
    sum(&world)?;
    match pair {
        Some(pair) => continue_without_the_host(world, pair),
        None => {
            fault::point(1);
            println!("continued");
            println!("barrier: {}", text(world.barrier()));
            println!("second barrier: {}", text(world.barrier()));
            Ok(())
        }
    }
}

fn continue_without_the_host(world: ProcessGroup, pair: ProcessGroup) -> Result<()> {
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    for _ in 0..15 {
        (0..20).try_for_each(|_| sum(&pair))?;
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("worked on: {:?}", begin.elapsed());
    let begin = Instant::now();
    let child = pair.new_group(&[0, 1]).and_then(|child| match child {
        Some(child) => child.barrier(),
        None => Ok(()),
    });
    println!("new group after {} ms: {}", begin.elapsed().as_millis(), text(child));
    let begin = Instant::now();
    let outcome = world.barrier();
    println!("of all after {} ms: {}", begin.elapsed().as_millis(), text(outcome));
    // This succeeds only in the control.
    let _ = world.barrier();
    let begin = Instant::now();
    drop((pair, world));
    println!("left after {} ms", begin.elapsed().as_millis());
    Ok(())
}

fn text<T, E: std::fmt::Display>(outcome: std::result::Result<T, E>) -> String {
    outcome.map_or_else(|error| error.to_string().replace('\n', " | "), |_| "all went well".into())
}

fn sum(group: &ProcessGroup) -> Result<()> {
    let mut data = vec![group.rank() as u32 + 1; 5_000];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let right = (1..=group.size() as u32).sum::<u32>();
    ensure!(data.iter().all(|&x| x == right), "a wrong sum");
    Ok(())
}

/// Rank 0 hosts the store at an address that it writes to a file.
pub(crate) fn meeting_in_a_file(
    ranks: &Ranks,
    transport: &str,
    test: impl FnOnce(Ranks) -> Result<()>,
) -> Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("drumline-frozen-{}-{number}", std::process::id()));
    let pairs = [
        ("MEETING", format!("file://{}", path.display())),
        ("DRUMLINE_TRANSPORT", transport.to_string()),
        ("DRUMLINE_TIMEOUT", format!("{}ms", TIMEOUT.as_millis())),
    ];
    let outcome = test(ranks.clone().env(pairs));
    // A host that was killed leaves the file.
    let _ = std::fs::remove_file(path);
    outcome
}

/// The number in a line such as `left after 12 ms`.
fn duration(line: &str) -> Result<Duration> {
    let number = line.split(" ms").next().and_then(|text| text.split(' ').next_back());
    Ok(Duration::from_millis(number.context("no number")?.parse()?))
}

fn freeze_the_host(ranks: &Ranks, transport: &str) -> Result<()> {
    let running = ranks.clone().fault("rank=0,step=1,stop").start()?;
    running.wait_for_line(0, "drumline: fault", SOON)?;
    running.wait_until_stopped(0, SOON)?;
    for rank in [1, 2] {
        running.wait_for_line(rank, "worked on", SOON)?;
        let child = running.wait_for_line(rank, "new group", SOON)?;
        let barrier = running.wait_for_line(rank, "of all", SOON)?;
        let left = running.wait_for_line(rank, "left", SOON)?;
        let all = format!("rank {rank} over {transport}: {child}; {barrier}; {left}");
        ensure!(!child.ends_with("all went well"), "a group without a store: {all}");
        ensure!(transport == "tcp" || child.contains("rank 0: ("), "the host is not named: {all}");
        ensure!(barrier.contains("rank 0: (") && barrier.contains("stopped"), "the host is not named: {all}");
        ensure!(duration(&child)? < 2 * TIMEOUT + SLACK, "{all}");
        ensure!(duration(&barrier)? < TIMEOUT + SLACK, "{all}");
        ensure!(duration(&left)? < GOODBYE + SLACK, "{all}");
        running.wait_rank(rank, SLACK)?;
    }
    running.resume(0)?;
    running.wait_for_line(0, "continued", SOON)?;
    // The others were in the first barrier when they gave up.
    let line = running.wait_for_line(0, "second barrier: ", SOON)?;
    ensure!(!line.ends_with("all went well"), "{line}");
    ensure!(running.wait_all(SOON)?.is_success());
    Ok(())
}

/// The control: nobody is frozen, and all goes well.
fn do_not_freeze_the_host(ranks: &Ranks) -> Result<()> {
    let report = ranks.clone().env([("DRUMLINE_TIMEOUT", "20s")]).pass()?;
    for rank in [1, 2] {
        let text = report.ranks[rank].stdout_text();
        ensure!(text.matches("all went well").count() == 2, "{text}");
    }
    Ok(())
}

ranks_test!(the_others_continue_without_the_stores_host, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        meeting_in_a_file(&ranks, transport, |ranks| freeze_the_host(&ranks, transport))?;
        meeting_in_a_file(&ranks, transport, |ranks| do_not_freeze_the_host(&ranks))?;
    }
});
