//! Signals to the launcher: the first one stops the ranks, the second one kills them.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::job::Job;

const LONG: Duration = Duration::from_secs(30);

/// Prints that it runs, and each signal; ends only when it is killed.
const STUBBORN: &str = "trap 'echo asked' TERM INT; echo runs; while :; do sleep 0.05; done";

#[test]
fn the_first_signal_is_forwarded_unchanged() {
    for (signal, name, code) in
        [(Signal::INT, "INT", 130), (Signal::TERM, "TERM", 143), (Signal::HUP, "HUP", 129)]
    {
        let script = format!("trap 'echo got it; exit 0' {name}; echo runs; while :; do sleep 0.05; done");
        let mut job = Job::run("--nproc-per-node 2", &script);
        job.wait_for("runs", 2);
        job.signal(signal);
        let (ended, text) = job.end(LONG);
        assert_eq!((ended, text.matches("got it").count()), (code, 2), "{text}");
        assert!(text.contains(&format!("stopped by SIG{name}")), "{text}");
    }
}

#[test]
fn the_second_signal_kills_at_once() {
    let mut job = Job::run("--nproc-per-node 2", STUBBORN);
    job.wait_for("runs", 2);
    job.signal(Signal::INT);
    job.wait_for("asked", 2);
    let begin = Instant::now();
    job.signal(Signal::INT);
    assert_eq!(job.end(LONG).0, 130);
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[test]
fn after_the_shutdown_timeout_ranks_are_killed() {
    let mut job = Job::run("--nproc-per-node 2 --shutdown-timeout 1", STUBBORN);
    job.wait_for("runs", 2);
    let begin = Instant::now();
    job.signal(Signal::TERM);
    assert_eq!(job.end(LONG).0, 143);
    let took = begin.elapsed();
    assert!(took > Duration::from_millis(900) && took < Duration::from_secs(4), "{took:?}");
}

#[test]
fn a_request_to_checkpoint_reaches_the_ranks_and_stops_nobody() {
    let script = "trap 'echo saved' USR1; trap 'exit 0' USR2; echo runs; while :; do sleep 0.05; done";
    let mut job = Job::run("--nproc-per-node 2", script);
    job.wait_for("runs", 2);
    job.signal(Signal::USR1);
    job.wait_for("saved", 2);
    job.signal(Signal::USR2);
    let (code, text) = job.end(LONG);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn a_signal_that_is_not_handled_ends_the_launcher_and_its_ranks() {
    let mut job = Job::run("--signals-to-handle SIGINT", STUBBORN);
    job.wait_for("runs", 1);
    job.signal(Signal::TERM);
    assert_eq!(job.end(LONG).0, 143);
}

#[test]
fn a_signal_ends_the_wait_for_other_nodes() {
    let flags =
        format!("--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {}", super::job::free_port());
    let mut job = Job::run(&flags, "echo never");
    std::thread::sleep(Duration::from_millis(300));
    // A signal for ranks is ignored while there are none.
    job.signal(Signal::USR1);
    std::thread::sleep(Duration::from_millis(300));
    job.signal(Signal::TERM);
    let (code, text) = job.end(LONG);
    assert_eq!((code, text.contains("never")), (143, false), "{text}");
}

#[test]
fn the_same_signal_twice_within_a_moment_counts_once() {
    let mut job =
        Job::run("", "trap 'sleep 1; echo saved; exit 0' TERM; echo runs; while :; do sleep 0.05; done");
    job.wait_for("runs", 1);
    job.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(50));
    job.signal(Signal::TERM);
    let (code, text) = job.end(LONG);
    assert!(code == 143 && text.contains("saved"), "{text}");
}
