//! The example that fails once on purpose.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use drumline_launch::{Exit, JobReport, LocalJob, Output};

use super::started::drumline;

const LAUNCH_TRY: &str = env!("CARGO_BIN_EXE_launch_try");

fn attempt(restarts: &str) -> JobReport {
    let job = LocalJob::new(3, LAUNCH_TRY, [] as [&str; 0]).env("TORCHELASTIC_RESTART_COUNT", restarts);
    job.output(Output::Capture).deadline(Duration::from_secs(60)).start().unwrap().wait()
}

#[test]
fn the_first_attempt_fails_on_the_last_rank_and_the_second_succeeds() {
    let first = attempt("0");
    assert_eq!(first.ranks[2].exit, Exit::Code(1), "{first}");
    assert!(first.ranks[2].stderr_text().contains("failing on purpose"), "{first}");
    let second = attempt("1");
    assert!(second.is_success(), "{second}");
    for rank in &second.ranks {
        let said = rank.stdout_text();
        assert!(said.starts_with(&format!("RANK={} WORLD_SIZE=3 LOCAL_RANK={0} ", rank.rank)), "{said}");
        assert!(said.contains("3 ranks have met in attempt 1") && said.ends_with("done, again\n"), "{said}");
        assert!(!said.contains("(not set)"), "{said}");
    }
}

#[test]
fn it_is_small_and_needs_no_libtorch() {
    let program = std::fs::read(LAUNCH_TRY).unwrap();
    let has = |name: &[u8]| program.windows(name.len()).any(|bytes| bytes == name);
    assert!(has(b"libc.so.6") && !has(b"libtorch_cpu.so"), "what is linked is named in the program");
}

#[test]
fn without_a_launcher_it_says_what_to_do() {
    let mut command = Command::new(LAUNCH_TRY);
    let output = command.env_remove("TORCHELASTIC_RESTART_COUNT").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("try `drumline run launch_try`"), "{said}");
}

fn run(drumline: &Path, flags: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("timeout");
    command.args(["60"]).arg(drumline).args(["run", "--nproc-per-node", "2"]).args(flags).arg(LAUNCH_TRY);
    let output = command.env_remove("RANK").output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn drumline_run_restarts_it_once() {
    let Some(drumline) = drumline() else { return };
    let (code, said) = run(&drumline, &["--max-restarts", "1"]);
    assert_eq!(code, Some(0), "{said}");
    for rank in 0..2 {
        assert!(said.contains(&format!("rank {rank}: 2 ranks have met in attempt 0")), "{said}");
        assert!(said.contains(&format!("rank {rank}: done, again")), "{said}");
    }
    assert!(said.contains("TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_MAX_RESTARTS=1"), "{said}");
}

#[test]
fn without_a_restart_the_failure_is_reported() {
    let Some(drumline) = drumline() else { return };
    let (code, said) = run(&drumline, &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("rank 1 on host ") && said.contains("failing on purpose"), "{said}");
    assert!(!said.contains("done"), "{said}");
}
