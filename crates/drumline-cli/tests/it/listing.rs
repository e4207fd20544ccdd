//! Commands that list and print: `drumline runs`, `drumline trace merge`, `drumline completions`, and the flags that help shows.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use drumline_observe::fake::FakeRun;
use drumline_observe::trace::{Trace, Track, file_of};
use serde_json::Value;

use super::started::BINARY;

/// Exit code, stdout and stderr of a command line in a folder.
fn output_of(folder: &Path, args: &str) -> (i32, String, String) {
    let mut command = Command::new(BINARY);
    let command = command.args(args.split_whitespace()).current_dir(folder).env("XDG_RUNTIME_DIR", folder);
    let output = command.env_remove("RANK").env_remove("SLURM_PROCID").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn runs_are_listed_with_state_step_best_and_age() {
    let folder = tempfile::tempdir().unwrap();
    let begin = |name: &str, steps: u32| {
        let mut run = FakeRun::create(&folder.path().join(name), 2).unwrap();
        (0..steps).for_each(|_| run.step().unwrap());
        run
    };
    begin("exp/done", 100).end("finished", None).unwrap();
    begin("exp/deep/broken", 3).end("failed", Some("boom")).unwrap();
    let (code, table, stderr) = output_of(folder.path(), "runs");
    assert_eq!((code, stderr.as_str()), (0, ""));
    let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["RUN", "STATE", "EPOCH", "STEP", "BEST", "AGE"]);
    let row =
        |name: &str| rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("{name}: {table}"));
    assert_eq!(row("exp/done")[1..5], ["finished", "1/20", "100/2000", "loss"]);
    assert_eq!(row("exp/deep/broken")[1..5], ["failed", "1/20", "3/2000", "-"]);
    assert_eq!(row("exp/done").last(), Some(&"s"), "{table}");
    let (_, json, _) = output_of(folder.path(), "runs --json exp/done");
    let run: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&run["state"], &run["step"], &run["best"]["name"]),
        (&"finished".into(), &100.into(), &"loss".into())
    );
    let empty = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = output_of(empty.path(), "runs");
    assert!(code == 0 && stdout.is_empty() && stderr.contains("no runs found; try"), "{stderr}");
    let (code, _, stderr) = output_of(empty.path(), "runs nowhere");
    assert!(code == 1 && stderr.starts_with("error: cannot read nowhere: "), "{stderr}");
}

#[test]
fn traces_of_all_ranks_become_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let (code, _, stderr) = output_of(folder.path(), "trace merge .");
    assert!(
        code == 1 && stderr.contains("no trace in .") && stderr.contains("TRAIN.TRACE_STEPS"),
        "{stderr}"
    );
    let run = folder.path().join("exp/a");
    fs::create_dir_all(run.join("ranks")).unwrap();
    let begin = Instant::now();
    for rank in 0..3 {
        let mut trace = Trace::new(rank);
        trace.span("forward", Track::Compute, begin, begin + Duration::from_millis(3), &[]);
        trace.write(&file_of(&run, rank)).unwrap();
    }
    // A file that is merged already is not merged again, and the run may be one level down.
    for args in ["trace merge exp/a", "trace merge exp/a", "trace merge exp", "trace merge exp/a/trace"] {
        let (code, stdout, stderr) = output_of(folder.path(), args);
        assert_eq!((code, stdout.trim()), (0, "exp/a/trace/all-ranks.json"), "{args}: {stderr}");
        let merged: Value =
            serde_json::from_slice(&fs::read(folder.path().join(stdout.trim())).unwrap()).unwrap();
        let spans = merged["traceEvents"].as_array().unwrap().iter().filter(|line| line["ph"] == "X");
        assert_eq!(spans.map(|line| line["pid"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2], "{args}");
    }
    let args = "trace merge exp/a/trace/rank-00002.json --out two.json";
    assert_eq!(output_of(folder.path(), args).1, "two.json\n");
}

#[test]
fn completions_name_commands_and_flags() {
    let here = Path::new(".");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script, _) = output_of(here, &format!("completions {shell}"));
        assert_eq!(code, 0, "{shell}");
        for word in ["nproc-per-node", "watch", "translation", "trace"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
    // As in bash when Tab is pressed.
    let (_, script, _) = output_of(here, "completions bash");
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("drumline.bash"), script).unwrap();
    let tab = "source drumline.bash; COMP_WORDS=(drumline wat); COMP_CWORD=1; _drumline drumline wat drumline; \
        echo ${COMPREPLY[@]}";
    let output = Command::new("bash").args(["-c", tab]).current_dir(folder.path()).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "watch\n",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let (code, _, stderr) = output_of(here, "completions tcsh");
    assert!(code == 2 && stderr.contains("fish"), "{stderr}");
}

#[test]
fn help_shows_flags_that_work_and_those_without_effect_last() {
    let here = Path::new(".");
    let (_, run, _) = output_of(here, "run --help");
    let place = |text: &str| run.find(text).unwrap_or_else(|| panic!("{text}: {run}"));
    let accepted = place("Accepted from");
    for flag in ["--nnodes", "--max-restarts", "--log-dir", "--omp", "--hostfile", "--help"] {
        assert!(place(flag) < accepted, "{flag} is after the flags without effect");
    }
    assert!(place("--start-method") > accepted && place("--save-pid") > accepted);
    for command in ["train", "test", "translate"] {
        let (code, help, _) = output_of(here, &format!("{command} --help"));
        assert_eq!(code, 0);
        assert!(help.contains("--nproc-per-node") && help.contains("--max-restarts"), "{command}: {help}");
        for word in ["No effect", "Refused", "refused", "Accepted from", "--start-method", "--save-pid"] {
            assert!(!help.contains(word), "{command} --help shows {word}");
        }
    }
    // Hidden flags are still accepted.
    let (_, _, stderr) = output_of(here, "train --start-method fork --cfg /nowhere.yaml");
    assert!(!stderr.contains("unexpected argument"), "{stderr}");
}
