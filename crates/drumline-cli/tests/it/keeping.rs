//! The process between a launcher and its ranks: it may be frozen or killed, and it never touches what is not its own.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::job::Job;
use super::started::BINARY;

const LONG: Duration = Duration::from_secs(40);
const RUNS: &str = "trap '' TERM; setsid sleep 60 & echo runs; while :; do sleep 0.05; done";

#[test]
fn a_launcher_whose_keeper_is_frozen_can_be_stopped() {
    let mut job = Job::run("--nproc-per-node 2", RUNS);
    job.wait_for("runs", 2);
    kill_process(job.keeper(), Signal::STOP).unwrap();
    job.signal(Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    job.signal(Signal::INT);
    let (code, text) = job.end(LONG);
    assert_eq!(code, 130, "{text}");
}

#[test]
fn a_frozen_keeper_wakes_when_its_launcher_is_killed() {
    let mut job = Job::run("--nproc-per-node 2", RUNS);
    job.wait_for("runs", 2);
    kill_process(job.keeper(), Signal::STOP).unwrap();
    job.signal(Signal::KILL);
    assert_eq!(job.end(LONG).0, 137);
}

#[test]
fn a_killed_keeper_uses_a_restart() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; setsid sleep 60 & echo runs; sleep 60";
    let mut job = Job::run("--nproc-per-node 2 --max-restarts 1", script);
    job.wait_for("runs", 2);
    kill_process(job.keeper(), Signal::KILL).unwrap();
    let (code, text) = job.end(LONG);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn ended_processes_of_ranks_are_reaped_while_the_ranks_run() {
    let script =
        "i=0; while [ $i -lt 40 ]; do (sleep 0.01 &); i=$((i+1)); done; echo left; sleep 3; echo done";
    let mut job = Job::run("", script);
    job.wait_for("left", 1);
    let keeper = job.keeper().as_raw_nonzero();
    let children = || fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    let begin = Instant::now();
    while children().split_whitespace().count() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(3), "zombies: {}", children());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(job.end(LONG).0, 0);
}

/// A shell that starts a process and then becomes the launcher, so that the process is a child of the launcher.
#[test]
fn processes_of_others_are_not_killed() {
    for victim in ["nobody", "keeper", "launcher"] {
        let script = format!(
            "sleep 30 & echo bystander $!; exec {BINARY} run --nproc-per-node 2 sh -c 'echo runs; sleep 1'"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null());
        let mut shell = command.spawn().unwrap();
        let text = std::io::read_to_string(Lines(shell.stdout.take().unwrap(), 3)).unwrap();
        let bystander = text.split_whitespace().skip_while(|word| *word != "bystander").nth(1).unwrap();
        let bystander = Pid::from_raw(bystander.parse().unwrap()).unwrap();
        match victim {
            "keeper" => kill_process(keeper_of(shell.id(), bystander), Signal::KILL).unwrap(),
            "launcher" => shell.kill().unwrap(),
            _ => {}
        }
        shell.wait().unwrap();
        assert!(kill_process(bystander, Signal::TERM).is_ok(), "{victim}: the bystander was killed");
    }
}

/// The first lines of a pipe.
struct Lines(std::process::ChildStdout, usize);

impl std::io::Read for Lines {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.1 == 0 {
            return Ok(0);
        }
        let read = self.0.read(&mut buffer[..1])?;
        self.1 -= usize::from(buffer[0] == b'\n');
        Ok(read)
    }
}

fn keeper_of(launcher: u32, bystander: Pid) -> Pid {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let pids = children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().unwrap()));
    pids.into_iter().find(|pid| *pid != bystander).unwrap()
}

#[test]
fn as_the_first_process_of_a_container_it_reaps_orphans_and_kills_none() {
    let inside = format!(
        "{BINARY} run --nproc-per-node 2 sh -c 'echo runs; sleep 3' & launcher=$!; wait $launcher; echo code $?"
    );
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", &inside]);
    let mut job = Job::of(command);
    let (code, text) = job.end(LONG);
    assert!(code == 0 && text.contains("code 0") && text.matches("runs").count() == 2, "{text}");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child", BINARY, "run", "--nproc-per-node", "2"]);
    command.args(["sh", "-c", "(setsid sleep 0.2 &); echo runs; sleep 1"]);
    let mut job = Job::of(command);
    let (code, text) = job.end(LONG);
    assert!(code == 0 && text.matches("runs").count() == 2, "{text}");
}
