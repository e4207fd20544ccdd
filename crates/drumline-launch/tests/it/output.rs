//! Where the workers' output goes in each mode.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drumline_launch::{AttemptLogs, LaunchError, LocalJob, Output};

fn shells(nproc: usize, script: &str) -> LocalJob {
    LocalJob::new(nproc, "sh", ["-c", script]).output(Output::Capture).deadline(Duration::from_secs(60))
}

#[test]
fn streams_are_kept_separate() {
    let report = shells(2, "echo out $RANK; echo err $RANK >&2; printf end").start().unwrap().wait();
    for (rank, worker) in report.ranks.iter().enumerate() {
        assert_eq!(worker.stdout_text(), format!("out {rank}\nend"));
        assert_eq!(worker.stderr_text(), format!("err {rank}\n"));
    }
}

#[test]
fn much_output_does_not_block_the_worker_and_only_its_end_is_kept() {
    let report = shells(2, "head -c 20000000 /dev/zero; echo the end").start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    for worker in &report.ranks {
        assert_eq!(worker.stdout.len(), 1 << 20);
        assert!(worker.stdout.ends_with(b"\0the end\n"));
    }
}

#[test]
fn waiting_for_a_line_ends_when_it_arrives_or_cannot_arrive() {
    let job = shells(2, "printf 'al'; sleep 0.2; echo most; test $RANK = 1 || sleep 60").start().unwrap();
    let soon = Instant::now() + Duration::from_secs(10);
    assert_eq!(job.wait_for_line(0, "most", soon).unwrap(), "almost");
    let why = |rank, deadline| match job.wait_for_line(rank, "ready", deadline) {
        Err(LaunchError::NoSuchLine { why, output, .. }) => (why, output),
        other => panic!("{other:?}"),
    };
    let almost = "almost\n".to_string();
    assert_eq!(why(1, soon), ("before it ended", almost.clone()));
    assert_eq!(why(0, Instant::now() + Duration::from_millis(50)), ("in time", almost));
}

#[test]
fn an_escaped_process_with_the_pipe_is_not_waited_for() {
    let start = Instant::now();
    let report = shells(1, "setsid sleep 3 & echo started").start().unwrap().wait();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(report.ranks[0].stdout, b"started\n");
}

/// Run in a process of its own by the test below; elsewhere it does nothing.
#[test]
fn launcher_with_prefixes() {
    if std::env::var_os("DRUMLINE_LAUNCH_TEST_PREFIX").is_some() {
        let script = "i=0; while test $i -lt 300; do printf 'li'; printf 'ne %d\\n' $i; i=$((i+1)); done; \
                      echo complaint >&2; printf 'no newline'";
        let report = shells(3, script).output(Output::Logged(AttemptLogs::default())).start().unwrap().wait();
        assert!(report.is_success() && report.ranks[0].stdout.ends_with(b"no newline"), "{report}");
    }
}

#[test]
fn prefixed_lines_are_whole() {
    let launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "it::output::launcher_with_prefixes", "--nocapture", "--quiet"])
        .env("DRUMLINE_LAUNCH_TEST_PREFIX", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(launcher.stdout).unwrap();
    for rank in 0..3 {
        let prefix = format!("[rank {rank}]: ");
        let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<_> =
            (0..300).map(|i| format!("line {i}")).chain(["no newline".to_string()]).collect();
        assert_eq!(lines, expected);
        let complaint = format!("{prefix}complaint");
        assert!(String::from_utf8_lossy(&launcher.stderr).lines().any(|line| line == complaint));
    }
}
