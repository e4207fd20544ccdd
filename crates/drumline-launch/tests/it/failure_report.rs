//! Jobs of real processes that fail in different ways, and their failure reports.

use std::path::Path;
use std::time::Duration;

use drumline_launch::{
    Evidence, Exit, ExitCodes, FailureReport, JobReport, LocalJob, OomSources, OomWatch, Output, Standing,
    exit_code,
};
use drumline_rendezvous::error_file::{install_panic_file, record_error};

const PART: &str = "DRUMLINE_TEST_FAILING";

/// An error with a cause.
#[derive(Debug, thiserror::Error)]
#[error("the configuration cannot be read")]
struct BadConfig(#[source] std::num::ParseIntError);

/// Not a test itself: the body of a worker of the tests below.
#[test]
fn worker() {
    let Ok(part) = std::env::var(PART) else { return };
    if std::env::var("RANK").unwrap() != "1" {
        std::thread::sleep(Duration::from_secs(60));
    }
    match part.as_str() {
        "panic" => {
            install_panic_file();
            install_panic_file();
            panic!("no such layer: {}", 7);
        }
        "error" => {
            record_error(&BadConfig("x".parse::<i32>().unwrap_err())).unwrap();
            std::process::exit(3);
        }
        other => panic!("no such part: {other}"),
    }
}

/// Ranks that run `script`, each with its own error file in `folder`.
fn shells(nproc: usize, script: &str, folder: &Path) -> LocalJob {
    let script = format!("export TORCHELASTIC_ERROR_FILE=\"$FOLDER/$RANK.json\"; {script}");
    LocalJob::new(nproc, "sh", ["-c", &script])
        .env("FOLDER", folder)
        .output(Output::Capture)
        .deadline(Duration::from_secs(60))
}

/// Runs the job to its end and creates its failure report.
fn failure_of(job: LocalJob, folder: &Path) -> (JobReport, FailureReport) {
    let mut watch = OomWatch::start(&OomSources::default());
    let report = job.start().unwrap().wait();
    let gather = |rank: &drumline_launch::RankReport| {
        let file = folder.join(format!("{}.json", rank.rank));
        Evidence::at(rank.rank, rank.rank, "a").gather(rank, Some(&file), &mut watch)
    };
    let evidence: Vec<_> = report.ranks.iter().map(gather).collect();
    let failure = FailureReport::new(&report, &evidence).unwrap();
    (report, failure)
}

fn this_program(part: &str, folder: &Path) -> LocalJob {
    let this = std::env::current_exe().unwrap();
    shells(3, "exec \"$THIS\" --exact it::failure_report::worker --nocapture", folder)
        .env("THIS", this)
        .env(PART, part)
}

#[test]
fn a_panic_reaches_the_report_through_the_error_file_and_appears_once() {
    let folder = tempfile::tempdir().unwrap();
    let (_, failure) = failure_of(this_program("panic", folder.path()), folder.path());
    assert_eq!((failure.root.rank, failure.root.exit), (1, Exit::Code(101)));
    assert_eq!(failure.root.error_file.as_ref().unwrap().message, "no such layer: 7");
    let text = failure.to_string();
    assert_eq!(text.matches("no such layer: 7").count(), 1, "{text}");
    assert!(text.contains("ranks 0, 2 on host a: stopped by the launcher"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");
}

#[test]
fn a_recorded_error_reaches_the_report_with_its_causes() {
    let folder = tempfile::tempdir().unwrap();
    let (_, failure) = failure_of(this_program("error", folder.path()), folder.path());
    assert_eq!(failure.root.exit, Exit::Code(3));
    let expected =
        "  error:\n    the configuration cannot be read\n      caused by: invalid digit found in string\n";
    assert!(failure.to_string().contains(expected), "{failure}");
    assert_eq!((exit_code(&failure, ExitCodes::Torchrun), exit_code(&failure, ExitCodes::Child)), (1, 3));
}

#[test]
fn recording_an_error_without_a_launcher_does_nothing() {
    if std::env::var_os("TORCHELASTIC_ERROR_FILE").is_none() {
        record_error(&std::io::Error::other("nobody asks")).unwrap();
    }
}

#[test]
fn a_broken_error_file_is_reported_with_everything_else() {
    let folder = tempfile::tempdir().unwrap();
    let script = "test $RANK = 0 && { printf '{\"message' >$TORCHELASTIC_ERROR_FILE; echo oops >&2; exit 4; }; sleep 60";
    let (_, failure) = failure_of(shells(2, script, folder.path()), folder.path());
    let text = failure.to_string();
    assert!(
        text.contains("its error file cannot be used: ") && text.contains("0.json: it is not JSON"),
        "{text}"
    );
    assert!(text.contains("    oops\n"), "{text}");
}

#[test]
fn an_external_sigkill_is_not_mistaken_for_lack_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (_, failure) =
        failure_of(shells(2, "test $RANK = 1 && kill -9 $$; sleep 60", folder.path()), folder.path());
    assert_eq!((failure.root.rank, failure.root.exit, failure.root.oom), (1, Exit::Signal(9), None));
    assert_eq!(failure.others[0].standing, Standing::Stopped);
    assert!(failure.to_string().contains("something outside this job sent SIGKILL"), "{failure}");
    assert_eq!(exit_code(&failure, ExitCodes::Child), 137);
}

#[test]
fn a_core_dump_is_reported_only_if_there_is_one() {
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let written = pattern.trim() == "core";
    for (limit, expected) in [("0", false), ("unlimited", written)] {
        if limit != "0" && !written {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let script = format!("cd \"$FOLDER\"; ulimit -c {limit}; kill -SEGV $$");
        let (_, failure) = failure_of(shells(1, &script, folder.path()), folder.path());
        assert_eq!((failure.root.exit, failure.root.core_dumped), (Exit::Signal(11), expected), "{limit}");
        assert_eq!(failure.to_string().contains("(core dumped)"), expected, "{failure}");
    }
}

#[test]
fn a_follower_that_ends_first_blames_the_rank_it_lost() {
    let folder = tempfile::tempdir().unwrap();
    let script = "trap 'echo Error: the disk is full >&2; exit 9' TERM
        if test $RANK = 0; then sleep 0.3; echo 'Error: lost rank 1 of group `world` (a, pid 7): gone' >&2; exit 1; fi
        while :; do sleep 0.05; done";
    let (report, failure) = failure_of(shells(2, script, folder.path()), folder.path());
    assert_eq!(report.root_cause, Some(0), "rank 0 ends first");
    assert_eq!((failure.root.rank, failure.root.exit), (1, Exit::Code(9)));
    assert_eq!(failure.others[0].standing, Standing::Follower(Some(1)));
}

#[test]
fn a_python_traceback_includes_the_exception_that_caused_it() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3 here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = "import os, time
if os.environ['RANK'] != '1': time.sleep(60)
try:
    {}['shard']
except KeyError as missing:
    raise ValueError('no data') from missing";
    let job = shells(2, "exec python3 -c \"$PROGRAM\"", folder.path()).env("PROGRAM", program);
    let (_, failure) = failure_of(job, folder.path());
    let trace = failure.root.trace.as_ref().unwrap();
    assert_eq!(trace.summary, "ValueError: no data");
    assert!(trace.lines.iter().any(|line| line == "KeyError: 'shard'"), "{failure}");
    assert_eq!(failure.to_string().matches("ValueError: no data").count(), 1, "{failure}");
}

#[test]
fn megabytes_of_output_make_a_short_report() {
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 10485760 /dev/urandom >&2; printf '\\nthe end\\n' >&2; exit 5";
    let (_, failure) = failure_of(shells(2, script, folder.path()), folder.path());
    let text = failure.to_string();
    assert!(text.len() < 100_000 && text.contains("the end"), "{} bytes", text.len());
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'));
}
