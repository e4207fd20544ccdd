//! Ranks as processes that die, stop or exit at every point of their lives: the others learn who, where and how.
//!
//! The ranks run [`live`]; `PHASE` says what they do, and a fault of `rank_test` hits the victim at a numbered point.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, ProcessGroup, ReduceOp, Source};
use drumline_rendezvous::InitOptions;
use rank_test::anyhow::{Result, bail, ensure};
use rank_test::{Exit, Ranks, RunningRanks, fault, ranks_test};

const SOON: Duration = Duration::from_secs(20);

/// How long survivors may take to learn of a death.
const REPORTED: Duration = Duration::from_secs(1);

/// The points at which a fault may happen.
const BEFORE_MEETING: u64 = 0;
const BEFORE_FORMING: u64 = 1;
const AT_WORK: u64 = 5;

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The program of a rank; prints `verdict: …` at its end, with the error if there was one.
fn live() -> Result<()> {
    let verdict = match attend() {
        Ok(()) => "all went well".to_string(),
        Err(error) => error.to_string().replace('\n', " | "),
    };
    println!("verdict: {verdict}");
    Ok(())
}

fn attend() -> Result<()> {
    fault::point(BEFORE_MEETING);
    let method = env("MEETING").unwrap_or_else(|| "env://".into());
    let member = drumline_rendezvous::init(&method, InitOptions::default())?;
    fault::point(BEFORE_FORMING);
    let group = ProcessGroup::new(member, GroupOptions::from_env()?)?;
    group.all_reduce(&mut [1f32; 7], ReduceOp::Sum)?;
    println!("ready");
    let outcome = work(&group, &env("PHASE").unwrap_or_default());
    if let Err(error) = &outcome {
        let again = group.barrier().expect_err("a group that failed cannot be used").to_string();
        ensure!(error.to_string() == again, "first {error}, then {again}");
    }
    outcome
}

fn work(group: &ProcessGroup, phase: &str) -> Result<()> {
    match phase {
        "small" => repeat(group, 3),
        "heap" => repeat_in_heap(group),
        "large" => repeat_until_killed(group),
        "mail" => write_round(group),
        "idle" => idle(group),
        "forming" => form_many(group),
        "exit" => linger(group),
        _ => bail!("no phase `{phase}`"),
    }
}

fn repeat(group: &ProcessGroup, len: usize) -> Result<()> {
    for step in 0..10 {
        fault::point(step);
        group.all_reduce(&mut vec![1f32; len], ReduceOp::Sum)?;
    }
    Ok(())
}

fn repeat_in_heap(group: &ProcessGroup) -> Result<()> {
    for step in 0..10 {
        let mut data = group.heap_alloc::<f32>(50_000)?;
        fault::point(step);
        group.all_reduce(&mut data, ReduceOp::Sum)?;
    }
    Ok(())
}

/// All-reduces 16 MiB again and again; the victim dies after this fraction of one all-reduce.
fn repeat_until_killed(group: &ProcessGroup) -> Result<()> {
    let mut data = vec![1f32; 4 << 20];
    let begin = Instant::now();
    (0..3).try_for_each(|_| group.all_reduce(&mut data, ReduceOp::Max))?;
    let each = begin.elapsed() / 3;
    let victim = env("VICTIM").and_then(|rank| rank.parse().ok());
    group.barrier()?;
    if victim == Some(group.rank()) {
        let part: f64 = env("PART").unwrap_or_default().parse()?;
        std::thread::spawn(move || {
            std::thread::sleep(each.mul_f64(part));
            fault::point(AT_WORK);
        });
    }
    let rounds = if victim.is_some() { usize::MAX } else { 3 };
    (0..rounds).try_for_each(|_| group.all_reduce(&mut data, ReduceOp::Max))?;
    Ok(())
}

/// Messages travel around a ring.
fn write_round(group: &ProcessGroup) -> Result<()> {
    let (me, ranks) = (group.rank(), group.size());
    let mut data = vec![0u8; 300_000];
    for step in 0..10 {
        fault::point(step);
        group.send(&data, (me + 1) % ranks, step)?;
        group.recv(&mut data, Source::Rank((me + ranks - 1) % ranks), step)?;
    }
    Ok(())
}

fn idle(group: &ProcessGroup) -> Result<()> {
    fault::point(AT_WORK);
    std::thread::sleep(Duration::from_millis(700));
    Ok(group.barrier()?)
}

/// A last call, and a while later the end; the victim ends first.
fn linger(group: &ProcessGroup) -> Result<()> {
    group.barrier()?;
    std::thread::sleep(Duration::from_millis(200));
    fault::point(AT_WORK);
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

fn form_many(group: &ProcessGroup) -> Result<()> {
    let all: Vec<usize> = (0..group.size()).collect();
    let victim = env("VICTIM").is_some_and(|rank| rank == group.rank().to_string());
    if victim {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(3));
            fault::point(AT_WORK);
        });
    }
    let rounds = if env("VICTIM").is_some() { 1_000_000 } else { 10 };
    // The child may be the first to get the error, with its own name.
    let form = || group.new_group(&all)?.expect("all are in it").barrier();
    match (0..rounds).try_for_each(|_| form()) {
        Err(_) => Ok(group.barrier()?),
        Ok(()) => Ok(()),
    }
}

/// How a victim ends, and how the others describe it.
struct Death {
    fault: &'static str,
    text: &'static str,
    exit: Exit,
}

const KILL: Death = Death { fault: "kill", text: "killed by signal 9 (SIGKILL)", exit: Exit::Signal(9) };
const EXIT: Death = Death { fault: "exit=3", text: "exited with code 3", exit: Exit::Code(3) };
const PANIC: Death = Death { fault: "panic", text: "panicked", exit: Exit::Code(101) };

/// One run of three ranks in which `victim` dies at `step`.
struct Scenario {
    phase: &'static str,
    victim: usize,
    step: u64,
    death: Death,
}

fn dies(phase: &'static str, victim: usize, step: u64, death: Death) -> Scenario {
    Scenario { phase, victim, step, death }
}

impl Scenario {
    fn spec(&self) -> String {
        format!("rank={},step={},{}", self.victim, self.step, self.death.fault)
    }

    /// Starts the ranks and waits until the fault has happened.
    fn start(&self, ranks: &Ranks, transport: &str) -> Result<(RunningRanks, Instant)> {
        let victim = self.victim.to_string();
        let env = [("PHASE", self.phase), ("DRUMLINE_TRANSPORT", transport), ("VICTIM", &victim)];
        let running = ranks.clone().env(env).fault(&self.spec()).start()?;
        running.wait_for_line(self.victim, "drumline: fault", SOON)?;
        Ok((running, Instant::now()))
    }

    /// Runs it; all others must name the victim with `text`, in time.
    fn check_survivors(&self, ranks: &Ranks, transport: &str, text: &str) -> Result<()> {
        let (running, died) = self.start(ranks, transport)?;
        let pid = running.pid(self.victim);
        for rank in (0..3).filter(|&rank| rank != self.victim) {
            let line = running.wait_for_line(rank, "verdict:", SOON)?;
            let late = died.elapsed();
            let who = format!("{} over {transport}, rank {rank} after {late:?}: {line}", self.spec());
            ensure!(late < REPORTED, "too late: {who}");
            ensure!(line.contains(&format!("lost rank {}", self.victim)), "does not name the rank: {who}");
            if let Ok(pid) = &pid {
                ensure!(line.contains(&format!("pid {pid})")), "does not name pid {pid}: {who}");
            }
            ensure!(line.contains(text), "does not say `{text}`: {who}");
        }
        let report = running.wait_all(SOON)?;
        let exits: Vec<_> = report.ranks.iter().map(|rank| rank.exit).collect();
        for (rank, exit) in exits.iter().enumerate() {
            let expected = if rank == self.victim { self.death.exit } else { Exit::Code(0) };
            ensure!(*exit == expected, "{}: {report}", self.spec());
        }
        Ok(())
    }
}

/// The control: no rank dies, and all goes well.
fn all_is_well(ranks: &Ranks, phase: &str, transport: &str) -> Result<()> {
    let report = ranks.clone().env([("PHASE", phase), ("DRUMLINE_TRANSPORT", transport)]).pass()?;
    for rank in report.ranks {
        let text = rank.stdout_text();
        ensure!(text.ends_with("verdict: all went well\n"), "{phase} over {transport}: {text}");
    }
    Ok(())
}

fn deaths(ranks: &Ranks, scenarios: &[Scenario]) -> Result<()> {
    for transport in ["shm", "tcp"] {
        for scenario in scenarios {
            scenario.check_survivors(ranks, transport, scenario.death.text)?;
        }
    }
    Ok(())
}

fn controls(ranks: &Ranks, phases: &[&str]) -> Result<()> {
    for transport in ["shm", "tcp"] {
        phases.iter().try_for_each(|phase| all_is_well(ranks, phase, transport))?;
    }
    Ok(())
}

ranks_test!(a_death_before_the_group_is_formed, 3, { live()? }, |ranks| {
    deaths(
        &ranks,
        &[
            dies("small", 1, BEFORE_MEETING, KILL),
            dies("small", 0, BEFORE_FORMING, KILL),
            dies("small", 2, BEFORE_FORMING, EXIT),
        ],
    )?;
    controls(&ranks, &["small"])?;
});

ranks_test!(a_death_while_groups_are_formed, 3, { live()? }, |ranks| {
    deaths(&ranks, &[dies("forming", 0, AT_WORK, KILL), dies("forming", 2, AT_WORK, KILL)])?;
    controls(&ranks, &["forming"])?;
});

ranks_test!(a_death_between_two_collectives, 3, { live()? }, |ranks| {
    deaths(
        &ranks,
        &[
            dies("small", 0, 4, KILL),
            dies("small", 1, 4, EXIT),
            dies("small", 2, 4, PANIC),
            dies("heap", 1, 4, KILL),
        ],
    )?;
    controls(&ranks, &["small", "heap"])?;
});

ranks_test!(a_death_inside_a_large_all_reduce, 3, { live()? }, |ranks| {
    for (part, victim) in [("0.03", 0), ("0.5", 1), ("0.95", 2)] {
        let ranks = ranks.clone().env([("PART", part)]);
        deaths(&ranks, &[dies("large", victim, AT_WORK, KILL)])?;
    }
    controls(&ranks, &["large"])?;
});

ranks_test!(a_death_while_messages_travel, 3, { live()? }, |ranks| {
    deaths(&ranks, &[dies("mail", 0, 5, KILL), dies("mail", 2, 3, EXIT)])?;
    controls(&ranks, &["mail"])?;
});

ranks_test!(a_death_while_all_are_idle, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        let (running, _) = dies("idle", 1, AT_WORK, KILL).start(&ranks, transport)?;
        for rank in [0, 2] {
            let line = running.wait_for_line(rank, "verdict:", SOON)?;
            ensure!(line.contains("lost rank 1") && line.contains(KILL.text), "{line}");
        }
        running.wait_all(SOON)?;
    }
    controls(&ranks, &["idle"])?;
});

ranks_test!(a_death_after_the_last_call_disturbs_nobody, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        let (running, _) = dies("exit", 1, AT_WORK, KILL).start(&ranks, transport)?;
        for rank in [0, 2] {
            running.wait_for_line(rank, "verdict: all went well", SOON)?;
        }
        ensure!(running.wait_all(SOON)?.ranks[1].exit == Exit::Signal(9));
    }
    controls(&ranks, &["exit"])?;
});

/// Rank 0 hosts the store itself, at an address that it writes to a file: no launcher can say how it ended.
fn meeting_in_a_file(ranks: &Ranks, test: impl FnOnce(&Ranks) -> Result<()>) -> Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("drumline-death-{}-{number}", std::process::id()));
    let outcome = test(&ranks.clone().env([("MEETING", format!("file://{}", path.display()))]));
    // A host that was killed leaves the file, which the next meeting would refuse as stale.
    let _ = std::fs::remove_file(path);
    outcome
}

ranks_test!(the_death_of_the_stores_host, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        for (victim, text) in [
            (0, "the store it hosts"),
            (1, "its connection ended and nobody reported why; try looking at what it last wrote on "),
        ] {
            let death = dies("small", victim, 4, KILL);
            meeting_in_a_file(&ranks, |ranks| death.check_survivors(ranks, transport, text))?;
        }
        meeting_in_a_file(&ranks, |ranks| all_is_well(ranks, "small", transport))?;
    }
});

/// A stopped rank is named at the deadline, and gets the error when it continues.
fn stop_and_continue(ranks: &Ranks, transport: &str) -> Result<()> {
    let ranks = ranks.clone().env([("DRUMLINE_TIMEOUT", "600ms")]);
    let stop = Death { fault: "stop", text: "", exit: Exit::Code(0) };
    let (running, stopped) = dies("small", 1, 4, stop).start(&ranks, transport)?;
    running.wait_until_stopped(1, SOON)?;
    for rank in [0, 2] {
        let line = running.wait_for_line(rank, "verdict:", SOON)?;
        let time = stopped.elapsed();
        ensure!(time > Duration::from_millis(500) && time < Duration::from_secs(2), "{time:?}: {line}");
        let named = format!("rank 1: ({}, pid {}, stopped", host()?, running.pid(1)?);
        ensure!(line.contains("timed out after 600ms") && line.contains(&named), "{transport}: {line}");
        ensure!(line.matches(", pid ").count() == 1, "names others too: {line}");
        // Over links the stopped rank cannot report its last call; shared memory holds it.
        ensure!(
            transport == "tcp" || line.contains("whose last call was all_reduce(3 f32, sum) #5 at"),
            "{line}"
        );
    }
    running.resume(1)?;
    let line = running.wait_for_line(1, "verdict:", SOON)?;
    ensure!(line.contains("called off group `world`") && line.contains("timed out"), "{line}");
    ensure!(running.wait_all(SOON)?.is_success());
    Ok(())
}

fn host() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().into())
}

ranks_test!(a_rank_that_is_stopped_is_named_and_gets_the_error, 3, { live()? }, |ranks| {
    for transport in ["shm", "tcp"] {
        stop_and_continue(&ranks, transport)?;
        all_is_well(&ranks.clone().env([("DRUMLINE_TIMEOUT", "600ms")]), "small", transport)?;
    }
});

ranks_test!(
    an_abort_is_reported_as_its_signal,
    2,
    {
        let group = ProcessGroup::from_env()?;
        group.barrier()?;
        if group.rank() == 1 && env("ABORT").is_some() {
            std::process::abort();
        }
        match group.barrier() {
            Ok(()) => println!("verdict: all went well"),
            Err(error) => println!("verdict: {error}"),
        }
    },
    |ranks| {
        let running = ranks.clone().env([("ABORT", "1")]).start()?;
        let line = running.wait_for_line(0, "verdict:", SOON)?;
        ensure!(line.contains("lost rank 1") && line.contains("killed by signal 6 (SIGABRT)"), "{line}");
        running.wait_all(SOON)?;
        ensure!(ranks.pass()?.ranks[0].stdout_text().contains("all went well"));
    }
);
