//! Several agents: they meet, grow, shrink, and lose each other. All on this machine; `two_hosts` has real networks.

use std::time::{Duration, Instant};

use drumline_rendezvous::{
    Hello, JobKey, Role, ServerOptions, TcpStore, TcpStoreServer, derived_port, derived_ports,
};
use rustix::process::{Signal, kill_process};
use std::net::TcpListener;

use super::job::{Job, free_port};

const LONG: Duration = Duration::from_secs(40);
/// How soon survivors must have started a new round, or ended.
const SOON: Duration = Duration::from_secs(10);

fn fixed(port: u16, node: usize) -> String {
    format!("--nnodes 2 --node-rank {node} --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 2")
}

fn elastic(port: u16, nodes: &str) -> String {
    format!(
        "--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf last_call_timeout=1"
    )
}

/// Prints its rank, and runs until SIGUSR1.
const RUNS: &str = "trap 'exit 0' USR1; echo rank $RANK of $WORLD_SIZE in round $DRUMLINE_ROUND; \
                    while :; do sleep 0.05; done";

#[test]
fn ranks_follow_the_node_ranks_whoever_comes_first() {
    let (port, script) = (free_port(), "echo rank $RANK node $GROUP_RANK of $GROUP_WORLD_SIZE");
    let mut second = Job::run(&fixed(port, 1), script);
    std::thread::sleep(Duration::from_millis(100));
    let mut first = Job::run(&fixed(port, 0), script);
    for (job, node) in [(&mut first, 0), (&mut second, 1)] {
        let (code, text) = job.end(LONG);
        assert_eq!(code, 0, "{text}");
        for rank in [2 * node, 2 * node + 1] {
            assert!(text.contains(&format!("rank {rank} node {node} of 2")), "{text}");
        }
    }
}

#[test]
fn a_failure_on_one_node_ends_all_and_that_node_shows_its_output() {
    let port = free_port();
    let mut first = Job::run(&fixed(port, 0), "sleep 60");
    let mut second =
        Job::run(&fixed(port, 1), "echo last words >&2; sleep 0.1; [ $RANK = 2 ] || exit 7; sleep 60");
    let (code, text) = second.end(LONG);
    assert_eq!((code, text.contains("rank 3") && text.contains("last words")), (1, true), "{text}");
    let (code, text) = first.end(LONG);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("rank 3 on host") && text.contains("exit code 7"), "{text}");
    assert!(!text.contains("last words"), "{text}");
}

/// The first two ranks end at once because "rank 3 has left"; the others print the cause a little later.
const LATE_ERROR: &str = "if [ $RANK -lt 2 ]; then echo 'Error: rank 3 has left group `world` (it ended)' >&2; exit 1; fi; \
                          sleep 0.2; echo 'Error: the true cause' >&2; exit 3";

#[test]
fn a_failing_rank_can_print_its_error_after_others_have_ended() {
    let (code, text) = Job::run("--nproc-per-node 4", LATE_ERROR).end(LONG);
    assert_eq!((code, text.contains("the true cause")), (1, true), "{text}");
    let port = free_port();
    let mut jobs = [0, 1].map(|node| Job::run(&fixed(port, node), LATE_ERROR));
    let (code, text) = jobs[1].end(LONG);
    assert_eq!((code, text.contains("the true cause")), (1, true), "{text}");
    assert_eq!(jobs[0].end(LONG).0, 1);
}

#[test]
fn a_failure_on_one_node_restarts_all() {
    let (port, script) = (
        free_port(),
        "echo try $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK != 3 ]",
    );
    let mut jobs = [0, 1].map(|node| Job::run(&format!("{} --max-restarts 1", fixed(port, node)), script));
    for job in &mut jobs {
        let (code, text) = job.end(LONG);
        assert_eq!((code, text.matches("try 1").count()), (0, 2), "{text}");
    }
}

#[test]
fn two_nodes_with_the_same_node_rank_are_an_error() {
    let port = free_port();
    let mut first = Job::run(&format!("{} --nnodes 3", fixed(port, 0)), "echo never");
    let mut others = [(); 2].map(|()| {
        std::thread::sleep(Duration::from_millis(100));
        Job::run(&format!("{} --nnodes 3", fixed(port, 1)), "echo never")
    });
    // Two of three nodes have the same node rank: the later one is refused, and the others wait for the third.
    let (code, text) = others[1].end(LONG);
    assert!(code == 1 && text.contains("also has --node-rank 1"), "{text}");
    for job in [&mut first, &mut others[0]] {
        job.signal(Signal::TERM);
        job.end(LONG);
    }
}

#[test]
fn the_address_of_another_job_is_an_error() {
    let port = free_port();
    let mut first = Job::run(&format!("{} --rdzv-id red", fixed(port, 0)), "echo never");
    let mut other = Job::run(&format!("{} --rdzv-id blue", fixed(port, 1)), "echo never");
    let (code, text) = other.end(LONG);
    assert!(code == 1 && text.contains("job `red` uses that address, and this job is `blue`"), "{text}");
    first.signal(Signal::TERM);
    assert_eq!(first.end(LONG).0, 143);
}

/// Connects to the control store at `port` without a secret.
fn connect_with_the_open_key(port: u16) -> Result<(), String> {
    let soon = Instant::now() + Duration::from_secs(5);
    let addr = format!("127.0.0.1:{port}");
    let connected = TcpStore::connect(&addr, &JobKey::open(), Hello::new(Role::Store), soon);
    connected.map(drop).map_err(|error| error.to_string())
}

#[test]
fn agents_of_one_machine_without_a_key_share_a_secret() {
    for is_elastic in [false, true] {
        let port = free_port();
        let flags = |node| if is_elastic { elastic(port, "2:2") } else { fixed(port, node) };
        let mut jobs = [0, 1].map(|node| Job::run(&flags(node), RUNS));
        jobs.iter().for_each(|job| job.wait_for("in round 1", 1));
        let error = connect_with_the_open_key(port).unwrap_err();
        assert!(error.contains("it belongs to another job or is another program"), "{error}");
        jobs.iter().for_each(|job| job.signal(Signal::USR1));
        jobs.iter_mut().for_each(|job| assert_eq!(job.end(LONG).0, 0));

        // The control: a store with the open key accepts anybody.
        let options = ServerOptions::default();
        let _open = TcpStoreServer::bind(("127.0.0.1", port), &JobKey::open(), options).unwrap();
        assert_eq!(connect_with_the_open_key(port), Ok(()));
    }
}

#[test]
fn the_key_of_a_killed_agent_is_replaced() {
    let port = free_port();
    let mut killed = Job::run(&fixed(port, 0), "echo never");
    killed.wait_for("only 1 of at least 2 nodes joined", 1);
    killed.signal(Signal::KILL);
    killed.end(LONG);
    let mut second = Job::run(&fixed(port, 1), "echo here");
    std::thread::sleep(Duration::from_millis(300));
    let mut first = Job::run(&fixed(port, 0), "echo here");
    for job in [&mut first, &mut second] {
        let (code, text) = job.end(LONG);
        assert_eq!(code, 0, "{text}");
    }
}

#[test]
fn nodes_join_and_leave_a_running_job() {
    let port = free_port();
    let mut first = Job::run(&elastic(port, "1:3"), RUNS);
    first.wait_for("rank 0 of 1 in round 1", 1);
    let mut second = Job::run(&elastic(port, "1:3"), RUNS);
    first.wait_for("of 2 in round 2", 1);
    second.wait_for("of 2 in round 2", 1);
    second.signal(Signal::TERM);
    assert_eq!(second.end(LONG).0, 143);
    first.wait_for("rank 0 of 1 in round 3", 1);
    first.signal(Signal::USR1);
    let (code, text) = first.end(LONG);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn survivors_continue_when_an_agent_is_killed_with_its_ranks() {
    let port = free_port();
    let mut jobs = [(); 2].map(|()| {
        let job = Job::run(&elastic(port, "1:2"), RUNS);
        std::thread::sleep(Duration::from_millis(100));
        job
    });
    jobs[0].wait_for("of 2 in round 1", 1);
    jobs[1].wait_for("of 2 in round 1", 1);
    jobs[1].signal(Signal::KILL);
    assert_eq!(jobs[1].end(Duration::from_secs(1)).0, 137);
    let begin = Instant::now();
    jobs[0].wait_for("rank 0 of 1 in round 2", 1);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    jobs[0].signal(Signal::USR1);
    assert_eq!(jobs[0].end(LONG).0, 0);
}

#[test]
fn the_ranks_of_a_frozen_agent_are_killed_and_survivors_continue() {
    let port = free_port();
    let flags = format!("{} --host-timeout 2", elastic(port, "1:2"));
    let mut first = Job::run(&flags, RUNS);
    std::thread::sleep(Duration::from_millis(200));
    let mut second = Job::run(&flags, RUNS);
    second.wait_for("of 2 in round 1", 1);
    let keeper = second.keeper();
    second.signal(Signal::STOP);
    let begin = Instant::now();
    first.wait_for("rank 0 of 1 in round 2", 1);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let ranks = format!("/proc/{0}/task/{0}/children", keeper.as_raw_nonzero());
    assert_eq!(std::fs::read_to_string(ranks).unwrap_or_default(), "", "no rank of the old round is alive");
    // It continues, and joins again as a new node.
    second.signal(Signal::CONT);
    for job in [&second, &first] {
        job.wait_for("of 2 in round 3", 1);
    }
    for job in [&second, &first] {
        job.signal(Signal::USR1);
    }
    assert_eq!(first.end(LONG).0, 0);
    assert_eq!(second.end(LONG).0, 0);
}

#[test]
fn the_death_of_the_control_stores_host_ends_the_others_with_the_cause() {
    for (signal, cause) in [
        (Signal::KILL, "the agent that hosts the store has ended or died"),
        (Signal::STOP, "no contact with the store's host for 10"),
    ] {
        let port = free_port();
        let flags = format!("{},join_timeout=10 --host-timeout 2", elastic(port, "1:2"));
        let mut host = Job::run(&flags, RUNS);
        std::thread::sleep(Duration::from_millis(200));
        let mut other = Job::run(&flags, RUNS);
        other.wait_for("of 2 in round 1", 1);
        host.signal(signal);
        let (code, text) = other.end(LONG);
        assert!(code == 1 && text.contains(cause), "{text}");
        kill_process(host.pid(), Signal::KILL).unwrap();
        assert_eq!(host.end(Duration::from_secs(1)).0, 137);
    }
}

#[test]
fn a_fixed_job_that_loses_a_node_ends_at_once_with_the_cause() {
    let port = free_port();
    let mut jobs = [0, 1].map(|node| Job::run(&fixed(port, node), RUNS));
    jobs.iter().for_each(|job| job.wait_for("of 4 in round 1", 2));
    jobs[1].signal(Signal::KILL);
    let (code, text) = jobs[0].end(SOON);
    assert!(
        code == 1 && text.contains("lost the agent on") && text.contains("1 of at least 2 nodes are left"),
        "{text}"
    );
    jobs[1].end(Duration::from_secs(1));
}

#[test]
fn twenty_jobs_at_once_never_collide() {
    let run = |flag: &str| {
        Job::run(&format!("{flag} --nproc-per-node 2"), "sleep 0.5; echo rank $RANK on $MASTER_PORT")
    };
    let mut jobs: Vec<_> =
        (0..20).map(|job| run(if job % 2 == 0 { "--standalone" } else { "--master-port 0" })).collect();
    let mut ports: Vec<_> = jobs
        .iter_mut()
        .map(|job| {
            let (code, text) = job.end(LONG);
            assert_eq!(code, 0, "{text}");
            text.split_once("rank 0 on ").unwrap().1.split_whitespace().next().unwrap().to_string()
        })
        .collect();
    ports.sort();
    ports.dedup();
    assert_eq!(ports.len(), 20);
}

#[test]
fn every_node_has_the_whole_shutdown_timeout_when_the_job_is_stopped() {
    // One node is done at once; the other saves for longer than a lease.
    for slow in [0, 1] {
        let port = free_port();
        let mut jobs = [0, 1].map(|node| {
            let seconds = if node == slow { 6 } else { 0 };
            let script = format!(
                "trap 'sleep {seconds}; echo saved; exit 0' TERM; echo runs; while :; do sleep 0.05; done"
            );
            Job::run(&format!("{} --shutdown-timeout 20", fixed(port, node)), &script)
        });
        jobs.iter().for_each(|job| job.wait_for("runs", 2));
        jobs.iter().for_each(|job| job.signal(Signal::TERM));
        for job in &mut jobs {
            let (code, text) = job.end(LONG);
            assert_eq!((code, text.matches("saved").count()), (143, 2), "slow node {slow}: {text}");
        }
    }
}

#[test]
fn nodes_with_different_numbers_of_nodes_are_an_error() {
    let port = free_port();
    let mut first = Job::run(&fixed(port, 0), "echo never");
    let (code, text) = Job::run(&format!("{} --nnodes 3", fixed(port, 1)), "echo never").end(LONG);
    assert!(code == 1 && text.contains("this node has --nnodes 3:3 and the first one 2:2"), "{text}");
    first.signal(Signal::TERM);
    assert_eq!(first.end(LONG).0, 143);
}

#[test]
fn waiting_for_other_nodes_is_not_silent() {
    let port = free_port();
    let mut second = Job::run(&fixed(port, 1), "echo here");
    second.wait_for("waiting for the first node at 127.0.0.1", 1);
    let mut first = Job::run(&format!("{} --nnodes 3", fixed(port, 0)), "echo here");
    first.wait_for("only 1 of at least 3 nodes joined", 1);
    for job in [&mut first, &mut second] {
        job.signal(Signal::TERM);
        job.end(LONG);
    }
}

/// One of the two nodes of a Slurm step, on this machine.
fn slurm_node(job: u16, node: usize, key: &std::path::Path) -> Job {
    let mut command = std::process::Command::new(super::started::BINARY);
    command.args(["run", "--nproc-per-node", "1", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]);
    let variables = format!(
        "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=127.0.0.[1-2] SLURM_STEP_ID=0 SLURM_JOB_ID={job} SLURM_NODEID={node}"
    );
    command.envs(variables.split(' ').map(|pair| pair.split_once('=').unwrap()));
    command.env("DRUMLINE_JOB_KEY_FILE", key);
    Job::of(command)
}

#[test]
fn agents_skip_taken_ports_of_their_slurm_step() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("job.key");
    JobKey::new_file(&key).unwrap();
    let job = free_port();
    let ports = derived_ports(derived_port(job.into()));
    for taken in [0, 1, 2] {
        let _taken: Vec<_> =
            ports[..taken].iter().map(|port| TcpListener::bind(("127.0.0.1", *port)).unwrap()).collect();
        let mut nodes = [1, 0].map(|node| slurm_node(job, node, &key));
        for node in &mut nodes {
            let (code, text) = node.end(LONG);
            assert!(code == 0 && text.contains("of 2"), "{taken} ports are taken: {text}");
        }
    }
    let _taken = ports.map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let (code, text) = slurm_node(job, 0, &key).end(LONG);
    assert!(code == 1 && text.contains("all ports derived from") && text.contains("--master-port"), "{text}");
}
