//! On a real Slurm of two nodes: one task per rank, or one agent per node.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use rank_test::slurm::Slurm;
use serde_json::Value;

use super::started::BINARY;

/// `srun` with `args`, for a bounded time.
pub(super) fn srun(slurm: &Slurm, args: &[&str]) -> Command {
    let mut command = slurm.command("timeout");
    command.args(["60", "srun"]).args(args).env("DRUMLINE_TIMEOUT", "30s");
    command
}

pub(super) fn streams(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// A job key that only its owner may read.
fn key_file(slurm: &Slurm) -> PathBuf {
    let path = slurm.folder().join("key");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path).unwrap();
    file.write_all("5a".repeat(32).as_bytes()).unwrap();
    path
}

#[test]
fn each_task_of_a_step_is_a_rank() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let bench = [BINARY, "bench", "all-reduce", "--sizes", "4K", "--seconds-per-size", "0.01", "--json"];
    // Four tasks on two nodes are three and one here; two on one node meet on loopback and need no key.
    for (step, world, key) in [
        (&["-N2", "-n4"][..], 4, Some(key_file(&slurm))),
        (&["-N2", "--ntasks-per-node=2"], 4, Some(key_file(&slurm))),
        (&["-N1", "-n2"], 2, None),
    ] {
        let mut command = srun(&slurm, &[step, &bench].concat());
        command.envs(key.map(|key| ("DRUMLINE_JOB_KEY_FILE", key)));
        let output = command.output().unwrap();
        let (stdout, stderr) = streams(&output);
        assert!(output.status.success(), "{step:?}: {stderr}");
        let rows: Vec<Value> = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
        assert_eq!(rows[0]["world"], world, "{step:?}");
    }
}

#[test]
fn without_a_key_the_error_of_several_nodes_names_how_to_give_one() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let bench = ["-N2", "-n2", BINARY, "bench", "all-reduce", "--sizes", "4K"];
    let output = srun(&slurm, &bench).env("DRUMLINE_TIMEOUT", "3s").output().unwrap();
    let (_, stderr) = streams(&output);
    assert!(!output.status.success() && stderr.contains("DRUMLINE_JOB_KEY_FILE"), "{stderr}");
}

#[test]
fn an_agent_on_each_node_of_a_step_knows_its_place() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let run = [BINARY, "run", "--dry-run", "--nproc-per-node", "2", "prog"];
    let output =
        srun(&slurm, &[&["-N2", "--ntasks-per-node=1", "--label"][..], &run].concat()).output().unwrap();
    let (stdout, stderr) = streams(&output);
    for line in [
        "0:   nodes            2, from Slurm (step 1.0); this is node 0",
        "1:   nodes            2, from Slurm (step 1.0); this is node 1",
        "1:   meet             static, at host1 port 15001",
        "1: rank 3 (local rank 1 of 2)",
    ] {
        assert!(stdout.lines().any(|other| other == line), "no `{line}`:\n{stdout}{stderr}");
    }
    let output = srun(&slurm, &[&["-N2", "--ntasks-per-node=2"][..], &run].concat()).output().unwrap();
    let (stdout, stderr) = streams(&output);
    assert!(!output.status.success() && stdout.is_empty(), "{stdout}");
    assert!(stderr.contains("error: srun started 4 tasks on 2 nodes"), "{stderr}");
}

#[test]
fn an_agent_on_each_node_of_a_step_starts_its_ranks() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let step = ["-N2", "--ntasks-per-node=1"];
    let bench = ["bench", "all-reduce", "--sizes", "4K", "--seconds-per-size", "0.01"];
    let run = [&step[..], &[BINARY, "run", "--nproc-per-node", "2", BINARY], &bench].concat();
    let output = srun(&slurm, &run).env("DRUMLINE_JOB_KEY_FILE", key_file(&slurm)).output().unwrap();
    let (stdout, stderr) = streams(&output);
    assert!(output.status.success() && stdout.contains(", 4 ranks;"), "{stdout}{stderr}");
    let failing = [&step[..], &[BINARY, "run", "--nproc-per-node", "2", "sh", "-c", "exit $RANK"]].concat();
    let output = srun(&slurm, &failing).env("DRUMLINE_JOB_KEY_FILE", key_file(&slurm)).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{:?}", streams(&output));
}

#[test]
fn a_leader_in_an_allocation_starts_its_agents_by_srun() {
    let Some(slurm) = Slurm::new().unwrap() else { return };
    let hosts = slurm.folder().join("hostfile");
    std::fs::write(&hosts, "host1 slots=2\nhost2 slots=1\n").unwrap();
    let lead = |script: &str| {
        let mut command = slurm.command("timeout");
        command.args(["60", "salloc", "-N2", BINARY, "run", "--launcher", "slurm", "--hostfile"]).arg(&hosts);
        let output = command.args(["sh", "-c", script]).output().unwrap();
        (output.status.code(), streams(&output))
    };
    let (code, (stdout, stderr)) = lead("echo rank $RANK of $WORLD_SIZE on node $GROUP_RANK");
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    for line in ["rank 0 of 3 on node 0", "rank 1 of 3 on node 0", "rank 2 of 3 on node 1"] {
        assert!(stdout.contains(line), "no `{line}`:\n{stdout}{stderr}");
    }
    let (code, (stdout, stderr)) = lead("[ $RANK = 2 ] && exit 7; sleep 30");
    assert!(
        code == Some(1) && stderr.contains("rank 2") && stderr.contains("exit code 7"),
        "{stdout}{stderr}"
    );
}
