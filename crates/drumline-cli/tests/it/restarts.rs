//! `--max-restarts`: all ranks are restarted at once after a failure, and a crash loop ends.

use std::time::{Duration, Instant};

use super::job::Job;

const LONG: Duration = Duration::from_secs(30);

#[test]
fn all_ranks_are_started_again_and_may_succeed() {
    let script = "echo rank $RANK try $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; \
                  [ $RANK = 0 ] && sleep 0.2; [ $TORCHELASTIC_RESTART_COUNT -ge 1 ] || exit 3";
    let (code, text) = Job::run("--nproc-per-node 2 --max-restarts 2", script).end(LONG);
    assert_eq!(code, 0, "{text}");
    for line in ["rank 0 try 0 of 2", "rank 1 try 0 of 2", "rank 0 try 1 of 2", "rank 1 try 1 of 2"] {
        assert_eq!(text.matches(line).count(), 1, "{text}");
    }
    assert_eq!(text.matches("rank 1 on host").count(), 1, "the failure is reported once: {text}");
    assert!(text.contains("round 2 begins (1 of 2 restarts used): 2 ranks on 1 node"), "{text}");
}

#[test]
fn without_restarts_left_the_job_fails_with_its_cause() {
    let (code, text) = Job::run("--nproc-per-node 2 --max-restarts 1", "exit $((RANK * 5))").end(LONG);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("all 1 restarts are used"), "{text}");
    assert!(text.contains("exit code 5"), "{text}");
}

#[test]
fn a_restart_takes_less_than_a_second() {
    let script = "date +%s%N; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1";
    let (code, text) = Job::run("--max-restarts 1", script).end(LONG);
    assert_eq!(code, 0, "{text}");
    let times: Vec<u64> =
        text.lines().filter_map(|line| line.strip_prefix("[rank 0]: ")?.parse().ok()).collect();
    let took = Duration::from_nanos(times[1] - times[0]);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_crash_loop_pauses_longer_and_longer_and_ends_before_its_restarts_do() {
    let begin = Instant::now();
    let (code, text) = Job::run("--max-restarts 1000", "exit 9").end(LONG);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("failed at once 5 times in a row"), "{text}");
    assert!(begin.elapsed() > Duration::from_secs(5), "there were pauses: {:?}", begin.elapsed());
}

#[test]
fn each_attempt_has_its_own_logs() {
    let logs = tempfile::tempdir().unwrap();
    let flags = format!("--max-restarts 1 --redirects 3 --log-dir {}", logs.path().display());
    let script = "echo out $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1";
    let (code, text) = Job::run(&flags, script).end(LONG);
    assert_eq!(code, 0, "{text}");
    let run = std::fs::read_dir(logs.path()).unwrap().next().unwrap().unwrap().path();
    for attempt in 0..2 {
        let log = run.join(format!("attempt_{attempt}/0/stdout.log"));
        assert_eq!(std::fs::read_to_string(log).unwrap(), format!("out {attempt}\n"));
    }
}

#[test]
fn the_other_ranks_have_the_whole_shutdown_timeout_after_a_failure() {
    let script = "trap 'sleep 4; echo saved; exit 0' TERM; echo runs; [ $RANK = 0 ] || { sleep 0.5; exit 3; }; \
                  while :; do sleep 0.05; done";
    let (code, text) = Job::run("--nproc-per-node 2 --shutdown-timeout 20", script).end(LONG);
    assert!(code == 1 && text.contains("saved"), "{text}");
    let (code, text) = Job::run("--nproc-per-node 2 --shutdown-timeout 1", script).end(LONG);
    assert!(code == 1 && !text.contains("saved"), "the control: {text}");
}
