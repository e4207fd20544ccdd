//! Ranks that are frozen (SIGSTOP) at every point of their lives: the others name them at the deadline, and do not hang. A rank
//! that continues in time (SIGCONT) is waited for, and the results are right.
//!
//! The ranks run [`live`], which runs all [`PHASES`], or the one that `PHASE` names. In each of them the rank `VICTIM` reaches a
//! point of `rank_test`, at which it may be frozen.

use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, ProcessGroup, ReduceOp, Source};
use drumline_rendezvous::InitOptions;
use rank_test::anyhow::{Context, Result, bail, ensure};
use rank_test::{Ranks, RunningRanks, fault, ranks_test};

const RANKS: usize = 3;

const SOON: Duration = Duration::from_secs(20);

/// The deadline of every call, and of the meeting, where a rank stays frozen.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What survivors may take in addition: to ask the others for their last calls, to leave, and for a busy machine.
const SLACK: Duration = Duration::from_secs(2);

/// How long a rank is frozen that continues in time.
const PAUSE: Duration = Duration::from_millis(150);

/// What a rank does, in this order; the index is the number of the point at which it may be frozen.
const PHASES: [&str; 12] = [
    "meet",
    "form",
    "small",
    "barrier",
    "large",
    "heap",
    "recv",
    "send",
    "new_group",
    "new_groups",
    "buffers",
    "exit",
];

fn step_of(phase: &str) -> u64 {
    let place = PHASES.iter().position(|known| *known == phase);
    place.unwrap_or_else(|| panic!("no phase `{phase}`")) as u64
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn victim() -> Option<usize> {
    env("VICTIM")?.parse().ok()
}

/// The program of a rank; prints `verdict: …` after its group is dropped, with the error if there was one.
fn live() -> Result<()> {
    let verdict = match attend() {
        Ok(()) => "all went well".to_string(),
        Err(error) => error.to_string().replace('\n', " | "),
    };
    println!("verdict: {verdict}");
    Ok(())
}

fn attend() -> Result<()> {
    fault::point(step_of("meet"));
    let member = drumline_rendezvous::init("env://", InitOptions::default())?;
    fault::point(step_of("form"));
    let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
    sum(&group, &mut [0.0; 7])?;
    let only = env("PHASE");
    let wanted = |phase: &&&str| only.as_ref().is_none_or(|only| only == **phase);
    PHASES[2..].iter().filter(wanted).try_for_each(|phase| work(&group, phase))
}

fn work(group: &ProcessGroup, phase: &str) -> Result<()> {
    let freeze = || fault::point(step_of(phase));
    match phase {
        "small" => (0..20).try_for_each(|turn| {
            if turn == 10 {
                freeze();
            }
            sum(group, &mut [0.0; 3])
        }),
        "barrier" => {
            freeze();
            Ok(group.barrier()?)
        }
        "large" => sums_meanwhile(group, phase, &mut vec![0.0; 4 << 20]),
        "heap" => sums_meanwhile(group, phase, &mut group.heap_alloc(4 << 20)?),
        "recv" => write_from_victim(group, freeze),
        "send" => write_to_victim(group, freeze),
        "new_group" => {
            freeze();
            form_child(group)
        }
        "new_groups" => {
            meanwhile(phase, Duration::from_millis(5), || (0..30).try_for_each(|_| form_child(group)))
        }
        // So many that they take longer than the delay, on a busy machine as well, on which the striker comes late.
        "buffers" => meanwhile(phase, Duration::from_millis(3), || {
            (0..500).try_for_each(|_| Ok(group.heap_alloc::<u8>(9).map(drop)?))
        }),
        "exit" => {
            group.barrier()?;
            freeze();
            Ok(())
        }
        _ => bail!("no phase `{phase}`"),
    }
}

/// An all-reduce with a known answer.
fn sum(group: &ProcessGroup, data: &mut [f32]) -> Result<()> {
    data.fill(group.rank() as f32 + 1.0);
    group.all_reduce(data, ReduceOp::Sum)?;
    let right = (1..=group.size()).sum::<usize>() as f32;
    ensure!(data.iter().all(|&x| x == right), "a wrong sum on rank {}", group.rank());
    Ok(())
}

/// The victim is frozen inside one of several all-reduces.
fn sums_meanwhile(group: &ProcessGroup, phase: &str, data: &mut [f32]) -> Result<()> {
    let begin = Instant::now();
    sum(group, data)?;
    let each = begin.elapsed();
    group.barrier()?;
    meanwhile(phase, each.mul_f64(1.4), || (0..5).try_for_each(|_| sum(group, data)))?;
    Ok(group.barrier()?)
}

/// Runs `act`; on the victim the point of this phase is reached after `delay`.
fn meanwhile(phase: &str, delay: Duration, act: impl FnOnce() -> Result<()>) -> Result<()> {
    if env("RANK").and_then(|rank| rank.parse().ok()) != victim() {
        return act();
    }
    let step = step_of(phase);
    let striker = std::thread::spawn(move || {
        std::thread::sleep(delay);
        fault::point(step);
    });
    let outcome = act();
    striker.join().expect("a thread that only waits");
    outcome
}

/// Every other rank waits for a message of the victim.
fn write_from_victim(group: &ProcessGroup, freeze: impl Fn()) -> Result<()> {
    let victim = victim().unwrap_or_default();
    if group.rank() == victim {
        freeze();
        return others(group).try_for_each(|rank| Ok(group.send(&[7u16; 9], rank, 3)?));
    }
    let mut data = [0u16; 9];
    group.recv(&mut data, Source::Rank(victim), 3)?;
    ensure!(data == [7; 9], "a wrong message");
    Ok(())
}

/// Every other rank sends the victim more than the buffers hold.
fn write_to_victim(group: &ProcessGroup, freeze: impl Fn()) -> Result<()> {
    let victim = victim().unwrap_or_default();
    let mut data = vec![group.rank() as u8; 16 << 20];
    if group.rank() != victim {
        return Ok(group.send(&data, victim, 4)?);
    }
    freeze();
    others(group).try_for_each(|rank| {
        group.recv(&mut data, Source::Rank(rank), 4)?;
        ensure!(data.iter().all(|&x| x == rank as u8), "a wrong message");
        Ok(())
    })
}

fn others(group: &ProcessGroup) -> impl Iterator<Item = usize> + use<> {
    let me = group.rank();
    (0..group.size()).filter(move |&rank| rank != me)
}

fn form_child(group: &ProcessGroup) -> Result<()> {
    let all: Vec<usize> = (0..group.size()).collect();
    sum(&group.new_group(&all)?.context("all are in it")?, &mut [0.0; 3])
}

/// Starts the ranks; `victim` freezes itself in each of these phases.
fn start(
    ranks: &Ranks,
    transport: &str,
    victim: usize,
    phases: &[&str],
    timeout: Duration,
) -> Result<RunningRanks> {
    let faults = phases.iter().map(|phase| format!("rank={victim},step={},stop", step_of(phase)));
    let faults: Vec<String> = faults.collect();
    let pairs = [
        ("DRUMLINE_TRANSPORT", transport.to_string()),
        ("DRUMLINE_TIMEOUT", format!("{}ms", timeout.as_millis())),
        ("VICTIM", victim.to_string()),
    ];
    ranks.clone().env(pairs).fault(&faults.join(";")).start()
}

fn wait_until_frozen(running: &RunningRanks, victim: usize, phase: &str) -> Result<Instant> {
    let fault = format!("fault rank={victim},step={},stop", step_of(phase));
    running.wait_for_line(victim, &fault, SOON)?;
    running.wait_until_stopped(victim, SOON)?;
    Ok(Instant::now())
}

/// Whether the line of a rank that is not frozen names the victim. Over links one of these ranks may be ahead of the other, and
/// names that one too.
fn names(line: &str, phase: &str, victim: usize, pid: u32) -> bool {
    match phase {
        "exit" => line.ends_with("all went well"),
        "meet" | "form" => line.contains(&format!("rank {victim} of {RANKS} did not come within 1s")),
        _ => {
            let timed_out = line.contains("timed out after 1s") || line.contains("sharing memory");
            let named =
                line.contains(&format!("rank {victim}: (")) && line.contains(&format!("pid {pid}, stopped"));
            let others_live = line.matches(", pid ").count() == 1 + line.matches(", alive)").count();
            let unlinked = line.contains(&format!("link to rank {victim} "));
            (timed_out && named && others_live) || unlinked
        }
    }
}

/// Freezes `victim` in one phase, for as long as the others live.
fn freeze(ranks: &Ranks, transport: &str, victim: usize, phase: &str) -> Result<()> {
    let ranks = ranks.clone().env([("PHASE", phase)]);
    let running = start(&ranks, transport, victim, &[phase], TIMEOUT)?;
    let frozen = wait_until_frozen(&running, victim, phase)?;
    for rank in (0..RANKS).filter(|&rank| rank != victim) {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        let late = frozen.elapsed();
        let who =
            format!("rank {victim} frozen in {phase} over {transport}; rank {rank} after {late:?}: {line}");
        ensure!(late < TIMEOUT + SLACK, "too late: {who}");
        ensure!(names(&line, phase, victim, running.pid(victim)?), "{who}");
    }
    running.resume(victim)?;
    running.wait_for_line(victim, "verdict:", SOON)?;
    ensure!(running.wait_all(SOON)?.is_success());
    Ok(())
}

/// Freezes `victim` in every phase of one run, and lets it continue in time.
fn freeze_and_thaw(ranks: &Ranks, transport: &str, victim: usize) -> Result<()> {
    let running = start(ranks, transport, victim, &PHASES, SOON)?;
    for phase in PHASES {
        wait_until_frozen(&running, victim, phase)?;
        std::thread::sleep(PAUSE);
        running.resume(victim)?;
    }
    for rank in 0..RANKS {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        ensure!(line.ends_with("all went well"), "rank {rank} over {transport}: {line}");
    }
    ensure!(running.wait_all(SOON)?.is_success());
    Ok(())
}

fn freeze_in_each(ranks: &Ranks, transport: &str) -> Result<()> {
    for (turn, phase) in PHASES.into_iter().enumerate() {
        freeze(ranks, transport, turn % RANKS, phase)?;
    }
    // The first rank of a node creates the shared memory.
    freeze(ranks, transport, 0, "new_groups")?;
    freeze(ranks, transport, 0, "buffers")
}

ranks_test!(a_rank_frozen_in_any_phase_is_named_over_shared_memory, RANKS, { live()? }, |ranks| {
    freeze_in_each(&ranks, "shm")?;
});

ranks_test!(a_rank_frozen_in_any_phase_is_named_over_links, RANKS, { live()? }, |ranks| {
    freeze_in_each(&ranks, "tcp")?;
});

ranks_test!(a_rank_that_continues_in_time_disturbs_nobody, RANKS, { live()? }, |ranks| {
    freeze_and_thaw(&ranks, "shm", 1)?;
    freeze_and_thaw(&ranks, "tcp", 0)?;
});
