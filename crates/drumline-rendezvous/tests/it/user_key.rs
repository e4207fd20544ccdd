//! Ranks on one machine without a given key: they meet however they were started, and other users stay out.

use crate::after;
use drumline_rendezvous::{Hello, JobKey, Role, Store, TcpStore, free_port, from_env};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "DRUMLINE_TEST_USER_KEY";
/// "Nobody": a user that is not root and has no files.
const OTHER_USER: u32 = 65_534;

/// Not a test itself: a rank or an intruder, in the environment that the tests below set.
#[test]
fn rank_process() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let open = || {
        let addr = format!("127.0.0.1:{}", std::env::var("MASTER_PORT").unwrap());
        TcpStore::connect(&addr, &JobKey::open(), Hello::new(Role::Store), after(5000)).map(drop)
    };
    let outcome = match &*order {
        "with the open key" => open().map(|()| String::from("admitted")).map_err(|error| error.to_string()),
        _ => from_env().map_err(|error| error.to_string()).map(|member| {
            let keys: Vec<String> = (0..member.world_size).map(|rank| format!("here/{rank}")).collect();
            member.store.set(&keys[member.rank], b"").unwrap();
            println!("\njoined");
            if order == "stay" {
                std::thread::sleep(Duration::from_secs(60));
            }
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            member.store.wait(&keys, after(10_000)).unwrap();
            format!("met, secret {}", member.key.is_secret())
        }),
    };
    println!("\noutcome: {}", outcome.unwrap_or_else(|error| format!("error: {error}")));
}

/// A process with these variables (`NAME=value` each) and no others.
fn start(exe: &Path, order: &str, variables: &str, uid: Option<u32>) -> Child {
    let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let mut command = Command::new(exe);
    command.args(["--exact", "user_key::rank_process", "--nocapture"]).env_clear().env(CHILD, order);
    command.envs(pairs).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    command.spawn().unwrap()
}

pub(super) fn rank(variables: &str) -> Child {
    start(&std::env::current_exe().unwrap(), "", variables, None)
}

/// The outcome that a process printed.
pub(super) fn outcome(mut child: Child) -> String {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    child.wait().unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("outcome: "));
    line.map_or_else(|| format!("no outcome: {text}"), String::from)
}

/// Waits until rank 0 has joined. Returns the rest of its output.
fn wait_until_joined(child: &mut Child) -> BufReader<ChildStdout> {
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("joined") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "it ended");
    }
    out
}

/// The variables with which each kind of launcher gives a rank of two its place, on this port or one derived from it.
fn launchers(rank: usize, port: u16) -> [(&'static str, bool, String); 4] {
    [
        ("hand", false, format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")),
        (
            "torchrun",
            true,
            format!(
                "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True"
            ),
        ),
        (
            "mpirun",
            true,
            format!(
                "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-{port}@1"
            ),
        ),
        (
            "srun",
            true,
            format!(
                "SLURM_PROCID={rank} SLURM_NTASKS=2 SLURM_LOCALID={rank} SLURM_NODEID=0 SLURM_NODELIST=n1 SLURM_TASKS_PER_NODE=2 SLURM_JOB_ID={port}"
            ),
        ),
    ]
}

#[test]
fn ranks_meet_however_they_were_started_and_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let place = format!("XDG_RUNTIME_DIR={} DRUMLINE_TIMEOUT=20s", dir.path().display());
    std::thread::scope(|scope| {
        for launcher in 0..4 {
            let place = &place;
            scope.spawn(move || {
                let port = free_port().unwrap();
                let variables = |rank| format!("{place} {}", launchers(rank, port)[launcher].2);
                for order in [[0, 1], [1, 0]] {
                    let ranks = order.map(|number| {
                        let child = rank(&variables(number));
                        std::thread::sleep(Duration::from_millis(300));
                        child
                    });
                    let name = launchers(0, port)[launcher].0;
                    assert_eq!(ranks.map(outcome), ["met, secret true", "met, secret true"], "{name}");
                }
            });
        }
    });
    let left = std::fs::read_dir(dir.path().join("drumline")).unwrap().count();
    assert_eq!(left, 0, "rank 0 removes its file");
}

#[test]
fn a_key_that_a_killed_run_has_left_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port().unwrap();
    let place = format!("TMPDIR={} DRUMLINE_TIMEOUT=20s", dir.path().display());
    let variables = |rank| format!("{place} {}", launchers(rank, port)[0].2);
    let mut killed = start(&std::env::current_exe().unwrap(), "stay", &variables(0), None);
    wait_until_joined(&mut killed);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let early = rank(&variables(1));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!([rank(&variables(0)), early].map(outcome), ["met, secret true", "met, secret true"]);
}

#[test]
fn a_derived_port_that_is_in_use_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let place = format!("XDG_RUNTIME_DIR={} DRUMLINE_TIMEOUT=10s", dir.path().display());
    // The port is derived from Slurm's job number.
    let port = free_port().unwrap();
    let used = 15_000 + port % 15_000;
    let _other_program = std::net::TcpListener::bind(("127.0.0.1", used)).unwrap();
    let variables = |rank| format!("{place} {}", launchers(rank, port)[3].2);
    assert_eq!([0, 1].map(|number| rank(&variables(number))).map(outcome), ["met, secret true"; 2]);
    let explicit = format!("{place} {}", launchers(0, used)[0].2);
    let error = outcome(rank(&explicit));
    assert!(error.contains("cannot listen on") && error.contains("try another port"), "control: {error}");
}

/// The variables of a rank of two of a torchrun job; all such jobs derive the same port.
fn torchrun(job: &str, rank: usize, port: u16) -> String {
    format!("{} TORCHELASTIC_RUN_ID={job}", launchers(rank, port)[1].2)
}

#[test]
fn two_jobs_that_derive_the_same_port_stay_apart() {
    let dir = tempfile::tempdir().unwrap();
    let place = format!("XDG_RUNTIME_DIR={} DRUMLINE_TIMEOUT=20s", dir.path().display());
    let port = free_port().unwrap();
    let variables = |job: &str, rank| format!("{place} {}", torchrun(job, rank, port));
    let num_files = || std::fs::read_dir(dir.path().join("drumline")).unwrap().count();
    let hosts = ["one", "two"].map(|job| {
        let mut host = start(&std::env::current_exe().unwrap(), "", &variables(job, 0), None);
        let out = wait_until_joined(&mut host);
        (host, out)
    });
    assert_eq!(num_files(), 2);
    // The other ranks start when both hosts listen, and the first job ends before the second is complete.
    for ((mut host, out), job) in hosts.into_iter().zip(["one", "two"]) {
        assert_eq!(outcome(rank(&variables(job, 1))), "met, secret true", "{job}");
        assert!(out.lines().any(|line| line.unwrap() == "outcome: met, secret true"), "{job}");
        host.wait().unwrap();
        assert_eq!(num_files(), usize::from(job == "one"), "each host removes its own file");
    }
}

#[test]
fn a_missing_rank_zero_is_reported_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port().unwrap();
    let place = format!("XDG_RUNTIME_DIR={} DRUMLINE_TIMEOUT=500ms", dir.path().display());
    let began = Instant::now();
    let error = outcome(rank(&format!("{place} {}", launchers(1, port)[0].2)));
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(error.contains("no store at 127.0.0.1:") && error.contains("no server listens there"), "{error}");
}

#[test]
fn another_user_of_the_machine_is_not_admitted() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let dir = tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o755)).tempdir().unwrap();
    // A copy, since other users may not have access to the folder in which this program was built.
    let exe = dir.path().join("intruder");
    std::fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    std::fs::set_permissions(&exe, PermissionsExt::from_mode(0o755)).unwrap();
    let port = free_port().unwrap();
    let variables = |rank| format!("DRUMLINE_TIMEOUT=3s {}", launchers(rank, port)[0].2);

    let mut zero = start(&exe, "stay", &variables(0), None);
    wait_until_joined(&mut zero);
    let intrude = |order: &str| outcome(start(&exe, order, &variables(1), Some(OTHER_USER)));
    let error = intrude("with the open key");
    assert!(error.contains("belongs to another job or is another program"), "{error}");
    let error = intrude("");
    assert!(error.contains("rank 0 has left no key for it"), "{error}");
    let same_user = outcome(start(&exe, "with the open key", &variables(1), None));
    assert!(same_user.contains("belongs to another job"), "the open key does not help: {same_user}");
    zero.kill().unwrap();
    zero.wait().unwrap();

    // The control: a job with the open key admits anyone.
    let key = JobKey::open();
    let addr = format!("127.0.0.1:{port}");
    let _server = drumline_rendezvous::TcpStoreServer::bind(&addr, &key, Default::default()).unwrap();
    assert_eq!(intrude("with the open key"), "admitted");
}
