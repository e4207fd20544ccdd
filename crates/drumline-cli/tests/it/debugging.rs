//! `drumline run --debug-rank`: one rank is held, the others run, and a debugger finds it before its first line.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::started::{BINARY, Started};

const LONGEST: Duration = Duration::from_secs(60);

/// The pid of the held rank, from the line that reports it.
fn held_pid(job: &Started) -> i32 {
    let line = job.line_of_stderr("waits for a debugger");
    let pid = line.split("pid ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    pid.parse().unwrap_or_else(|_| panic!("{line}"))
}

/// Waits until the kernel says that the process is stopped.
fn wait_until_stopped(pid: i32) {
    let begin = Instant::now();
    while !fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("State:\tT") {
        assert!(begin.elapsed() < LONGEST, "{pid} never stopped");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn one_rank_is_held_and_the_others_run() {
    let script = r#"echo "rank $RANK is $$""#;
    let args = ["run", "--nproc-per-node", "3", "--debug-rank", "1", "sh", "-c", script];
    let job = Started::new(&args);
    let pid = held_pid(&job);
    assert!(job.line_of_stderr("kill -CONT").contains(&format!("kill -CONT {pid}")));
    for rank in [0, 2] {
        job.line_of_stdout(&format!("rank {rank} is"));
    }
    wait_until_stopped(pid);
    assert!(!job.stdout_so_far().contains("rank 1 is"), "it has not begun");
    kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
    assert_eq!(job.line_of_stdout("rank 1 is"), format!("[rank 1]: rank 1 is {pid}"));
    let ended = job.end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("waits for a debugger").count(), 1, "{}", ended.stderr);

    let control = Started::new(&["run", "--omp", "1", "--nproc-per-node", "3", "sh", "-c", script]).end();
    assert!(control.code == Some(0) && control.stderr.is_empty(), "{}", control.stderr);
    assert_eq!(control.stdout.matches(" is ").count(), 3);
}

#[test]
fn a_debugger_stops_the_rank_at_its_main() {
    if !rank_test::require_tool("gdb") {
        return;
    }
    let job = Started::new(&["run", "--debug-rank", "0", BINARY, "--version"]);
    let pid = held_pid(&job);
    wait_until_stopped(pid);
    let line = job.line_of_stderr("C and C++:");
    let words = line.split_once("gdb ").unwrap().1;
    // As a user would paste it, then a look at the stack, then detach.
    let pasted = format!("exec gdb --batch -nx {words} -ex 'info inferiors' -ex 'bt 1' -ex detach");
    let gdb =
        Command::new("timeout").args(["50", "sh", "-c", &pasted]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&[gdb.stdout, gdb.stderr].concat()).into_owned();
    assert!(text.contains("is executing new program"), "{text}");
    let at_main = |line: &str| line.starts_with("Temporary breakpoint 2") && line.contains("main (");
    assert!(text.lines().any(at_main), "{text}");
    assert!(text.contains(&format!("process {pid}")), "the same process: {text}");
    let ended = job.end();
    assert_eq!((ended.code, ended.stdout.starts_with("[rank 0]: drumline ")), (Some(0), true), "{text}");
}

#[test]
fn a_held_program_that_does_not_exist_is_an_error_once_it_is_continued() {
    let job = Started::new(&["run", "--debug-rank", "0", "/no/such/program"]);
    let pid = held_pid(&job);
    wait_until_stopped(pid);
    kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
    let ended = job.end();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("cannot start `/no/such/program`"), "{}", ended.stderr);
}
