//! `drumline run` and `launch`: torchrun's flags, the plan of `--dry-run`, and the ranks of a node.

use std::fs;

use super::started::{Ended, Started};

/// Every flag of torchrun that takes a value, with one that does no harm.
const VALUED: [(&str, &str); 26] = [
    ("nnodes", "1"),
    ("nproc-per-node", "1"),
    ("rdzv-backend", "c10d"),
    ("rdzv-endpoint", "localhost:0"),
    ("rdzv-id", "j"),
    ("rdzv-conf", "join_timeout=5"),
    ("max-restarts", "1"),
    ("monitor-interval", "0.5"),
    ("start-method", "fork"),
    ("event-log-handler", "null"),
    ("role", "r"),
    ("log-dir", "/tmp"),
    ("redirects", "3"),
    ("tee", "0:1"),
    ("local-ranks-filter", "0"),
    ("duplicate-stdout-filters", "a"),
    ("duplicate-stderr-filters", "a"),
    ("node-rank", "0"),
    ("master-addr", "localhost"),
    ("master-port", "1234"),
    ("local-addr", "localhost"),
    ("numa-binding", "node"),
    ("signals-to-handle", "SIGTERM"),
    ("shutdown-timeout", "3"),
    ("host-timeout", "3s"),
    ("debug-rank", "0"),
];
const FLAGS: [&str; 5] = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"];

fn run(args: &[&str]) -> Ended {
    run_with(args, &[])
}

fn run_with(args: &[&str], variables: &[(&str, &str)]) -> Ended {
    Started::with_variables(&[&["run"], args].concat(), variables).end()
}

/// The output of `--dry-run` for `args`.
fn shown(args: &[&str], variables: &[(&str, &str)]) -> String {
    let ended = run_with(&[&["--dry-run"], args].concat(), variables);
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    ended.stdout
}

#[test]
fn every_flag_has_both_spellings_and_a_variable() {
    for (flag, value) in VALUED {
        for spelling in [flag.to_string(), flag.replace('-', "_")] {
            shown(&[&format!("--{spelling}"), value, "prog"], &[]);
            shown(&[&format!("--{spelling}={value}"), "prog"], &[]);
        }
        shown(&["prog"], &[(&variable(flag), value)]);
    }
    // --run-path needs a file that exists.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for flag in FLAGS {
        shown(&[&format!("--{}", flag.replace('-', "_")), file], &[]);
        shown(&[file], &[(&variable(flag), "1")]);
    }
}

fn variable(flag: &str) -> String {
    format!("PET_{}", flag.replace('-', "_").to_uppercase())
}

#[test]
fn a_flag_beats_its_variable_and_the_variable_the_default() {
    let world = |args: &[&str], variables: &[(&str, &str)]| {
        let text = shown(args, variables);
        text.lines().find_map(|line| line.trim().strip_prefix("WORLD_SIZE=")).unwrap().to_string()
    };
    assert_eq!(world(&["prog"], &[]), "1");
    assert_eq!(world(&["prog"], &[("PET_NPROC_PER_NODE", "3")]), "3");
    assert_eq!(world(&["--nproc-per-node", "2", "prog"], &[("PET_NPROC_PER_NODE", "3")]), "2");
    assert!(shown(&["prog"], &[("PET_STANDALONE", "1")]).contains("standalone"));
    assert!(!shown(&["prog"], &[("PET_STANDALONE", "0")]).contains("standalone"));
    let wrong = run_with(&["prog"], &[("PET_STANDALONE", "maybe")]);
    assert_eq!(wrong.code, Some(2), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("that of the variable PET_STANDALONE"), "{}", wrong.stderr);
    let typed = run_with(&["--nnodes", "x", "prog"], &[("PET_NNODES", "2")]);
    assert!(typed.code == Some(2) && !typed.stderr.contains("PET_NNODES"), "{}", typed.stderr);
}

#[test]
fn a_dry_run_shows_each_rank_and_starts_nothing() {
    let mark = std::env::temp_dir().join(format!("drumline-dry-run-{}", std::process::id()));
    let touched = mark.to_str().unwrap();
    let text = shown(
        &[
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--master-addr",
            "h",
            "--nproc-per-node",
            "2",
            "touch",
            touched,
        ],
        &[],
    );
    assert!(!mark.exists());
    for expected in
        ["rank 2 (local rank 0 of 2)", "rank 3 (local rank 1 of 2)", "WORLD_SIZE=4", "MASTER_ADDR=h"]
    {
        assert!(text.contains(expected), "no {expected} in {text}");
    }
    assert!(text.contains(&format!("$ touch {touched}\n")), "{text}");
    let control = run(&["touch", touched]);
    assert_eq!((control.code, mark.exists()), (Some(0), true), "{}", control.stderr);
    fs::remove_file(mark).unwrap();
}

#[test]
fn a_dry_run_shows_the_cores_of_each_rank() {
    let bound = |args: &[&str]| {
        let text = shown(args, &[("OMP_NUM_THREADS", "1")]);
        text.lines().filter(|line| line.starts_with("  on cores ")).count()
    };
    assert_eq!(bound(&["--nproc-per-node", "2", "--numa-binding", "node", "prog"]), 2);
    assert_eq!(bound(&["--nproc-per-node", "2", "--numa-binding", "none", "prog"]), 0, "control");
    assert_eq!(bound(&["--nproc-per-node", "1000", "prog"]), 0, "more than there are cores");
    let few = shown(&["--nproc-per-node", "5000", "--numa-binding", "exclusive", "prog"], &[]);
    assert!(few.contains("cannot start") && few.contains("try fewer ranks"), "{few}");
}

#[test]
fn ranks_are_started_with_their_arguments_unchanged() {
    let script = r#"echo "$RANK/$WORLD_SIZE $ROLE_NAME $OMP_NUM_THREADS: $*""#;
    let args =
        ["--nproc-per-node=2", "--role", "r", "--omp=1", "sh", "-c", script, "sh", "--nnodes", "--", "-m"];
    let ended = run(&args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0]: 0/2 r 1: --nnodes -- -m", "[rank 1]: 1/2 r 1: --nnodes -- -m"]);
}

#[test]
fn a_script_is_run_by_the_chosen_python() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("train.py");
    std::fs::write(&script, "").unwrap();
    let script = script.to_str().unwrap();
    let ended = run_with(&[script, "x"], &[("PYTHON_EXEC", "echo")]);
    let expected = format!("[rank 0]: -u {script} x\n");
    assert_eq!((ended.code, ended.stdout), (Some(0), expected), "{}", ended.stderr);
}

#[test]
fn a_rank_that_fails_makes_the_launcher_fail() {
    let ended = run(&["--nproc-per-node", "2", "sh", "-c", "exit $((RANK * 7))"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("\nerror: rank 1 on host "), "{}", ended.stderr);
    assert!(ended.stderr.contains("exit code 7"), "{}", ended.stderr);
}

#[test]
fn a_plan_that_cannot_be_started_is_an_error_before_any_rank_starts() {
    for (args, expected) in [
        (&["--standalone", "--nnodes", "2", "echo"][..], "try --nnodes 1"),
        (&["--hostfile", "/nowhere/hosts", "echo"], "cannot read the hostfile /nowhere/hosts"),
        (&["--nproc-per-node", "3", "/nowhere/train.py"], "there is no file `/nowhere/train.py`"),
    ] {
        let ended = run(args);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{args:?}");
        assert!(ended.stderr.contains(expected), "{args:?}: {}", ended.stderr);
    }
}

#[test]
fn launch_passes_the_local_rank_unless_use_env_is_given() {
    let launched = |args: &[&str]| Started::new(&[&["launch"], args].concat()).end();
    assert_eq!(launched(&["echo", "x"]).stdout, "[rank 0]: --local-rank=0 x\n");
    assert_eq!(launched(&["--rank-spelling", "underscore", "echo"]).stdout, "[rank 0]: --local_rank=0\n");
    assert_eq!(launched(&["--use_env", "echo", "x"]).stdout, "[rank 0]: x\n");
    let refused = launched(&["--no-python", "echo"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("try --use-env"), "{}", refused.stderr);
}

#[test]
fn the_first_rank_reads_the_launchers_stdin_and_the_others_read_nothing() {
    let mut command = std::process::Command::new("sh");
    let script = format!(
        "echo hello | {} run --nproc-per-node 2 sh -c 'read -r line; echo \"rank $RANK read <$line>\"'",
        super::started::BINARY
    );
    let output = command.args(["-c", &script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("rank 0 read <hello>") && text.contains("rank 1 read <>"), "{text}");
}

#[test]
fn a_stderr_that_cannot_be_written_does_not_end_the_job() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo again > \"$DONE\" || exit 3";
    for stderr in ["2>/dev/full", "2>&-", "2>&1 | true"] {
        let folder = tempfile::tempdir().unwrap();
        let done = folder.path().join("done");
        let binary = super::started::BINARY;
        let line = format!("{binary} run --max-restarts 1 --nproc-per-node 2 sh -c '{script}' {stderr}");
        let status = std::process::Command::new("bash")
            .args(["-o", "pipefail", "-c", &line])
            .env("DONE", &done)
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(0), "{stderr}");
        assert!(done.exists(), "{stderr}: it was started again");
    }
}
