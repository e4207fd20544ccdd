//! The first failure, the deadline and the owner stop a job, within a bounded time and without leftover processes.

use std::time::{Duration, Instant};

use drumline_launch::{
    Exit, LaunchError, LocalJob, OnFailure, Output, RunOptions, RunningJob, Signal, StopPolicy, StopReason,
    WorkerSpec,
};

const SOON: Duration = Duration::from_secs(10);

fn soon() -> Instant {
    Instant::now() + SOON
}

/// Ranks that run `script`, with captured output.
fn shells(nproc: usize, script: &str) -> LocalJob {
    LocalJob::new(nproc, "sh", ["-c", script]).output(Output::Capture).deadline(Duration::from_secs(60))
}

fn ready(job: &RunningJob) {
    job.ranks().iter().for_each(|rank| drop(job.wait_for_line(*rank, "ready", soon()).unwrap()));
}

/// Whether the process exists and is not a zombie.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !matches!(stat.rsplit_once(") ").map(|(_, rest)| &rest[..1]), None | Some("Z"))
}

/// A killed process takes a moment to end; one that was not killed does not end at all here.
fn end_within_a_second(pids: &[u32]) -> bool {
    let deadline = Instant::now() + Duration::from_secs(1);
    while pids.iter().any(|pid| is_alive(*pid)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    !pids.iter().any(|pid| is_alive(*pid))
}

#[test]
fn the_first_failure_is_the_root_cause_and_stops_the_others() {
    let start = Instant::now();
    let report = shells(4, "test $RANK = 2 && exit 3; exec sleep 60").start().unwrap().wait();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(report.root_cause, Some(2));
    assert_eq!(report.stopped, Some(StopReason::Failure { rank: 2 }));
    let exits: Vec<_> = report.ranks.iter().map(|rank| rank.exit).collect();
    assert_eq!(exits, [Exit::StoppedByUs, Exit::StoppedByUs, Exit::Code(3), Exit::StoppedByUs]);
}

#[test]
fn without_a_failure_no_worker_is_stopped() {
    let report = shells(3, "sleep 0.$RANK").start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    assert_eq!((report.root_cause, report.stopped), (None, None));
    assert!(report.ranks[2].ended_after > report.ranks[0].ended_after);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace() {
    let script = "test $RANK = 0 && { trap '' TERM; while :; do sleep 0.1; done; }; sleep 0.3; exit 5";
    let grace = Duration::from_millis(600);
    let start = Instant::now();
    let report = shells(2, script).grace(grace).start().unwrap().wait();
    assert_eq!(report.ranks[0].exit, Exit::StoppedByUs);
    assert_eq!(report.ranks[1].exit, Exit::Code(5));
    assert!(report.ranks[0].ended_after - report.ranks[1].ended_after >= grace, "{report}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_worker_gets_time_to_clean_up_on_sigterm() {
    let script = "trap 'sleep 0.3; echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let job = shells(2, script).start().unwrap();
    ready(&job);
    job.stop();
    let report = job.wait();
    assert_eq!(report.stopped, Some(StopReason::Asked));
    assert_eq!(report.root_cause, None, "a requested end is not a failure");
    for rank in &report.ranks {
        assert_eq!(rank.exit, Exit::Code(9));
        assert!(rank.stdout.ends_with(b"cleaned\n"));
    }
}

#[test]
fn the_deadline_stops_all_workers_even_a_suspended_one() {
    let job = shells(2, "trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 0.05; done");
    let job = job.deadline(Duration::from_millis(800)).start().unwrap();
    ready(&job);
    job.signal(1, Signal::STOP).unwrap();
    let start = Instant::now();
    let report = job.wait();
    assert!(start.elapsed() < Duration::from_secs(4), "no grace was needed: {:?}", start.elapsed());
    assert_eq!(report.stopped, Some(StopReason::Deadline));
    assert!(report.ranks.iter().all(|rank| rank.exit == Exit::Code(4)), "{report}");
}

#[test]
fn an_end_is_noticed_at_once_and_only_once() {
    let job = shells(2, "echo ready; exec sleep 60").on_failure(OnFailure::LetOthersRun).start().unwrap();
    ready(&job);
    assert_eq!(job.wait_rank(0, Instant::now()).unwrap(), None);
    let start = Instant::now();
    job.signal(0, Signal::KILL).unwrap();
    assert_eq!(job.wait_rank(0, soon()).unwrap(), Some(Exit::Signal(9)));
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    let error = job.signal(0, Signal::KILL).unwrap_err();
    assert!(matches!(error, LaunchError::Ended { rank: 0, exit: Exit::Signal(9) }), "{error}");
    assert!(matches!(job.signal(7, Signal::KILL), Err(LaunchError::NoSuchRank { rank: 7, local: 2 })));
    assert!(!job.wait_all(Instant::now()));
}

#[test]
fn processes_left_in_a_workers_group_end_with_it() {
    let job = shells(1, "sleep 60 & echo child $!; sleep 60 & echo child $!; exit 0");
    let start = Instant::now();
    let report = job.start().unwrap().wait();
    assert!(start.elapsed() < Duration::from_secs(5), "the children's pipes were waited for");
    let text = String::from_utf8(report.ranks[0].stdout.clone()).unwrap();
    let pids: Vec<u32> = text.lines().map(|line| line[6..].parse().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    assert!(end_within_a_second(&pids));
}

#[test]
fn dropping_a_job_ends_its_processes() {
    let job = shells(3, "trap '' TERM; sleep 60 & echo $!; echo ready; wait").start().unwrap();
    ready(&job);
    let mut pids: Vec<u32> = (0..3).map(|rank| job.pid(rank).unwrap()).collect();
    let child =
        |rank| String::from_utf8(job.output(rank).0).unwrap().lines().next().unwrap().parse().unwrap();
    pids.extend((0..3).map(child).collect::<Vec<u32>>());
    assert!(pids.iter().all(|pid| is_alive(*pid)), "control: they run before the drop");
    let start = Instant::now();
    drop(job);
    assert!(start.elapsed() < Duration::from_secs(2), "no grace for a dropped job: {:?}", start.elapsed());
    assert!(end_within_a_second(&pids));
}

/// Run in a process of its own by the test below; elsewhere it does nothing.
#[test]
fn launcher_to_be_killed() {
    if std::env::var_os("DRUMLINE_LAUNCH_TEST_VICTIM").is_some() {
        // Started by a thread that ends: the workers must outlive it.
        let start = || shells(2, "trap '' TERM; echo ready; while :; do sleep 0.05; done").start().unwrap();
        let job = std::thread::spawn(start).join().unwrap();
        ready(&job);
        std::thread::sleep(Duration::from_millis(100));
        println!("\npids {} {}", job.pid(0).unwrap(), job.pid(1).unwrap());
        drop(job.wait());
    }
}

#[test]
fn sigkill_of_the_launcher_ends_every_worker_within_a_second() {
    use std::io::{BufRead, BufReader};
    let mut launcher = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "it::stopping::launcher_to_be_killed", "--nocapture", "--quiet"])
        .env("DRUMLINE_LAUNCH_TEST_VICTIM", "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
    let pids = lines.find_map(|line| line.strip_prefix("pids ").map(str::to_string)).unwrap();
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)), "control: they run while the launcher does");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert!(end_within_a_second(&pids), "workers outlived their launcher");
}

/// How rank 1, which is about to fail with code 3, ends when rank 0 fails a moment before it.
fn exit_of_the_slower_rank(settle: Duration) -> Exit {
    let scripts = ["exit 1", "sleep 0.1; exit 3"];
    let spec = |(rank, script): (usize, &&str)| WorkerSpec {
        rank,
        program: "sh".into(),
        args: vec!["-c".into(), (*script).into()],
        ..WorkerSpec::default()
    };
    let stop = StopPolicy { settle, ..StopPolicy::default() };
    let options = RunOptions { output: Output::Capture, stop, deadline: Some(Duration::from_secs(30)) };
    let job = RunningJob::start(scripts.iter().enumerate().map(spec).collect(), options).unwrap();
    job.wait().ranks[1].exit
}

#[test]
fn a_rank_that_is_about_to_fail_can_still_print_its_error() {
    assert_eq!(exit_of_the_slower_rank(Duration::from_secs(10)), Exit::Code(3));
    assert_eq!(
        exit_of_the_slower_rank(Duration::ZERO),
        Exit::StoppedByUs,
        "control: without settle it is stopped"
    );
}
