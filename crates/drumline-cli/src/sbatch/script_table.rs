//! Command lines and the scripts they must become.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use clap::{Args, FromArgMatches};

use super::SbatchArgs;
use crate::run::as_torchrun;

fn script(words: &[&str]) -> Result<String, String> {
    let command = as_torchrun(SbatchArgs::augment_args(clap::Command::new("sbatch")));
    let matches =
        command.try_get_matches_from([&["sbatch"], words].concat()).map_err(|error| error.to_string())?;
    let args = SbatchArgs::from_arg_matches(&matches).map_err(|error| error.to_string())?;
    let job = args.job(OsStr::new("/opt/drumline")).map_err(|error| error.to_string())?;
    Ok(String::from_utf8(job.script()).unwrap())
}

/// The `#SBATCH` options, and the line that starts the agents.
fn options_and_srun(line: &str) -> (Vec<String>, String) {
    let script =
        script(&line.split_whitespace().collect::<Vec<_>>()).unwrap_or_else(|error| panic!("{error}"));
    let options =
        script.lines().filter_map(|line| line.strip_prefix("#SBATCH --")).map(str::to_string).collect();
    let srun = script.lines().find(|line| line.starts_with("srun ")).unwrap();
    (options, srun.to_string())
}

#[test]
fn the_whole_script() {
    let line = "--nodes 2 --gpus-per-node 8 --time 4:00:00 --requeue --signal-before 120 --max-restarts 3 train.py --lr 0.1";
    let script = script(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
    assert_eq!(script, include_str!("golden.sh"));
}

#[test]
fn each_flag_is_where_it_belongs() {
    for (line, options, srun) in [
        (
            "./a",
            "job-name=a nodes=1 ntasks-per-node=1",
            "srun --ntasks-per-node=1 /opt/drumline run -- ./a &",
        ),
        (
            "--nodes 3 --nproc-per-node 4 --partition p --account x --job-name j --output %x-%j.out a -o b",
            "job-name=j nodes=3 ntasks-per-node=1 cpus-per-task=4 partition=p account=x output=%x-%j.out",
            "srun --ntasks-per-node=1 --cpus-per-task=4 /opt/drumline run --nproc-per-node=4 -- a -o b &",
        ),
        (
            "--gpus-per-node a100:2 --cpus-per-task 16 --quiet_ranks -t 3 -m pkg.train",
            "job-name=pkg.train nodes=1 ntasks-per-node=1 gpus-per-node=a100:2 cpus-per-task=16",
            "srun --ntasks-per-node=1 --cpus-per-task=16 /opt/drumline run --nproc-per-node=gpu --module --tee=3 \
             --quiet-ranks -- pkg.train &",
        ),
        (
            "--requeue --shutdown-timeout 5 --signals-to-handle USR1 a",
            "job-name=a nodes=1 ntasks-per-node=1 signal=B:USR1@60 open-mode=append requeue",
            "srun --ntasks-per-node=1 /opt/drumline run --shutdown-timeout=5 --signals-to-handle=USR1 -- a &",
        ),
    ] {
        assert_eq!(
            options_and_srun(line),
            (options.split(' ').map(str::to_string).collect(), srun.to_string()),
            "{line}"
        );
    }
}

#[test]
fn impossible_command_lines_are_errors() {
    for (words, expected) in [
        (&["--nodes", "0", "a"][..], "0 is not in 1.."),
        (&["--nnodes", "2", "a"], "try --nodes N alone"),
        (&["--standalone", "a"], "try --nodes N alone"),
        (&["--nproc-per-node", "lots", "a"], "not a number of ranks"),
        (&["--signal-before", "0", "a"], "0 is not in 1.."),
        (&["--job-name", "two\nlines", "a"], "try one line of text"),
        (&["--patrition", "p", "a"], "--partition"),
        (&[], "<PROGRAM>"),
    ] {
        let error = script(words).expect_err(&words.join(" "));
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}

#[test]
fn a_shell_accepts_the_script() {
    for words in [
        &["--nodes", "2", "--requeue", "a", "it's", "$HOME", "", "* ?"][..],
        &["--signal-before", "9", "a"],
        &["--job-name", "two 'words'", "a"],
    ] {
        let script = script(words).unwrap();
        for check in [&["bash", "-n"][..], &["shellcheck", "--shell=bash", "--severity=warning", "-"]] {
            if !rank_test::require_tool(check[0]) {
                continue;
            }
            let mut child = Command::new(check[0])
                .args(&check[1..])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}\n{script}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// Runs the script of a job that is to run again, with `line` before `srun` and programs in the place of Slurm's. Returns its exit
/// code, and the arguments of `scontrol`.
fn run_with(line: &str) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let programs = [
        ("srun", "exec sleep 4"),
        ("squeue", "echo RUNNING"),
        ("scontrol", r#"echo "$*" >"$SLURM_SUBMIT_DIR/scontrol-args""#),
    ];
    for (name, body) in programs {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let script = script(&["--requeue", "a"]).unwrap().replace("\nset -m\n", &format!("\n{line}\nset -m\n"));
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let status = Command::new("bash")
        .args(["-c", &script])
        .env("PATH", path)
        .env("SLURM_SUBMIT_DIR", folder.path())
        .envs([("SLURM_JOB_ID", "7"), ("requeue", "1"), ("srun", "1"), ("early", "KILL")])
        .status()
        .unwrap();
    (status.code(), fs::read_to_string(folder.path().join("scontrol-args")).unwrap_or_default())
}

#[test]
fn a_signal_that_comes_before_srun_is_not_lost() {
    let by = |signal: i32| Some(128 + signal);
    assert_eq!(run_with("kill -USR1 $$"), (by(10), "requeue 7\n".to_string()));
    assert_eq!(run_with("kill -TERM $$"), (by(15), String::new()));
    assert_eq!(run_with(":"), (Some(0), String::new()), "control, whatever the user's own variables are");
}
