//! `--fault`: faults that the launcher injects into ranks, and those that it passes on to them.

use std::time::Duration;

use super::job::Job;

const LONG: Duration = Duration::from_secs(30);

/// Each rank prints when it begins, and when it has slept long enough for the faults.
const SCRIPT: &str =
    "echo rank $RANK begins run $TORCHELASTIC_RESTART_COUNT; sleep 1.5; echo rank $RANK ends";

#[test]
fn a_rank_is_killed_at_its_time_and_once_only() {
    let flags = "--nproc-per-node 2 --max-restarts 1";
    let (code, text) = Job::run(&format!("{flags} --fault rank=1,after=300ms,kill"), SCRIPT).end(LONG);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("rank 1 begins run 0") && text.contains("rank 1 begins run 1"), "{text}");
    assert!(text.contains("fault rank=1,after=300ms,kill") && text.contains("SIGKILL"), "{text}");
    assert_eq!(text.matches("rank 1 ends").count(), 1, "{text}");
    let (code, text) = Job::run(flags, SCRIPT).end(LONG);
    assert!(code == 0 && !text.contains("run 1") && !text.contains("fault"), "the control: {text}");
}

#[test]
fn a_rehearsed_kill_is_reported_as_such() {
    let (code, text) = Job::run("--nproc-per-node 2 --fault rank=1,after=300ms,kill", SCRIPT).end(LONG);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("WARN fault rank=1,after=300ms,kill: SIGKILL\n"), "{text}");
    assert!(text.contains("(the rehearsed fault rank=1,after=300ms,kill)"), "{text}");
    assert!(!text.contains("outside") && !text.contains("Signal::"), "{text}");
    let killed = "test $RANK = 0 || kill -9 $$; sleep 9";
    let (_, text) = Job::run("--nproc-per-node 2 --fault rank=1,after=60s,kill", killed).end(LONG);
    assert!(text.contains("something outside this job sent SIGKILL"), "the control: {text}");
    assert!(!text.contains("rehearsed"), "{text}");
}

#[test]
fn a_fault_that_never_comes_is_a_warning() {
    let flags = "--fault rank=0,after=60s,kill --fault rank=0,after=1s,restart=2,kill";
    let (code, text) = Job::run(flags, "true").end(LONG);
    assert_eq!(code, 0, "{text}");
    for warning in [
        "WARN fault rank=0,after=60s,kill did not happen: the ranks ended after ",
        "WARN fault rank=0,after=1s,restart=2,kill did not happen: the job ended after 0 restarts\n",
    ] {
        assert_eq!(text.matches(warning).count(), 1, "{text}");
    }
}

#[test]
fn a_later_run_has_its_own_faults() {
    let flags = "--max-restarts 3 --fault rank=0,after=100ms,kill --fault rank=0,after=100ms,restart=1,kill";
    let (code, text) = Job::run(flags, SCRIPT).end(LONG);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("rank 0 begins run 2") && !text.contains("rank 0 begins run 3"), "{text}");
}

#[test]
fn a_rank_that_is_stopped_for_a_while_is_only_late() {
    let script = "for i in 1 2 3 4 5 6 7 8; do date +%s%N; sleep 0.1; done";
    let longest_pause = |fault: &str| {
        let (code, text) = Job::run(fault, script).end(LONG);
        assert_eq!(code, 0, "{text}");
        let times: Vec<u64> =
            text.lines().filter_map(|line| line.strip_prefix("[rank 0]: ")?.parse().ok()).collect();
        assert_eq!(times.len(), 8, "{text}");
        times.windows(2).map(|pair| pair[1] - pair[0]).max().map(Duration::from_nanos).unwrap()
    };
    let stopped = longest_pause("--fault rank=0,after=200ms,stop=3s");
    assert!(stopped > Duration::from_millis(2500), "{stopped:?}");
    let control = longest_pause("");
    assert!(control < Duration::from_millis(2000), "the control: {control:?}");
}

#[test]
fn step_faults_reach_the_ranks_and_invalid_ones_are_refused_before_any_starts() {
    let flags = "--nproc-per-node 2 --fault rank=1,step=20,kill;rank=0,step=3,slow=2.5";
    let (code, text) = Job::run(flags, "echo got $DRUMLINE_FAULTS").end(LONG);
    assert!(
        code == 0 && text.matches("got rank=1,step=20,kill;rank=0,step=3,slow=2.5").count() == 2,
        "{text}"
    );
    for (fault, why) in [
        ("rank=7,step=1,kill", "there are ranks 0 to 1 only"),
        ("rank=1,step=1,kick", "`kick` in fault `rank=1,step=1,kick` is unknown; try rank=N"),
    ] {
        let (code, text) = Job::run(&format!("--nproc-per-node 2 --fault {fault}"), "echo ran").end(LONG);
        assert!(code == 2 && text.contains(why) && !text.contains("ran\n"), "{code}: {text}");
    }
}
