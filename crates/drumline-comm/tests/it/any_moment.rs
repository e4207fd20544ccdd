//! A rank is killed (SIGKILL) at a random moment of a random program: the others name it within a second, and nothing is left
//! behind. `rank_test` checks that after each run: processes, their listening ports, names in /dev/shm.
//!
//! A failure says which seed it came from; `DRUMLINE_SEED` sets it.

use std::time::{Duration, Instant, SystemTime};

use drumline_comm::{P2p, ProcessGroup, ReduceOp, Source};
use rank_test::anyhow::{Context, Result, ensure};
use rank_test::{Exit, Ranks, ranks_test};

use crate::numbers::Random;

const RANKS: usize = 4;

const JOBS: usize = 20;

/// By then processes have started, met and worked for a while.
const LATEST: Duration = Duration::from_millis(250);

const SOON: Duration = Duration::from_secs(20);

/// How long survivors may take to learn of a death, and what a busy machine may add.
const REPORTED: Duration = Duration::from_secs(1);
const SLACK: Duration = Duration::from_secs(1);

/// Works for `ROUNDS` rounds, or until an error, and prints `verdict: …`.
fn live() -> Result<()> {
    let rounds = std::env::var("ROUNDS").map_or(Ok(u64::MAX), |rounds| rounds.parse())?;
    let outcome = ProcessGroup::from_env()
        .map_err(Into::into)
        .and_then(|group| (0..rounds).try_for_each(|round| work(&group, round)));
    let text = outcome.map_or_else(|error| error.to_string(), |()| "all went well".into());
    println!("verdict: {}", text.replace('\n', " | "));
    Ok(())
}

fn work(group: &ProcessGroup, round: u64) -> Result<()> {
    let (me, ranks) = (group.rank(), group.size());
    match round % 8 {
        0 => sum(group, &mut [0.0; 3]),
        1 => sum(group, &mut vec![0.0; 300_000]),
        2 => sum(group, &mut group.heap_alloc(70_000)?),
        3 => {
            let mut data = vec![me as u16; 9_000];
            group.broadcast(&mut data, round as usize / 8 % ranks)?;
            ensure!(data == [(round as usize / 8 % ranks) as u16; 9_000], "a wrong broadcast");
            Ok(())
        }
        4 => {
            let mut all = vec![0u64; 5 * ranks];
            group.all_gather(&[me as u64; 5], &mut all)?;
            ensure!((0..5 * ranks).all(|i| all[i] == i as u64 / 5), "a wrong all-gather: {all:?}");
            Ok(())
        }
        5 => pass_round(group, round),
        6 => {
            let all: Vec<usize> = (0..ranks).collect();
            sum(&group.new_group(&all)?.context("all are in it")?, &mut [0.0; 100])
        }
        _ => Ok(group.barrier()?),
    }
}

fn sum(group: &ProcessGroup, data: &mut [f32]) -> Result<()> {
    data.fill(group.rank() as f32);
    group.all_reduce(data, ReduceOp::Sum)?;
    let right = (0..group.size()).sum::<usize>() as f32;
    ensure!(data.iter().all(|&x| x == right), "a wrong sum");
    Ok(())
}

/// Messages in a ring, longer than the buffers between two ranks.
fn pass_round(group: &ProcessGroup, tag: u64) -> Result<()> {
    let (me, ranks) = (group.rank(), group.size());
    let left = (me + ranks - 1) % ranks;
    let (mine, mut theirs) = (vec![me as u8; 200_000], vec![0; 200_000]);
    let write = P2p::send(&mine, (me + 1) % ranks, tag);
    group.batch(vec![write, P2p::recv(&mut theirs, Source::Rank(left), tag)])?;
    ensure!(theirs.iter().all(|&x| x == left as u8), "a wrong message");
    Ok(())
}

/// Runs the ranks, kills one, and returns how long the last survivor took to learn of it.
fn kill_one(ranks: &Ranks, victim: usize, delay: Duration) -> Result<Duration> {
    let running = ranks.start()?;
    std::thread::sleep(delay);
    running.kill(victim)?;
    let killed = Instant::now();
    for rank in (0..RANKS).filter(|&rank| rank != victim) {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        ensure!(line.contains(&format!("lost rank {victim}")), "rank {rank}: {line}");
        ensure!(line.contains("killed by signal 9 (SIGKILL)"), "rank {rank}: {line}");
    }
    let late = killed.elapsed();
    ensure!(late < REPORTED + SLACK, "they needed {late:?}");
    let report = running.wait_all(SOON)?;
    for rank in &report.ranks {
        let expected = if rank.rank == victim { Exit::Signal(9) } else { Exit::Code(0) };
        ensure!(rank.exit == expected, "{report}");
    }
    Ok(late)
}

fn seed() -> u64 {
    let given = std::env::var("DRUMLINE_SEED").ok().and_then(|seed| seed.parse().ok());
    let now =
        || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    given.unwrap_or_else(now)
}

fn kill_at_random(ranks: &Ranks, transport: &str) -> Result<()> {
    let ranks = ranks.clone().env([("DRUMLINE_TRANSPORT", transport)]);
    let seed = seed();
    let mut random = Random::new(seed);
    let mut latest = Duration::ZERO;
    for job in 0..JOBS {
        let victim = random.next() as usize % RANKS;
        let delay = LATEST.mul_f64(random.next() as f64 / u64::MAX as f64);
        let late = kill_one(&ranks, victim, delay).with_context(|| {
            format!("DRUMLINE_SEED={seed}, job {job} over {transport}: rank {victim} killed after {delay:?}")
        })?;
        latest = latest.max(late);
    }
    println!("over {transport}: all survivors of {JOBS} jobs learned of it within {latest:?}");
    // The control: nobody is killed.
    let report = ranks.env([("ROUNDS", "80")]).pass()?;
    ensure!(report.ranks.iter().all(|rank| rank.stdout_text().contains("all went well")), "{report}");
    Ok(())
}

ranks_test!(a_death_at_any_moment_over_shared_memory, RANKS, { live()? }, |ranks| {
    kill_at_random(&ranks, "shm")?;
});

ranks_test!(a_death_at_any_moment_over_links, RANKS, { live()? }, |ranks| {
    kill_at_random(&ranks, "tcp")?;
});
