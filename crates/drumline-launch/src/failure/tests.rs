//! Which rank is the root cause, and how the report describes it.

use super::*;

const TRACEBACK: &str =
    "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\n    f()\nValueError: bad\n";

fn rank(rank: usize, exit: Exit, millis: u64, stderr: &str) -> RankReport {
    let (pid, ended_after) = (100 + rank as u32, Duration::from_millis(millis));
    RankReport { rank, pid, exit, core_dumped: false, ended_after, stdout: Vec::new(), stderr: stderr.into() }
}

/// A job in which `first` failed first, so that the others were stopped.
fn failed(first: usize, ranks: Vec<RankReport>) -> JobReport {
    JobReport { ranks, root_cause: Some(first), stopped: Some(StopReason::Failure { rank: first }) }
}

fn on_a(num: usize) -> Vec<Evidence> {
    (0..num).map(|rank| Evidence::at(rank, rank, "a")).collect()
}

fn failure_of(report: &JobReport) -> FailureReport {
    FailureReport::new(report, &on_a(report.ranks.len())).unwrap()
}

#[test]
fn the_root_is_described_once_and_the_others_in_a_line_each() {
    let report = failed(
        1,
        vec![
            rank(0, Exit::Code(0), 900, ""),
            rank(1, Exit::Code(1), 1_000, &format!("loading\n{TRACEBACK}")),
            rank(2, Exit::StoppedByUs, 1_001, TRACEBACK),
            rank(3, Exit::StoppedByUs, 1_002, "busy"),
            rank(4, Exit::StoppedByUs, 1_003, ""),
            rank(5, Exit::Code(1), 1_004, "Error: lost rank 1 of group `world` (a, pid 101): exited"),
        ],
    );
    let expected = "\
rank 1 on host a failed first: exit code 1 after 1.0 s
  process: pid 101, local rank 1
  error:
    Traceback (most recent call last):
      File \"t.py\", line 3, in <module>
        f()
    ValueError: bad
  the last 5 lines of its stderr:
    loading
    … the error above, 4 lines …
of the other 5 here: 1 failed, 3 stopped by the launcher, 1 succeeded
  rank 2 on host a: stopped by the launcher after 1.0 s; said the same
  rank 5 on host a: exit code 1 after 1.0 s, because rank 1 was gone; said: Error: lost rank 1 of group `world` (a, pid 101): exited
  ranks 3-4 on host a: stopped by the launcher
";
    assert_eq!(failure_of(&report).to_string(), expected);
}

#[test]
fn blame_moves_to_a_rank_that_failed_here() {
    let lost = |rank| format!("Error: lost rank {rank} of group `world` (a, pid 9): gone\n");
    let ranks = vec![
        rank(0, Exit::Code(1), 10, &lost(1)),
        rank(1, Exit::Code(1), 11, "Error: rank 2 called off group `world`: no data\n"),
        rank(2, Exit::Code(7), 12, "Error: no data\n"),
    ];
    let report = failure_of(&failed(0, ranks));
    assert_eq!((report.root.rank, report.root.exit), (2, Exit::Code(7)));
    let standings: Vec<_> = report.others.iter().map(|other| other.standing).collect();
    assert_eq!(standings, [Standing::Follower(Some(1)), Standing::Follower(Some(2))]);

    let circle = vec![rank(0, Exit::Code(1), 10, &lost(1)), rank(1, Exit::Code(1), 11, &lost(0))];
    assert_eq!(failure_of(&failed(0, circle)).root.rank, 0, "in a circle the clock decides");
}

#[test]
fn a_loss_that_was_survived_is_not_blamed() {
    let survived = format!("lost rank 1 of group `world`: continued with fewer\n{TRACEBACK}");
    let ranks = vec![rank(0, Exit::Code(1), 10, &survived), rank(1, Exit::Code(1), 11, "")];
    assert_eq!(failure_of(&failed(0, ranks)).root.rank, 0);
    let killed = vec![rank(0, Exit::Signal(9), 10, "lost rank 1 of group"), rank(1, Exit::Code(1), 11, "")];
    assert_eq!(failure_of(&failed(0, killed)).root.rank, 0, "SIGKILL is not a reaction to a loss");
}

#[test]
fn a_stopped_rank_is_never_the_root_even_when_blamed() {
    let ranks = vec![
        rank(0, Exit::Code(1), 10, "lost rank 1 of group `world`"),
        rank(1, Exit::StoppedByUs, 12, TRACEBACK),
    ];
    let report = failure_of(&failed(0, ranks));
    assert_eq!(report.root.rank, 0);
    let text = report.to_string();
    assert!(text.contains("it reports that rank 1 was lost first"), "{text}");
    assert!(
        text.contains("rank 1 on host a: stopped by the launcher after 0.012 s; said: ValueError: bad"),
        "{text}"
    );
}

#[test]
fn a_broken_connection_blames_the_rank_with_an_error_of_its_own() {
    let closed = "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"t.py\", line 11\n[rank0]: RuntimeError: \
                  [pair.cc:547] Connection closed by peer [127.0.0.1]:55191\n";
    let both = |exit, stderr: &str| {
        failure_of(&failed(0, vec![rank(0, Exit::Code(1), 10, closed), rank(1, exit, 12, stderr)]))
    };
    assert_eq!(both(Exit::Code(1), TRACEBACK).root.rank, 1);
    assert_eq!(both(Exit::Code(1), closed).root.rank, 0, "both follow: the clock decides");
    let reaction = TRACEBACK.replace("ValueError: bad", "SignalException: got signal 15");
    assert_eq!(both(Exit::Code(1), &reaction).root.rank, 0, "a reaction to the stop is no cause");

    let stopped = both(Exit::StoppedByUs, TRACEBACK);
    assert_eq!(stopped.root.rank, 0);
    let advice = "what to do: look at rank 1: it had reported an error of its own before it was stopped\n";
    assert!(stopped.to_string().ends_with(advice), "{stopped}");
    let text = both(Exit::StoppedByUs, "").to_string();
    assert!(
        text.ends_with("what to do: look for the cause in the reports of the other hosts\n"),
        "control: {text}"
    );
}

#[test]
fn a_cause_on_another_host_is_mentioned() {
    let ranks = vec![rank(0, Exit::Code(1), 10, "lost rank 7 of group `world` (b, pid 3): gone")];
    let text = failure_of(&failed(0, ranks)).to_string();
    assert!(text.ends_with("what to do: look for the cause in the report of rank 7's host\n"), "{text}");
}

#[test]
fn ranks_that_end_during_the_stop_are_followers_and_others_are_not() {
    let ranks = || {
        vec![rank(0, Exit::Code(3), 10, ""), rank(1, Exit::Code(4), 20, ""), rank(2, Exit::Signal(11), 5, "")]
    };
    let stopped = failure_of(&failed(0, ranks()));
    let standings =
        |report: &FailureReport| report.others.iter().map(|other| other.standing).collect::<Vec<_>>();
    assert_eq!(standings(&stopped), [Standing::Follower(None), Standing::Later]);
    let not_stopped = JobReport { ranks: ranks(), root_cause: Some(0), stopped: None };
    assert_eq!(standings(&failure_of(&not_stopped)), [Standing::Later, Standing::Later]);
}

#[test]
fn a_job_stopped_by_its_owner_has_no_failure() {
    let ranks = vec![rank(0, Exit::StoppedByUs, 10, ""), rank(1, Exit::Code(1), 11, TRACEBACK)];
    let asked = JobReport { ranks, root_cause: None, stopped: Some(StopReason::Asked) };
    assert!(FailureReport::new(&asked, &[]).is_none());
    let fine =
        JobReport { ranks: vec![rank(0, Exit::Code(0), 10, TRACEBACK)], root_cause: None, stopped: None };
    assert!(FailureReport::new(&fine, &[]).is_none());
}

#[test]
fn a_worker_that_cannot_be_killed_is_named_with_pid_and_state() {
    let state = ProcessState { name: "train".into(), state: 'D', waits_in: Some("fuse_wait".into()) };
    let mut evidence = on_a(2);
    evidence[1].state = Some(state);
    let ranks = || vec![rank(0, Exit::Code(1), 10, ""), rank(1, Exit::Unkillable, 20, "")];
    let text = FailureReport::new(&failed(0, ranks()), &evidence).unwrap().to_string();
    let named = "rank 1 on host a: could not be killed: pid 101 is `train` in state D (waits in the kernel, cannot be \
                 interrupted, in fuse_wait)";
    assert!(text.contains(named), "{text}");

    let asked = JobReport { ranks: ranks(), root_cause: None, stopped: Some(StopReason::Asked) };
    let report = FailureReport::new(&asked, &evidence).unwrap();
    let text = report.to_string();
    assert!(
        text.starts_with(
            "rank 1 on host a could not be killed\n  process: pid 101, local rank 1\n  state: `train`"
        ),
        "{text}"
    );
    assert!(text.contains("what to do: pid 101 is stuck in the kernel"), "{text}");
    assert_eq!(exit_code(&report, ExitCodes::Child), 1);
}

#[test]
fn an_out_of_memory_kill_is_in_the_headline() {
    let mut evidence = on_a(1);
    evidence[0].oom = Some(OomKill { limit: Some(8 << 30), held: None, together: None });
    let job = failed(0, vec![rank(0, Exit::Signal(9), 12_345, "")]);
    let text = FailureReport::new(&job, &evidence).unwrap().to_string();
    let headline = "rank 0 on host a failed first: killed by SIGKILL after 12.3 s (out of memory: the limit is 8.0 GiB)\n";
    assert!(text.starts_with(headline), "{text}");
    assert!(text.contains("what to do: give the job more memory"), "{text}");
    let text = failure_of(&job).to_string();
    assert!(
        text.starts_with("rank 0 on host a failed first: killed by SIGKILL after 12.3 s\n"),
        "control: {text}"
    );
    assert!(text.contains("something outside this job sent SIGKILL"), "{text}");
}

#[test]
fn a_rehearsed_fault_is_not_blamed_on_something_outside() {
    let stderr = "step 19\ndrumline: fault rank=0,step=20,kill\n";
    let killed = |stderr: &str| failed(0, vec![rank(0, Exit::Signal(9), 1_500, stderr)]);
    let text = failure_of(&killed(stderr)).to_string();
    assert!(
        text.starts_with(
            "rank 0 on host a failed first: killed by SIGKILL after 1.5 s (the rehearsed fault rank=0,step=20,kill)\n"
        ),
        "{text}"
    );
    let advice = "what to do: nothing is wrong: rank=0,step=20,kill is a fault that --fault injected; try \
                  --max-restarts N to rehearse the recovery as well\n";
    assert!(text.ends_with(advice) && !text.contains("outside"), "{text}");

    let with_timed_fault = |after: &str| {
        let mut evidence = on_a(1);
        evidence[0].timed_faults = vec![format!("rank=0,after={after},kill").parse().unwrap()];
        FailureReport::new(&killed(""), &evidence).unwrap().to_string()
    };
    let text = with_timed_fault("1s");
    assert!(text.contains("(the rehearsed fault rank=0,after=1s,kill)"), "{text}");
    for control in [
        with_timed_fault("2s"),
        failure_of(&killed("")).to_string(),
        failure_of(&killed("drumline: fault rank=1,step=20,kill\n")).to_string(),
        failure_of(&killed("drumline: fault rank=0,step=20,slow=2\n")).to_string(),
    ] {
        assert!(control.contains("something outside this job sent SIGKILL"), "control: {control}");
    }
}

#[test]
fn an_injected_exit_a_panic_and_a_stop_are_rehearsals_too() {
    let text = |fault: &str, exit| {
        failure_of(&failed(0, vec![rank(0, exit, 10, &format!("drumline: fault rank=0,step=2,{fault}\n"))]))
            .to_string()
    };
    assert!(text("exit=3", Exit::Code(3)).contains("(the rehearsed fault rank=0,step=2,exit=3)"));
    assert!(text("panic", Exit::Code(101)).contains("(the rehearsed fault rank=0,step=2,panic)"));
    assert!(!text("exit=3", Exit::Code(4)).contains("rehearsed"), "control: another code");
    let ranks = vec![
        rank(0, Exit::Code(1), 10, "Error: timed out after 3s: ranks [1] never arrived\n"),
        rank(1, Exit::StoppedByUs, 12, "drumline: fault rank=1,step=2,stop\n"),
    ];
    let text = failure_of(&failed(0, ranks)).to_string();
    assert!(
        text.ends_with("what to do: rank 1 was stopped by the rehearsed fault rank=1,step=2,stop\n"),
        "{text}"
    );
}

#[test]
fn a_core_dump_is_in_the_headline() {
    let mut ended = rank(0, Exit::Signal(11), 10, "");
    ended.core_dumped = true;
    let text = failure_of(&failed(0, vec![ended])).to_string();
    assert!(
        text.starts_with("rank 0 on host a failed first: killed by SIGSEGV after 0.010 s (core dumped)\n"),
        "{text}"
    );
    assert!(text.contains("coredumpctl debug 100"), "{text}");
}

#[test]
fn the_error_file_takes_precedence_over_stderr_without_repetition() {
    let mut evidence = on_a(1);
    let callstack = Some(TRACEBACK.to_string());
    evidence[0].error_file =
        Some(ErrorFile { message: "ValueError: bad".into(), callstack, timestamp: Some(1) });
    let job = failed(0, vec![rank(0, Exit::Code(1), 10, TRACEBACK)]);
    let text = FailureReport::new(&job, &evidence).unwrap().to_string();
    assert_eq!(text.matches("ValueError: bad").count(), 1, "{text}");

    let other = TRACEBACK.replace("ValueError: bad", "OSError: worse");
    let job_with_two = failed(0, vec![rank(0, Exit::Code(1), 10, &other)]);
    let text = FailureReport::new(&job_with_two, &evidence).unwrap().to_string();
    assert!(text.contains("ValueError: bad") && text.contains("OSError: worse"), "{text}");

    let callstack = Some("at train.rs:3".to_string());
    evidence[0].error_file = Some(ErrorFile { message: "no data".into(), callstack, timestamp: None });
    let text = FailureReport::new(&job, &evidence).unwrap().to_string();
    assert!(text.contains("  error: no data\n  error:\n    at train.rs:3\n"), "{text}");

    evidence[0].error_file =
        Some(ErrorFile { message: "just\x1b[2J words\nmore".into(), ..ErrorFile::default() });
    let job = failed(0, vec![rank(0, Exit::Code(1), 10, "")]);
    let text = FailureReport::new(&job, &evidence).unwrap().to_string();
    assert!(text.contains("  error: just words\n  it wrote nothing to stderr\n"), "{text}");
}

#[test]
fn an_error_with_causes_and_on_other_ranks_is_shown_once() {
    let message = "cannot write the checkpoint";
    let file =
        |text: String| Some(ErrorFile { message: text.clone(), callstack: Some(text), timestamp: None });
    let mut evidence = on_a(2);
    evidence[0].error_file = file(format!("{message}\n  caused by: no disk"));
    evidence[0].error_file.as_mut().unwrap().message = message.into();
    evidence[1].error_file = file(format!("on rank 0: {message}"));
    let stderr = format!("epoch 1\nerror: {message}: no disk\n");
    let ranks = vec![rank(0, Exit::Code(1), 10, &stderr), rank(1, Exit::Code(1), 11, "")];
    let text = FailureReport::new(&failed(0, ranks), &evidence).unwrap().to_string();
    assert_eq!((text.matches(message).count(), text.matches("no disk").count()), (1, 1), "{text}");
    assert!(text.contains("the last line of its stderr:\n    epoch 1\n"), "{text}");
    assert!(
        text.contains("rank 1 on host a: exit code 1 after 0.011 s, after the first failure; said the same"),
        "{text}"
    );
}

#[test]
fn the_standard_librarys_note_about_backtraces_is_left_out() {
    let panic = "thread 'main' panicked at a.rs:1:1:\nboom\nnote: run with `RUST_BACKTRACE=1` environment variable to \
                 display a backtrace\n";
    let text = failure_of(&failed(0, vec![rank(0, Exit::Code(101), 10, panic)])).to_string();
    assert!(!text.contains("note: run with") && !text.contains("lines of its stderr"), "{text}");
    assert!(text.ends_with("what to do: look at a.rs:1:1; RUST_BACKTRACE=1 also shows its callers, if the program was built with symbols\n"), "{text}");
}

#[test]
fn an_unreadable_error_file_is_reported_and_does_no_harm() {
    let mut evidence = on_a(1);
    evidence[0].error_file_problem = Some("logs/error.json: it is empty".into());
    let job = failed(0, vec![rank(0, Exit::Code(1), 10, "oops")]);
    let text = FailureReport::new(&job, &evidence).unwrap().to_string();
    assert!(text.contains("its error file cannot be used: logs/error.json: it is empty\n"), "{text}");
    assert!(text.contains("    oops\n"), "{text}");
}

#[test]
fn a_report_stays_short_whatever_was_printed() {
    let garbage: String = (0..10 << 20).map(|i| char::from(b'!' + (i % 90) as u8)).collect();
    let many = "a line of output\n".repeat(600_000);
    let deep = format!("Traceback (most recent call last):\n{}E: 1\n", "  File \"x\"\n".repeat(5_000));
    for (stderr, most) in [(garbage, 4_000), (many, 4_000), (deep, 8_000), ("\u{1}\u{2}\n".repeat(99), 4_000)]
    {
        let ranks = (0..4).map(|r| rank(r, Exit::Code(1), 10 + r as u64, &stderr)).collect();
        let report = failure_of(&failed(0, ranks));
        assert!(report.root.last_lines.len() <= LAST_LINES);
        let text = report.to_string();
        assert!(text.len() < most, "{} characters: {text:.2000}", text.len());
    }
}

#[test]
fn thousands_of_stopped_ranks_are_one_line() {
    let mut ranks: Vec<_> = (0..4_000).map(|r| rank(r, Exit::StoppedByUs, 10, "")).collect();
    ranks[7] = rank(7, Exit::Code(1), 9, "oops");
    let text = failure_of(&failed(7, ranks)).to_string();
    assert!(text.contains("ranks 0-6, 8-3999 on host a: stopped by the launcher\n"), "{text:.2000}");
}

#[test]
fn exit_codes_are_those_of_torchrun_or_of_the_child() {
    for (exit, child) in
        [(Exit::Code(7), 7), (Exit::Signal(9), 137), (Exit::Code(256), 1), (Exit::Code(-1), 1)]
    {
        let report = failure_of(&failed(0, vec![rank(0, exit, 10, "")]));
        assert_eq!(exit_code(&report, ExitCodes::Torchrun), 1, "{exit}");
        assert_eq!(exit_code(&report, ExitCodes::Child), child, "{exit}");
    }
}

#[test]
fn a_rank_that_succeeded_too_early_is_not_looked_for_on_another_host() {
    let left = "Error: rank 1 has left group `world` (its process ended, or it dropped the group) and takes no part in barrier() #7\n";
    let advice = |other: Exit| {
        failure_of(&failed(0, vec![rank(0, Exit::Code(1), 20, left), rank(1, other, 10, "")])).to_string()
    };
    let well = advice(Exit::Code(0));
    assert!(
        well.contains(
            "what to do: rank 1 ended successfully before the others; try the same number of steps"
        ),
        "{well}"
    );
    assert!(!well.contains("'s host"), "{well}");
    assert!(!advice(Exit::StoppedByUs).contains("'s host"), "it is in this report");
    let elsewhere = failure_of(&failed(0, vec![rank(0, Exit::Code(1), 20, left)])).to_string();
    assert!(elsewhere.contains("the report of rank 1's host"), "control: {elsewhere}");
}
