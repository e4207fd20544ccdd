//! The real PyTorch under `drumline run`: its gloo backend, its own view of its launcher, its error files.

use std::path::{Path, PathBuf};
use std::process::Command;

use drumline_rendezvous::error_file::ErrorFile;
use rank_test::python_with_torch;

use super::started::{Ended, Started, script};

/// Runs two ranks of a script by a Python that has torch.
fn run(python: &Path, args: &[&str]) -> Ended {
    let variables = [("PYTHON_EXEC", python.to_str().unwrap())];
    Started::with_variables(&[&["run", "--nproc-per-node", "2"], args].concat(), &variables).end()
}

#[test]
fn gloo_initialises_by_env_and_by_tcp() {
    let Some(python) = python_with_torch() else { return };
    let script = script("all_reduce.py");
    for (method, more) in [("env", &[][..]), ("tcp", &[]), ("env", &["--standalone"])] {
        let ended = run(&python, &[more, &[&script, method]].concat());
        assert_eq!(ended.code, Some(0), "{method} {more:?}: {}", ended.stderr);
        for rank in 0..2 {
            let line = format!("[rank {rank}]: rank {rank} of 2: sum 3, nodes [0, 0]\n");
            assert!(ended.stdout.contains(&line), "no {line} in {}", ended.stdout);
        }
    }
}

#[test]
fn jobs_side_by_side_do_not_collide() {
    let Some(python) = python_with_torch() else { return };
    let script = script("all_reduce.py");
    let variables = [("PYTHON_EXEC", python.to_str().unwrap())];
    let args = ["run", "--standalone", "--nproc-per-node", "2", &script, "env"];
    let jobs: Vec<_> = (0..2).map(|_| Started::with_variables(&args, &variables)).collect();
    for ended in jobs.into_iter().map(Started::end) {
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(ended.stdout.matches("sum 3, nodes [0, 0]").count(), 2, "{}", ended.stdout);
    }
}

#[test]
fn rpc_between_ranks_works() {
    let Some(python) = python_with_torch() else { return };
    let ended = run(&python, &[&script("rpc.py")]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for rank in 0..2 {
        let line = format!("rank {rank}: the next one added {}\n", rank + 1);
        assert!(ended.stdout.contains(&line), "no {line} in {}", ended.stdout);
    }
}

#[test]
fn torch_knows_that_it_was_launched() {
    let Some(python) = python_with_torch() else { return };
    let script = script("is_launched.py");
    for more in [&[][..], &["--standalone"], &["--tee", "3"]] {
        let ended = run(&python, &[more, &[&script]].concat());
        assert_eq!(ended.stdout.matches("launched: True\n").count(), 2, "{}{}", ended.stdout, ended.stderr);
    }
    let control = Command::new(python).arg(script).env_remove("TORCHELASTIC_RUN_ID").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&control.stdout), "launched: False\n");
}

#[test]
fn what_record_writes_is_reported_once_as_the_root_cause() {
    let Some(python) = python_with_torch() else { return };
    let ended = run(&python, &["--redirects", "3", &script("recorded_failure.py")]);
    assert_eq!(ended.code, Some(1));
    let stderr = &ended.stderr;
    assert!(stderr.contains("error: rank 1 on host "), "{stderr}");
    // Nothing of the rank's stderr is shown here, so the text can only come from its error file.
    assert_eq!(stderr.matches("ValueError: no such layer: Größe").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("Traceback (most recent call last)").count(), 1, "{stderr}");
    assert!(stderr.contains("recorded_failure.py\", line ") && stderr.contains("in load"), "{stderr}");
}

/// What torch's own reader makes of an error file.
fn read_by_torch(python: &Path, file: &Path) -> String {
    let reader = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/error_files.py");
    let output = Command::new(python).arg(reader).arg("read").arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn torch_reads_the_error_files_of_our_programs() {
    let Some(python) = python_with_torch() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    let callstack = Some("thread 'main' panicked at train.rs:7:5".to_string());
    let message = "no such layer: \"Größe\"".to_string();
    let written = ErrorFile { message, callstack, timestamp: Some(1_700_000_000) };
    std::fs::write(&file, written.to_json()).unwrap();
    let read: serde_json::Value = serde_json::from_str(&read_by_torch(&python, &file)).unwrap();
    assert_eq!(read["timestamp"], 1_700_000_000);
    assert_eq!(read["message"]["message"], "no such layer: \"Größe\"", "{read}");
    assert_eq!(read["message"]["extraInfo"]["py_callstack"], "thread 'main' panicked at train.rs:7:5");
}

#[test]
fn torch_reads_an_error_file_without_callstack_and_time() {
    let Some(python) = python_with_torch() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("error.json");
    let written = ErrorFile { message: "m".into(), ..ErrorFile::default() };
    std::fs::write(&file, written.to_json()).unwrap();
    assert!(read_by_torch(&python, &file).contains("\"timestamp\": 0"));
}
