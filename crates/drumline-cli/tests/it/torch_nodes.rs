//! PyTorch's gloo backend across the agents of a job: two on this host, and two hosts made of network namespaces.

use std::path::Path;
use std::process::Command;

use rank_test::netns::Hosts;
use rank_test::python_with_torch;

use super::started::{BINARY, Started, script};

fn free_port() -> String {
    drumline_rendezvous::free_port().unwrap().to_string()
}

/// Two agents with two ranks each; both must see all four ranks.
fn all_reduce_over_two_nodes(commands: [Command; 2], nodes: &str) {
    let agents = commands.map(Started::of);
    let ended = agents.map(Started::end);
    let all: String = ended.iter().map(|ended| ended.stdout.as_str()).collect();
    for (node, ended) in ended.iter().enumerate() {
        assert_eq!(ended.code, Some(0), "node {node}: {}", ended.stderr);
        assert_eq!(
            ended.stdout.matches(&format!("of 4: sum 10, nodes {nodes}")).count(),
            2,
            "{}",
            ended.stdout
        );
    }
    for rank in 0..4 {
        assert_eq!(all.matches(&format!("rank {rank} of 4: ")).count(), 1, "rank {rank} in {all}");
    }
}

/// Ranks of each of two agents on this host, which print their places; the lines come in order of rank.
fn places(nproc: [&str; 2]) -> Vec<String> {
    let port = free_port();
    let node = |node: usize| {
        let mut command = Command::new(BINARY);
        command.args(["run", "--nnodes", "2", "--node-rank", &node.to_string(), "--master-port", &port]);
        command.args(["--nproc-per-node", nproc[node], "sh", "-c"]);
        command.arg("echo at $RANK/$WORLD_SIZE: $LOCAL_RANK/$LOCAL_WORLD_SIZE on $GROUP_RANK");
        Started::of(command)
    };
    let ended = [0, 1].map(node).map(Started::end);
    assert!(ended.iter().all(|ended| ended.code == Some(0)), "{}{}", ended[0].stderr, ended[1].stderr);
    let lines = ended.iter().flat_map(|ended| ended.stdout.lines());
    let mut places: Vec<_> = lines.map(|line| line.split_once("at ").unwrap().1.to_string()).collect();
    places.sort();
    places
}

fn agent(python: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    finish(&mut command, python, args);
    command
}

fn finish(command: &mut Command, python: &Path, args: &[&str]) {
    command.env("PYTHON_EXEC", python).args(["run", "--nproc-per-node", "2"]).args(args);
    command.args([&script("all_reduce.py"), "env"]);
}

#[test]
fn two_agents_on_one_host_meet_by_node_rank() {
    let Some(python) = python_with_torch() else { return };
    let port = free_port();
    let node = |rank| {
        let args =
            ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", &port];
        agent(&python, &args)
    };
    all_reduce_over_two_nodes(["1", "0"].map(node), "[0, 0, 1, 1]");
}

#[test]
fn two_agents_on_one_host_meet_at_an_endpoint() {
    let Some(python) = python_with_torch() else { return };
    let endpoint = format!("127.0.0.1:{}", free_port());
    let node = |_| {
        let args =
            ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "--rdzv-id", "j"];
        agent(&python, &args)
    };
    all_reduce_over_two_nodes([0, 1].map(node), "[0, 0, 1, 1]");
}

#[test]
fn nodes_may_have_different_numbers_of_ranks() {
    let uneven = ["0/3: 0/2 on 0", "1/3: 1/2 on 0", "2/3: 0/1 on 1"];
    assert_eq!(places(["2", "1"]), uneven);
    assert_eq!(places(["1", "1"]), ["0/2: 0/1 on 0", "1/2: 0/1 on 1"], "the control");
}

#[test]
fn a_failed_rank_is_started_again_with_its_count() {
    let script = "echo $RANK: $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; \
                  if test $RANK$TORCHELASTIC_RESTART_COUNT = 10; then sleep 0.2; exit 3; fi; \
                  if test $TORCHELASTIC_RESTART_COUNT = 0; then sleep 60; fi";
    let run = |restarts: &str| {
        let args = ["run", "--nproc-per-node", "2", "--max-restarts", restarts, "sh", "-c", script];
        let ended = Started::new(&args).end();
        let mut lines: Vec<_> = ended.stdout.lines().filter_map(|line| line.split_once("]: ")).collect();
        lines.sort_unstable();
        let lines: Vec<_> = lines.into_iter().map(|(_, line)| line.to_string()).collect();
        (ended.code, lines)
    };
    assert_eq!(
        run("1"),
        (Some(0), ["0: 0 of 1", "0: 1 of 1", "1: 0 of 1", "1: 1 of 1"].map(String::from).to_vec())
    );
    assert_eq!(run("0"), (Some(1), ["0: 0 of 0", "1: 0 of 0"].map(String::from).to_vec()), "the control");
}

/// The key that agents on different hosts need.
fn key_file(folder: &Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("key");
    std::fs::write(&path, "0123456789abcdef".repeat(4)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_string()
}

fn two_hosts(meeting: impl Fn(usize) -> Vec<String>) {
    let Some(python) = python_with_torch() else { return };
    let Some(hosts) = Hosts::new(2).unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let key = key_file(folder.path());
    let node = |host: usize| {
        let mut command = hosts.command(host, BINARY);
        let meeting = meeting(host);
        finish(&mut command, &python, &meeting.iter().map(String::as_str).collect::<Vec<_>>());
        // gloo looks up its host's address by name, which fails here, so it needs the interface.
        command.env("DRUMLINE_JOB_KEY_FILE", &key).env("GLOO_SOCKET_IFNAME", "eth0");
        command
    };
    all_reduce_over_two_nodes([0, 1].map(node), "[0, 0, 1, 1]");
}

#[test]
fn two_hosts_meet_by_node_rank() {
    two_hosts(|host| {
        let args = format!("--nnodes 2 --node-rank {host} --master-addr 10.77.0.1 --master-port 29500");
        args.split(' ').map(str::to_string).collect()
    });
}

#[test]
fn two_hosts_meet_at_an_endpoint() {
    two_hosts(|_| {
        let args = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id j";
        args.split(' ').map(str::to_string).collect()
    });
}
