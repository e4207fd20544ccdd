//! The cable between two hosts is pulled: nobody is told, and both sides must find out.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use drumline_rendezvous::JobKey;
use rank_test::netns::Hosts;
use rustix::process::Signal;
use tempfile::NamedTempFile;

use super::job::Job;
use super::started::BINARY;

/// How soon each side must have formed anew, or ended.
const SOON: Duration = Duration::from_secs(10);
/// Longer than an agent may be silent.
const QUIET: Duration = Duration::from_secs(6);
const RANK: &str = "trap 'exit 0' USR1; echo rank $RANK of $WORLD_SIZE in round $DRUMLINE_ROUND; \
                    while :; do sleep 0.05; done";

/// An agent on each of two hosts, in their first round; the first one hosts the control store.
struct Pair {
    hosts: Hosts,
    key: NamedTempFile,
    jobs: [Job; 2],
}

impl Pair {
    fn start(flags: impl Fn(usize) -> String) -> Option<Self> {
        let hosts = Hosts::new(2).unwrap()?;
        let key = NamedTempFile::new().unwrap();
        fs::set_permissions(key.path(), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(key.path(), &*JobKey::random().to_hex()).unwrap();
        let jobs = [0, 1].map(|host| agent(&hosts, &key, host, &flags(host)));
        let pair = Self { hosts, key, jobs };
        pair.jobs.iter().for_each(|job| job.wait_for("of 2 in round 1", 1));
        Some(pair)
    }

    /// The control: while the cable is in, nothing changes.
    fn stays_as_it_is(&self) {
        std::thread::sleep(QUIET);
        for job in &self.jobs {
            assert_eq!(job.text().matches("in round").count(), 1, "{}", job.text());
        }
    }
}

fn agent(hosts: &Hosts, key: &NamedTempFile, host: usize, flags: &str) -> Job {
    let mut command = hosts.command(host, BINARY);
    command.arg("run").args(flags.split_whitespace()).args(["sh", "-c", RANK]);
    command.env("DRUMLINE_JOB_KEY_FILE", key.path());
    Job::of(command)
}

#[test]
fn the_side_with_the_control_store_goes_on_and_the_other_ends() {
    let flags =
        "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf last_call_timeout=5";
    let Some(mut pair) = Pair::start(|_| flags.to_string()) else { return };
    pair.stays_as_it_is();
    let begin = Instant::now();
    pair.hosts.cut(1).unwrap();
    pair.jobs[0].wait_for("rank 0 of 1 in round 2", 1);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let (code, text) = pair.jobs[1].end(SOON.saturating_sub(begin.elapsed()));
    assert!(code == 1 && text.contains("no contact with the store's host"), "{text}");
    // With the cable in again, the host can come back.
    pair.hosts.restore(1).unwrap();
    pair.jobs[1] = agent(&pair.hosts, &pair.key, 1, flags);
    pair.jobs[0].wait_for("of 2 in round 3", 1);
    pair.jobs[1].wait_for("of 2 in round 3", 1);
    for job in &mut pair.jobs {
        job.signal(Signal::USR1);
    }
    for job in &mut pair.jobs {
        assert_eq!(job.end(SOON).0, 0, "{}", job.text());
    }
}

#[test]
fn a_fixed_job_ends_on_both_sides() {
    let flags = |host| format!("--nnodes 2 --node-rank {host} --master-addr 10.77.0.1 --master-port 29500");
    let Some(mut pair) = Pair::start(flags) else { return };
    pair.stays_as_it_is();
    let begin = Instant::now();
    pair.hosts.cut(1).unwrap();
    for (job, cause) in pair.jobs.iter_mut().zip(["lost the agent on", "no contact with the store's host"]) {
        let (code, text) = job.end(SOON.saturating_sub(begin.elapsed()));
        assert!(code == 1 && text.contains(cause), "{text}");
    }
}
