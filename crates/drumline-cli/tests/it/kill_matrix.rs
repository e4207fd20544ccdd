//! Kills each process of a job at each stage, again and again: no process, no port and no file may be left.
//!
//! |             | before the ranks run | while they run | while they are being stopped |
//! |---|---|---|---|
//! | a rank      | x | x | x |
//! | the keeper of the ranks | x | x | x |
//! | the launcher of a single node | x | x | x |
//! | the agent of a second node | x | x | x |
//! | the agent that hosts the control store | x | x | x |
//!
//! Ranks start processes that leave their session and would outlive them. Twenty jobs of a cell run side by side.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use rank_test::leftovers::{Leftover, Watch};
use rustix::process::{Pid, Signal, kill_process};

use super::job::{Job, free_port};

const REPEATS: u64 = 20;
/// A rank that ends by itself, so that a failed test does not leave it running for ever.
const RANK: &str = "setsid sleep 50 & (setsid sleep 51 &); trap 'echo asked' TERM INT; echo runs; \
                    i=0; while [ $i -lt 500 ]; do sleep 0.1; i=$((i+1)); done";
const LONG: Duration = Duration::from_secs(45);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Who {
    Rank,
    Keeper,
    Launcher,
    Agent,
    StoreHost,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    BeforeStart,
    Running,
    Stopping,
}

fn cell(who: Who, when: When) {
    let began = Instant::now();
    let one = |number| move || once(who, when, number);
    let runs: Vec<_> = (0..REPEATS).map(|number| std::thread::spawn(one(number))).collect();
    let failed = runs.into_iter().map(|run| run.join()).filter(Result::is_err).count();
    assert_eq!(failed, 0, "{who:?} {when:?}: {failed} of {REPEATS} runs failed, after {:?}", began.elapsed());
}

fn once(who: Who, when: When, number: u64) {
    let port = free_port();
    let mut jobs = match who {
        Who::Rank | Who::Keeper | Who::Launcher => {
            vec![Job::run(&format!("--nproc-per-node 2 --master-port {port} --shutdown-timeout 3"), RANK)]
        }
        Who::Agent | Who::StoreHost => [0, 1].map(|node| Job::run(&node_flags(port, node), RANK)).into(),
    };
    let victim = if who == Who::Agent { 1 } else { 0 };
    match when {
        // Somewhere between its first instruction and its ranks' first line.
        When::BeforeStart => std::thread::sleep(Duration::from_micros(number * 900)),
        When::Running => jobs.iter().for_each(|job| job.wait_for("runs", ranks_of(who))),
        When::Stopping => {
            jobs.iter().for_each(|job| job.wait_for("runs", ranks_of(who)));
            jobs.iter().for_each(|job| job.signal(Signal::TERM));
            jobs[victim].wait_for("asked", 1);
        }
    }
    match who {
        Who::Rank => kill_a_rank(&jobs[0]),
        Who::Keeper => kill_the_keeper(&jobs[0]),
        _ => jobs[victim].signal(Signal::KILL),
    }
    for (index, job) in jobs.iter_mut().enumerate() {
        let (code, text) = job.end(LONG);
        let expected: &[i32] = match (who, when) {
            (Who::Rank | Who::Keeper, When::Stopping) => &[143],
            (Who::Rank | Who::Keeper, _) => &[1],
            _ if index == victim => &[137],
            (_, When::Stopping) => &[143],
            _ => &[1],
        };
        assert!(expected.contains(&code), "{who:?} {when:?} #{number}, node {index}: {code}\n{text}");
    }
    TcpListener::bind(("127.0.0.1", port)).unwrap_or_else(|error| panic!("port {port}: {error}"));
}

fn ranks_of(who: Who) -> usize {
    if matches!(who, Who::Agent | Who::StoreHost) { 1 } else { 2 }
}

fn node_flags(port: u16, node: usize) -> String {
    format!(
        "--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port} --shutdown-timeout 3 \
         --rdzv-conf join_timeout=8"
    )
}

/// Kills the first rank that exists.
fn kill_a_rank(job: &Job) {
    let begin = Instant::now();
    while begin.elapsed() < LONG {
        if let Some(pid) = job.rank(1) {
            let _ = kill_process(pid, Signal::KILL);
            return;
        }
    }
    panic!("no rank ever ran:\n{}", job.text());
}

/// Kills the keeper as soon as it exists.
fn kill_the_keeper(job: &Job) {
    let begin = Instant::now();
    while begin.elapsed() < LONG {
        if let Some(keeper) = job.try_keeper() {
            kill_process(keeper, Signal::KILL).unwrap();
            return;
        }
    }
    panic!("no keeper ever ran:\n{}", job.text());
}

#[test]
fn the_keeper_before_its_ranks_run() {
    cell(Who::Keeper, When::BeforeStart);
}

#[test]
fn the_keeper_while_its_ranks_run() {
    cell(Who::Keeper, When::Running);
}

#[test]
fn the_keeper_while_it_stops_its_ranks() {
    cell(Who::Keeper, When::Stopping);
}

#[test]
fn a_rank_before_its_first_line() {
    cell(Who::Rank, When::BeforeStart);
}

#[test]
fn a_rank_that_runs() {
    cell(Who::Rank, When::Running);
}

#[test]
fn a_rank_that_is_being_stopped() {
    cell(Who::Rank, When::Stopping);
}

#[test]
fn the_launcher_before_its_ranks_run() {
    cell(Who::Launcher, When::BeforeStart);
}

#[test]
fn the_launcher_while_its_ranks_run() {
    cell(Who::Launcher, When::Running);
}

#[test]
fn the_launcher_while_it_stops_its_ranks() {
    cell(Who::Launcher, When::Stopping);
}

#[test]
fn an_agent_before_its_ranks_run() {
    cell(Who::Agent, When::BeforeStart);
}

#[test]
fn an_agent_while_its_ranks_run() {
    cell(Who::Agent, When::Running);
}

#[test]
fn an_agent_while_it_stops_its_ranks() {
    cell(Who::Agent, When::Stopping);
}

#[test]
fn the_control_stores_host_before_its_ranks_run() {
    cell(Who::StoreHost, When::BeforeStart);
}

#[test]
fn the_control_stores_host_while_its_ranks_run() {
    cell(Who::StoreHost, When::Running);
}

#[test]
fn the_control_stores_host_while_it_stops_its_ranks() {
    cell(Who::StoreHost, When::Stopping);
}

/// The control: without a keeper the same ranks leave something, and the watch sees it.
#[test]
fn without_a_keeper_the_same_ranks_leave_processes() {
    let watch = Watch::new();
    let (name, value) = watch.mark();
    let mut shell = std::process::Command::new("sh");
    let mut rank =
        shell.args(["-c", RANK]).env(name, value).stdout(std::process::Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    rank.kill().unwrap();
    rank.wait().unwrap();
    let left = watch.now();
    assert!(!left.is_empty());
    for leftover in left {
        if let Leftover::Process { pid, .. } = leftover {
            let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
        }
    }
    watch.none_within(Duration::from_secs(5)).unwrap();
}
