//! A derived port that is in use: the ranks move on to the next one together.

use super::user_key::{outcome, rank};
use drumline_rendezvous::{JobKey, ServerOptions, TcpStoreServer, derived_port, derived_ports, free_port};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

/// The variables of a rank of two of the Slurm step `job`.0, and its key file.
fn step(job: u16, number: usize, key: &Path) -> String {
    format!(
        "SLURM_PROCID={number} SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID={number} SLURM_NODELIST=n1 SLURM_TASKS_PER_NODE=1(x2) SLURM_JOB_ID={job} DRUMLINE_TIMEOUT=20s DRUMLINE_JOB_KEY_FILE={}",
        key.display()
    )
}

/// A job whose ports are free, and a key file.
struct Job {
    number: u16,
    folder: tempfile::TempDir,
}

impl Job {
    fn new() -> Job {
        let folder = tempfile::tempdir().unwrap();
        JobKey::new_file(&folder.path().join("job.key")).unwrap();
        Job { number: free_port().unwrap(), folder }
    }

    fn ports(&self) -> [u16; 4] {
        derived_ports(derived_port(self.number.into()))
    }

    /// Both ranks, the second one first.
    fn meets(&self) -> [String; 2] {
        let key = self.folder.path().join("job.key");
        let late = [1, 0].map(|number| {
            let child = rank(&step(self.number, number, &key));
            std::thread::sleep(Duration::from_millis(300));
            child
        });
        late.map(outcome)
    }
}

const MET: [&str; 2] = ["met, secret true"; 2];

#[test]
fn ranks_skip_a_port_that_is_in_use() {
    let job = Job::new();
    let silent = TcpListener::bind(("127.0.0.1", job.ports()[0])).unwrap();
    assert_eq!(job.meets(), MET, "a program that does not answer");
    drop(silent);
    assert_eq!(job.meets(), MET, "control: a free port");
}

#[test]
fn ranks_skip_the_store_of_another_job_with_the_same_key_file() {
    let job = Job::new();
    let key = JobKey::from_file(&job.folder.path().join("job.key")).unwrap();
    let other = key.for_job("slurm 1.0");
    let serve = |port, key| TcpStoreServer::bind(("127.0.0.1", port), key, ServerOptions::default()).unwrap();
    let [first, second, ..] = job.ports();
    let _others = [serve(first, &other), serve(second, &JobKey::random())];
    assert_eq!(job.meets(), MET);
}

#[test]
fn if_all_ports_are_in_use_the_error_says_what_to_try() {
    let job = Job::new();
    let _taken = job.ports().map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let error = outcome(rank(&step(job.number, 0, &job.folder.path().join("job.key"))));
    assert!(error.contains("all ports derived from the job's number are in use"), "{error}");
    assert!(error.contains("MASTER_PORT=(a free one)"), "{error}");
    let variables =
        format!("{} DRUMLINE_TIMEOUT=3s", step(job.number, 1, &job.folder.path().join("job.key")));
    let error = outcome(rank(&variables));
    assert!(error.contains("no store of this job on 127.0.0.1") && error.contains("MASTER_PORT"), "{error}");
}
