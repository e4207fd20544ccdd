//! Agents on different hosts: keys, cut cables, and clocks that differ.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rank_test::netns::Hosts;
use rustix::process::Signal;
use tempfile::TempDir;

use super::job::Job;
use super::started::BINARY;

const LONG: Duration = Duration::from_secs(40);
const SOON: Duration = Duration::from_secs(10);
const PORT: u16 = 29_477;
/// A silent host is given up after 6 s.
pub(super) const SHORT: &str = "--host-timeout 2";

/// Prints its rank, and runs until SIGUSR1.
const RUNS: &str = "trap 'exit 0' USR1; echo rank $RANK of $WORLD_SIZE in round $DRUMLINE_ROUND; \
                    while :; do sleep 0.05; done";

/// Several hosts and a key for each.
pub(super) struct Net {
    pub(super) hosts: Hosts,
    keys: TempDir,
}

impl Net {
    /// `None` if this machine cannot make network namespaces.
    pub(super) fn new(num_hosts: usize) -> Option<Self> {
        let net = Self { hosts: Hosts::new(num_hosts).unwrap()?, keys: tempfile::tempdir().unwrap() };
        (0..num_hosts).for_each(|host| net.write_key(host, &"5a".repeat(32)));
        Some(net)
    }

    fn write_key(&self, host: usize, key: &str) {
        fs::write(self.key(host), key).unwrap();
        fs::set_permissions(self.key(host), fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn key(&self, host: usize) -> OsString {
        self.keys.path().join(host.to_string()).into()
    }

    /// `drumline run` on a host, with `flags` split at spaces, each rank a script.
    pub(super) fn run(&self, host: usize, flags: &str, script: &str) -> Job {
        self.run_through(host, &[], flags, script)
    }

    /// Like `run`, but through a command that executes it.
    fn run_through(&self, host: usize, through: &[&str], flags: &str, script: &str) -> Job {
        let prefix = self.hosts.prefix(host);
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).args(through).args([BINARY, "run"]).args(flags.split_whitespace());
        command.args(["sh", "-c", script]).env("DRUMLINE_JOB_KEY_FILE", self.key(host));
        Job::of(command)
    }

    pub(super) fn elastic(&self, nodes: &str) -> String {
        let endpoint = format!("{}:{PORT}", self.hosts.address(0));
        format!(
            "--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-conf last_call_timeout=1"
        )
    }

    pub(super) fn fixed(&self, node: usize) -> String {
        format!("--nnodes 2 --node-rank {node} --master-addr {} --master-port {PORT}", self.hosts.address(0))
    }
}

#[test]
fn nodes_meet_across_hosts_and_their_ranks_reach_each_other() {
    let Some(net) = Net::new(2) else { return };
    // Each rank joins a real group and computes a sum.
    let bench = format!("{BINARY} bench all-reduce --sizes 64K --seconds-per-size 0.05 --json");
    let mut jobs =
        [0, 1].map(|node| net.run(node, &format!("{} --nproc-per-node 2", net.fixed(node)), &bench));
    let (code, text) = jobs[0].end(LONG);
    assert!(code == 0 && text.contains(r#""world": 4"#) | text.contains(r#""world":4"#), "{text}");
    let (code, text) = jobs[1].end(LONG);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn the_doctor_looks_at_both_hosts_and_the_links_between_them() {
    let Some(net) = Net::new(2) else { return };
    let doctor = format!("exec {BINARY} doctor --json");
    let mut jobs =
        [0, 1].map(|node| net.run(node, &format!("{} --nproc-per-node 2", net.fixed(node)), &doctor));
    // This machine may have problems of its own, such as a host name that cannot be resolved.
    let (_, text) = jobs[0].end(LONG);
    let count = |flags: &str| text.matches(flags).count();
    assert_eq!((count(r#""way": "tcp""#), count(r#""way": "shared_memory""#)), (4, 2), "{text}");
    assert_eq!((count(r#""wrong_bytes": 0"#), count(r#""open_files_hard""#)), (6, 2), "{text}");
    drop(jobs[1].end(LONG));
}

#[test]
fn the_doctor_names_two_hosts_that_do_not_reach_each_other() {
    let Some(net) = Net::new(3) else { return };
    // A firewall between the last two. Both reach the first, where all meet.
    let last = net.hosts.address(2).to_string();
    let blocked = net.hosts.command(1, "ip").args(["route", "add", "unreachable", &last]).status().unwrap();
    assert!(blocked.success());
    let doctor = format!("DRUMLINE_TIMEOUT=5s exec {BINARY} doctor");
    let mut jobs = [0, 1, 2].map(|node| {
        let master = net.hosts.address(0);
        let flags = format!("--nnodes 3 --node-rank {node} --master-addr {master} --master-port {PORT}");
        net.run(node, &flags, &doctor)
    });
    let (code, text) = jobs[0].end(LONG);
    assert_eq!(code, 1, "{text}");
    let problem = "between rank 1 (host1) and rank 2 (host2), over TCP, messages do not get through";
    assert_eq!(text.matches(problem).count(), 1, "{text}");
    assert_eq!(text.matches("  cores  ").count(), 3, "all hosts are in the report: {text}");
    for pair in ["0 – 1", "0 – 2"] {
        assert!(text.contains(&format!("{pair}     TCP ")), "{pair} was measured: {text}");
    }
    jobs[1..].iter_mut().for_each(|job| drop(job.end(LONG)));
}

#[test]
fn a_node_with_another_key_is_refused_and_the_error_of_one_without_names_how_to_make_one() {
    let Some(net) = Net::new(2) else { return };
    let mut first = net.run(0, &net.fixed(0), "echo never");
    net.write_key(1, &"6b".repeat(32));
    let (code, text) = net.run(1, &net.fixed(1), "echo never").end(LONG);
    assert!(code == 1 && text.contains("key"), "{text}");
    assert!(!text.contains("6b6b6b") && !text.contains("5a5a5a"), "no key is ever printed: {text}");
    fs::set_permissions(net.key(1), fs::Permissions::from_mode(0o644)).unwrap();
    let (code, text) = net.run(1, &net.fixed(1), "echo never").end(LONG);
    assert!(code == 1 && text.contains("chmod 600"), "{text}");
    let mut keyless = net.hosts.command(1, BINARY);
    keyless.arg("run").args(net.fixed(0).replace("10.77.0.1", "10.77.0.2").split_whitespace()).arg("true");
    let (code, text) = Job::of(keyless).end(LONG);
    assert!(code == 2 && text.contains("DRUMLINE_JOB_KEY_FILE"), "{text}");
    first.signal(Signal::TERM);
    assert_eq!(first.end(LONG).0, 143);
}

#[test]
fn a_cut_cable_ends_one_side_and_the_other_continues() {
    let Some(net) = Net::new(3) else { return };
    let mut jobs: Vec<_> = (0..3)
        .map(|host| {
            let job = net.run(host, &format!("{},join_timeout=12 {SHORT}", net.elastic("2:3")), RUNS);
            std::thread::sleep(Duration::from_millis(150));
            job
        })
        .collect();
    jobs.iter().for_each(|job| job.wait_for("of 3 in round 1", 1));
    net.hosts.cut(2).unwrap();
    let begin = Instant::now();
    jobs[0].wait_for("of 2 in round 2", 1);
    jobs[1].wait_for("of 2 in round 2", 1);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let (code, text) = jobs[2].end(LONG);
    assert!(code == 1 && text.contains("no contact with the store's host for 12"), "{text}");
    for job in &jobs[..2] {
        job.signal(Signal::USR1);
    }
    for job in &mut jobs[..2] {
        let (code, text) = job.end(LONG);
        assert_eq!(code, 0, "{text}");
    }
}

#[test]
fn the_cut_of_the_control_stores_host_ends_both_sides_with_the_cause() {
    let Some(net) = Net::new(2) else { return };
    let mut jobs = [0, 1].map(|node| net.run(node, &format!("{} {SHORT}", net.fixed(node)), RUNS));
    jobs.iter().for_each(|job| job.wait_for("of 2 in round 1", 1));
    net.hosts.cut(0).unwrap();
    let begin = Instant::now();
    for (job, cause) in jobs.iter_mut().zip(["lost the agent on host1", "no contact with the store's host"]) {
        let (code, text) = job.end(SOON + Duration::from_secs(8));
        assert!(code == 1 && text.contains(cause), "{text}");
    }
    assert!(begin.elapsed() < SOON + Duration::from_secs(8), "{:?}", begin.elapsed());
}

#[test]
fn clocks_of_different_hosts_are_never_compared() {
    let Some(net) = Net::new(2) else { return };
    let ahead = [
        "unshare",
        "--time",
        "--boottime",
        "900000",
        "--monotonic",
        "900000",
        "--fork",
        "--kill-child",
        "--",
    ];
    let flags = format!("{} {SHORT}", net.elastic("2:2"));
    let mut first = net.run(0, &flags, RUNS);
    let mut second = net.run_through(1, &ahead, &flags, RUNS);
    first.wait_for("of 2 in round 1", 1);
    second.wait_for("of 2 in round 1", 1);
    // Longer than any lease.
    std::thread::sleep(Duration::from_secs(7));
    first.signal(Signal::TERM);
    let (code, text) = first.end(LONG);
    assert!(code == 143 && !text.contains("round 2"), "{text}");
    let (_, text) = second.end(LONG);
    assert!(text.contains("was stopped by SIGTERM") && !text.contains("round 2"), "{text}");
}

/// Like the names of new pods in a cluster.
#[test]
fn a_name_that_is_not_known_yet_is_waited_for() {
    let Some(net) = Net::new(1) else { return };
    let names = tempfile::NamedTempFile::new().unwrap();
    fs::write(names.path(), "127.0.0.1 localhost\n").unwrap();
    let mount = format!("mount --bind {} /etc/hosts && exec \"$@\"", names.path().display());
    let late = ["unshare", "--mount", "sh", "-c", &mount, "sh"];
    let flags = |node| format!("--nnodes 2 --node-rank {node} --master-addr late-name --master-port {PORT}");
    let mut jobs = [0, 1].map(|node| net.run_through(0, &late, &flags(node), "echo rank $RANK"));
    jobs[1].wait_for("waiting for the first node at late-name", 1);
    fs::write(names.path(), "127.0.0.1 localhost\n10.77.0.1 late-name\n").unwrap();
    for (node, job) in jobs.iter_mut().enumerate() {
        let (code, text) = job.end(LONG);
        assert!(code == 0 && text.contains(&format!("rank {node}")), "{text}");
    }
}
