//! Command lines and what they must mean: torchrun's, as version 2.11 handles them, and DeepSpeed's.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches};
use drumline_launch::{
    Bars, HeldRank, LaunchPlan, LedBy, LogPlan, NodeRange, Program, RdzvConf, Rendezvous, Signal, Starter,
    Std,
};

use super::args::RunArgs;
use super::flags::as_torchrun;
use super::host::Host;

/// The node of these tests.
#[derive(Default)]
struct Node {
    gpus: usize,
    variables: &'static [(&'static str, &'static str)],
    hostfile: Option<&'static str>,
}

const BARE: Node = Node { gpus: 0, variables: &[], hostfile: None };
const FOUR_GPUS: Node = Node { gpus: 4, ..BARE };

impl Node {
    fn plan(&self, line: &str) -> Result<LaunchPlan, String> {
        let env = |name: &str| {
            let found = self.variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let host = Host {
            name: "node0.lan".to_string(),
            cores: 6,
            has_address: |_| false,
            device_files: (0..self.gpus).map(|gpu| format!("nvidia{gpu}")).collect(),
            env: &env,
            hostfile: self.hostfile.map(str::to_string),
            launcher: "/bin/drumline".into(),
            fresh_id: "fresh".to_string(),
        };
        parsed(line)?.plan(&host).map_err(|error| error.to_string())
    }

    fn error(&self, line: &str) -> String {
        self.plan(line).expect_err(line)
    }
}

fn parsed(line: &str) -> Result<RunArgs, String> {
    let command = as_torchrun(RunArgs::augment_args(Command::new("run")));
    let words = std::iter::once("run").chain(line.split_whitespace());
    let matches = command.try_get_matches_from(words).map_err(|error| error.to_string())?;
    RunArgs::from_arg_matches(&matches).map_err(|error| error.to_string())
}

fn plan(line: &str) -> LaunchPlan {
    BARE.plan(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn at(addr: &str, port: u16) -> Rendezvous {
    Rendezvous::Static { addr: addr.to_string(), port }
}

fn dynamic(endpoint: &str) -> Rendezvous {
    Rendezvous::Dynamic { endpoint: endpoint.to_string(), conf: RdzvConf::default() }
}

#[test]
fn defaults_are_those_of_torchrun() {
    let plan = plan("train.py");
    assert_eq!((plan.nodes, plan.nproc, plan.node_rank), (NodeRange::exactly(1), 1, 0));
    assert_eq!((plan.role.as_str(), plan.run_id.as_str()), ("default", "none"));
    assert_eq!(plan.rendezvous, at("127.0.0.1", 0), "any free port");
    assert_eq!((plan.max_restarts, plan.monitor_interval), (0, Duration::from_millis(100)));
    assert_eq!(plan.signals, [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT]);
    assert_eq!(plan.shutdown_timeout, Duration::from_secs(30));
    assert_eq!(plan.logs, LogPlan { bars: Bars::Redrawn, ..LogPlan::default() });
    assert_eq!((plan.omp, plan.debug_rank, plan.numa, plan.devices), (None, None, None, None));
    assert!(plan.args.is_empty() && plan.fleet.is_none() && plan.local_rank_arg.is_none());
}

#[test]
fn nodes_meet_where_they_do_with_torchrun() {
    for (line, nodes, rendezvous) in [
        ("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 1234 a", "2", at("10.0.0.1", 1234)),
        ("--nnodes=2 --node_rank=1 --master_addr=[::1] a", "2", at("::1", 29500)),
        ("--nnodes 1:1 a", "1", at("127.0.0.1", 0)),
        ("--master-port 29500 a", "1", at("127.0.0.1", 29500)),
        ("--nnodes 2 --rdzv-endpoint h:7 --master-addr x a", "2", at("h", 7)),
        ("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint h:7 a", "2:4", dynamic("h:7")),
        ("--nnodes 2:4 --rdzv_backend=c10d --rdzv_endpoint=h a", "2:4", dynamic("h:29400")),
        ("--rdzv-b c10d a", "1", dynamic("localhost:29400")),
        ("--rdzv-backend c10d --rdzv-endpoint [::1]:7 a", "1", dynamic("[::1]:7")),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 a", "1", dynamic("localhost:0")),
        ("--standalone --rdzv-backend c10d --rdzv-endpoint h:7 a", "1", Rendezvous::Standalone),
        ("--standal --nnodes 1 a", "1", Rendezvous::Standalone),
        ("--num-nodes 3 --master-addr h a", "3", at("h", 29500)),
    ] {
        let plan = plan(line);
        assert_eq!((plan.nodes, plan.rendezvous), (nodes.parse().unwrap(), rendezvous), "{line}");
    }
    assert_eq!(plan("--standalone --rdzv-id mine a").run_id, "fresh");
    assert_eq!(plan("--rdzv_id mine a").run_id, "mine");
    let conf = plan("--rdzv-backend c10d --rdzv-conf join_timeout=9,is_host=0 a").rendezvous;
    let expected =
        RdzvConf { join_timeout: Duration::from_secs(9), is_host: Some(false), ..RdzvConf::default() };
    assert_eq!(conf, Rendezvous::Dynamic { endpoint: "localhost:29400".to_string(), conf: expected });
}

#[test]
fn ranks_are_counted_as_torchrun_does() {
    let hidden = Node { gpus: 4, variables: &[("CUDA_VISIBLE_DEVICES", "3,1")], hostfile: None };
    let none = Node { gpus: 4, variables: &[("CUDA_VISIBLE_DEVICES", "")], hostfile: None };
    for (node, line, nproc) in [
        (&BARE, "--nproc-per-node 3 a", 3),
        (&BARE, "--nproc_per_node=cpu a", 6),
        (&BARE, "--nproc auto a", 6),
        (&FOUR_GPUS, "--nproc-per-node auto a", 4),
        (&FOUR_GPUS, "--nproc-per-node gpu a", 4),
        (&FOUR_GPUS, "--nproc-per-node cpu a", 6),
        (&hidden, "--nproc-per-node gpu a", 2),
        (&none, "--nproc-per-node auto a", 6),
        (&FOUR_GPUS, "--num_gpus 2 a", 2),
        (&FOUR_GPUS, "--num-gpus -1 a", 4),
    ] {
        assert_eq!(node.plan(line).unwrap().nproc, nproc, "{line}");
    }
    let hides = none.error("--nproc-per-node gpu a");
    assert!(hides.contains("CUDA_VISIBLE_DEVICES is `` and hides all 4"), "{hides}");
    assert_eq!(hidden.plan("--num-gpus 1 a").unwrap().devices, Some(vec!["3".to_string()]));
}

#[test]
fn programs_are_found_and_their_arguments_are_unchanged() {
    let words = |node: &Node, line: &str| {
        let plan = node.plan(line).unwrap();
        let (program, args) = plan.command(&plan.place(0, 0, 1));
        let words = std::iter::once(program).chain(args).map(|word| word.into_string().unwrap());
        words.collect::<Vec<_>>().join(" ")
    };
    let venv = Node { variables: &[("PYTHON_EXEC", "/v/py")], ..BARE };
    assert_eq!(words(&BARE, "train.py --nnodes 2 -m -- -r x"), "python3 -u train.py --nnodes 2 -m -- -r x");
    assert_eq!(words(&venv, "train.py"), "/v/py -u train.py");
    assert_eq!(words(&BARE, "-m pkg.train --module x"), "python3 -u -m pkg.train --module x");
    assert_eq!(words(&BARE, "./train --dry-run --help"), "./train --dry-run --help");
    assert_eq!(words(&BARE, "--no-python train.py"), "train.py");
    assert_eq!(words(&BARE, "-- train.py -h"), "python3 -u train.py -h");
    let through = plan("--run-path --no-python /a/train.py x").program;
    assert_eq!(through, Program::RunPath { interpreter: "python3".into(), script: "/a/train.py".into() });
}

#[test]
fn the_rest_reaches_the_plan() {
    let logs = plan("--log_dir /l -r 3 -t 0:1,1:2 --local-ranks-filter 0,1 --quiet-ranks a").logs;
    assert_eq!((logs.dir, logs.quiet_ranks), (Some("/l".into()), true));
    assert_eq!((logs.redirects.of(5), logs.tee.of(1)), (Std::Both, Std::Err));
    assert_eq!(logs.filter, Some([0, 1].into()));
    assert_eq!(plan("--duplicate-stdout-filters a,,b,c a").logs.duplicates.stdout, ["a,b", "c"]);
    assert_eq!(plan("--max-restarts 1 --max_restarts 3 a").max_restarts, 3);
    assert_eq!(plan("--monitor-interval 5 a").monitor_interval, Duration::from_secs(5));
    assert_eq!(plan("--monitor-interval 0 a").monitor_interval, Duration::from_millis(10));
    assert_eq!(plan("--shutdown-timeout 2.5 a").shutdown_timeout, Duration::from_millis(2500));
    let patient = Node { variables: &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")], ..BARE };
    assert_eq!(patient.plan("a").unwrap().shutdown_timeout, Duration::from_secs(7));
    assert_eq!(patient.plan("--shutdown-timeout 1 a").unwrap().shutdown_timeout, Duration::from_secs(1));
    assert_eq!(plan("--signals-to-handle SIGTERM,SIGUSR1 a").signals, [Signal::TERM, Signal::USR1]);
    let other = plan("--omp 2 --role trainer --virtual-local-rank --local-addr me --debug-rank 0 a");
    assert_eq!((other.omp, other.role.as_str(), other.virtual_local_rank), (Some(2), "trainer", true));
    let held = HeldRank { rank: 0, holder: "/bin/drumline".into() };
    assert_eq!((other.local_addr.as_deref(), other.debug_rank), (Some("me"), Some(held)));
    let elsewhere = plan("--nnodes 2 --node-rank 1 --nproc-per-node 2 --debug-rank 5 a").debug_rank;
    assert_eq!(elsewhere.map(|held| held.rank), Some(5), "node 0 may have more ranks");
    assert_eq!(plan("--numa-binding core-complex a").numa, Some(drumline_launch::NumaBinding::CoreComplex));
    assert_eq!(plan("--numa-binding none a").numa, Some(drumline_launch::NumaBinding::None));
    let remarks = |line| parsed(line).unwrap().remarks().len();
    assert_eq!(remarks("--start-method fork --event-log-handler console a"), 2);
    assert_eq!((remarks("--debug-rank 0 a"), remarks("--debug-rank 0 -r 2 a")), (0, 1));
    let conf = "--rdzv-conf read_timeout=60,join_timeout=9,keep_alive_max_attempt=3,last_call_timeout=1 a";
    assert_eq!(remarks(conf), 0);
    assert_eq!((remarks("a"), remarks("--rdzv-backend c10d --master-addr h a")), (0, 1));
}

#[test]
fn the_host_timeout_comes_from_the_nearest_setting() {
    let patient = Node { variables: &[("DRUMLINE_HOST_TIMEOUT", "45s")], ..BARE };
    for (node, line, seconds, interval) in [
        (&BARE, "a", 30, 500),
        (&BARE, "--host-timeout 5m a", 300, 500),
        (&BARE, "--host_timeout=10 a", 10, 500),
        (&BARE, "--rdzv-conf keep_alive_interval=30 a", 90, 30_000),
        (&BARE, "--rdzv-conf keep_alive_max_attempt=10 a", 50, 500),
        (
            &BARE,
            "--rdzv-conf keep_alive_interval=30,keep_alive_max_attempt=2 --host-timeout 40 a",
            40,
            30_000,
        ),
        (&patient, "a", 45, 500),
        (&patient, "--rdzv-conf keep_alive_max_attempt=2 a", 10, 500),
        (&patient, "--host-timeout 1s a", 1, 500),
    ] {
        let contact = node.plan(line).unwrap().contact;
        assert_eq!(contact.host_timeout, Duration::from_secs(seconds), "{line}");
        assert_eq!(contact.keep_alive_interval, Duration::from_millis(interval), "{line}");
    }
    let line = "--rdzv-conf heartbeat_timeout=7,close_timeout=8,read_timeout=9 a";
    let contact = plan(line).contact;
    assert_eq!(contact.heartbeat_timeout, Duration::from_secs(7));
    assert_eq!(contact.close_timeout, Some(Duration::from_secs(8)));
    assert_eq!(contact.read_timeout, Duration::from_secs(9));
}

#[test]
fn hosts_come_from_the_hostfile() {
    let listed = Node { gpus: 4, hostfile: Some("node0 slots=4\nnode1 slots=4"), variables: &[] };
    let all = listed.plan("a").unwrap();
    assert_eq!((all.nodes, all.nproc, all.node_rank), (NodeRange::exactly(2), 4, 0));
    assert_eq!(all.rendezvous, at("node0", 29500));
    assert_eq!(all.fleet.unwrap().starter, Starter::Ssh);
    let some = listed.plan("--launcher slurm -i node1:0,1@node0:2,3 a").unwrap();
    assert_eq!((some.nproc, some.node_rank, some.rendezvous), (2, 1, at("node1", 29500)));
    assert_eq!(some.devices, Some(vec!["2".to_string(), "3".to_string()]));
    assert_eq!(some.fleet.unwrap().starter, Starter::Slurm);
    let alone = listed.plan("-e node1 --num_gpus 3 a").unwrap();
    assert_eq!((alone.nodes, alone.nproc, alone.fleet), (NodeRange::exactly(1), 3, None));
    assert!(listed.plan("--num_nodes 1 a").unwrap().fleet.is_none());
    assert_eq!(FOUR_GPUS.plan("-i localhost:1,2 a").unwrap().devices.unwrap(), ["1", "2"]);
}

/// Task 1 of `srun -N2 --ntasks-per-node=1`.
const STEP: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "12"),
    ("SLURM_STEP_ID", "3"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_NODELIST", "gpu[07-08]"),
    ("SLURM_NODEID", "1"),
];
/// A task of `srun -N2 -n8`.
const CROWDED: &[(&str, &str)] = &[("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_NODELIST", "gpu[07-08]")];
/// The shell of `srun --pty bash`.
const SHELL: &[(&str, &str)] = &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_STEP_NODELIST", "gpu07")];
/// A batch script: the variables are those of the job.
const BATCH: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "12"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_JOB_NODELIST", "gpu[07-08]"),
];

fn under_slurm(variables: &'static [(&'static str, &'static str)]) -> Node {
    Node { variables, ..FOUR_GPUS }
}

#[test]
fn the_nodes_of_a_slurm_step_are_used_unless_the_command_line_gives_them() {
    let plan = under_slurm(STEP).plan("--nproc-per-node gpu a").unwrap();
    assert_eq!((plan.nodes, plan.node_rank, plan.nproc), (NodeRange::exactly(2), 1, 4));
    assert_eq!((plan.rendezvous, plan.run_id.as_str()), (at("gpu07", 27825), "12"));
    assert_eq!(plan.slurm_step.as_deref(), Some("12.3"));
    assert_eq!(under_slurm(STEP).plan("--rdzv-id mine a").unwrap().run_id, "mine");
    for line in [
        "--nnodes 1 a",
        "--standalone a",
        "--master-port 4 a",
        "--num-nodes 1 a",
        "--rdzv-backend c10d a",
        "--rdzv-endpoint h:1 a",
        "--node-rank 0 a",
        "-i localhost:0 a",
    ] {
        for variables in [STEP, CROWDED] {
            let plan = under_slurm(variables).plan(line).unwrap();
            assert_eq!((plan.nodes, plan.slurm_step), (NodeRange::exactly(1), None), "{line}");
        }
    }
    for variables in [SHELL, BATCH] {
        let plan = under_slurm(variables).plan("a").unwrap();
        assert_eq!((plan.nodes, plan.slurm_step), (NodeRange::exactly(1), None));
    }
}

#[test]
fn impossible_slurm_variables_are_errors() {
    let without_job = &STEP[1..];
    let torn = &[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NODELIST", "gpu[07-")];
    for (variables, expected) in [
        (CROWDED, "started 8 tasks on 2 nodes"),
        (CROWDED, "try srun --ntasks-per-node=1 drumline run"),
        (without_job, "SLURM_JOB_ID is ``, expected a number"),
        (torn, "SLURM_STEP_NODELIST: node list"),
        (&[("SLURM_STEP_NUM_TASKS", "many")], "SLURM_STEP_NUM_TASKS is `many`"),
    ] {
        let error = under_slurm(variables).error("a");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn hosts_are_started_as_deepspeed_would() {
    let uneven = Node { hostfile: Some("me@node0 slots=4\nnode1 slots=2"), ..BARE };
    let plan = uneven.plan("--ssh_port 2222 --launcher_args -v --account x a").unwrap();
    assert_eq!(plan.rendezvous, at("node0", 29500));
    let fleet = plan.fleet.unwrap();
    assert_eq!((fleet.ranks_on(0), fleet.ranks_on(1), fleet.ssh_port), (4, 2, Some(2222)));
    assert_eq!(fleet.starter_args, ["-v"]);
    let slurm =
        uneven.plan("--launcher slurm --account x --launcher-args=--qos=high a").unwrap().fleet.unwrap();
    assert_eq!(slurm.starter_args, ["--account=x", "--qos=high"]);
    assert_eq!(uneven.plan("--nproc-per-node 3 a").unwrap().fleet.unwrap().num_ranks(), 6);
    let by_hand = uneven.plan("--no_ssh --node_rank 1 a").unwrap();
    assert_eq!((by_hand.node_rank, by_hand.nproc, by_hand.fleet), (1, 2, None));
    assert_eq!((by_hand.nodes, by_hand.rendezvous), (NodeRange::exactly(2), at("node0", 29500)));
    let alone = Node { hostfile: Some("localhost slots=2"), ..BARE };
    assert!(alone.plan("a").unwrap().fleet.is_none());
    assert_eq!(alone.plan("--force_multi a").unwrap().fleet.unwrap().num_ranks(), 2);
    let loopback = Node { hostfile: Some("127.0.0.1 slots=1\n127.0.0.2 slots=1"), ..BARE };
    assert_eq!(loopback.plan("a").unwrap().rendezvous, at("127.0.0.1", 29500));
    let logs = BARE.plan("--enable_each_rank_log /l a").unwrap().logs;
    assert_eq!((logs.dir, logs.redirects.of(3)), (Some("/l".into()), Std::Both));
    let remarks =
        parsed("--save_pid --no_local_rank --bind_cores_to_rank --no_ssh_check a").unwrap().remarks();
    assert_eq!(remarks.len(), 3, "{remarks:?}");
    assert_eq!(BARE.plan("--led a").unwrap().led, LedBy::Stdin);
}

#[test]
fn impossible_command_lines_are_errors_that_name_the_nearest_right_flag() {
    let listed = Node { gpus: 4, hostfile: Some("node0 slots=4\nnode1 slots=2"), variables: &[] };
    let forever = Node { variables: &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1e19")], ..BARE };
    let hurried = Node { variables: &[("DRUMLINE_HOST_TIMEOUT", "x")], ..BARE };
    let mixed = Node { hostfile: Some("localhost slots=1\nnode1 slots=1"), ..BARE };
    for (node, line, expected) in [
        (&BARE, "--standalone --nnodes 2 a", "try --nnodes 1, or --rdzv-backend c10d"),
        (&BARE, "--nnodes 1:2 a", "try --rdzv-backend c10d"),
        (&BARE, "--nnodes 2 --node-rank 2 a", "--node-rank is 2, but there are 2 nodes"),
        (&BARE, "--nnodes 0 a", "try N, or MIN:MAX"),
        (&BARE, "--rdzv-backend etcd a", "not supported; try --rdzv-backend c10d"),
        (&BARE, "--rdzv-backend cd10 a", "try static or c10d"),
        (&BARE, "--rdzv-endpoint h a", "try HOST:PORT"),
        (&BARE, "--rdzv-conf jion=3 a", "try one of join_timeout"),
        (&BARE, "--master-addr h:29500 a", "the port with --master-port"),
        (&BARE, "--nproc-per-node gpu a", "no GPU (this node has none); try --nproc-per-node cpu"),
        (&BARE, "--nproc-per-node xpu a", "try a number"),
        (&BARE, "--nproc-per-node 0 a", "try a number from 1"),
        (&BARE, "--nproc-per-node cuda a", "gpu, cpu or auto"),
        (&BARE, "--num-gpus 2 a", "try --nproc-per-node 2"),
        (&BARE, "--num-gpus 0 a", "try --num-gpus 1"),
        (&BARE, "-m --no-python a", "try one of them alone"),
        (&BARE, "--signals-to-handle SIGFOO a", "`SIGFOO` is not a signal"),
        (&BARE, "--local-ranks-filter x a", "such as 0,1"),
        (&BARE, "--logs-specs p a", "try --log-dir"),
        (&BARE, "--omp 0 a", "try --omp 1"),
        (&BARE, "--log-dir /dev/null --duplicate-stderr-filters x a", "try another --log-dir"),
        (&BARE, "--debug-rank 1 a", "there are 1 ranks"),
        (&BARE, "--rdzv-conf join_timeout=1e19 a", "join_timeout cannot be `1e19`: more than 100 years"),
        (&BARE, "--shutdown-timeout 1e19 a", "more than 100 years"),
        (&BARE, "--monitor-interval x a", "not a number of seconds"),
        (&BARE, "--host-timeout soon a", "not a time; try 30s"),
        (&BARE, "--host-timeout 0 a", "less than 1s"),
        (&BARE, "--rdzv-conf keep_alive_interval=0.1 a", "keep_alive_max_attempt is 300ms: less than 1s"),
        (&hurried, "a", "DRUMLINE_HOST_TIMEOUT is `x`: not a time"),
        (&forever, "a", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT is `1e19`: more than 100 years"),
        (&BARE, "--max-restarts -1 a", "try 0 or more"),
        (&BARE, "--launcher ssh a", "try --hostfile"),
        (&BARE, "-r 4 a", "'4'"),
        (&BARE, "--nproc-per-nose 2 a", "a similar argument exists: '--nproc-per-node'"),
        (&BARE, "--no a", "unexpected argument '--no'"),
        (&BARE, "", "<PROGRAM>"),
        (&BARE, "--include x --exclude y a", "cannot be used with"),
        (&listed, "--debug-rank 6 a", "there are 6 ranks"),
        (&listed, "--no-ssh a", "try --node-rank N"),
        (&listed, "--no-ssh --node-rank 2 a", "there are 2 nodes"),
        (&BARE, "--force-multi a", "try --hostfile"),
        (&BARE, "--elastic_training a", "--elastic-training is not supported; try --nnodes MIN:MAX"),
        (&BARE, "--max_elastic_nodes 4 a", "try --nnodes MIN:MAX"),
        (&BARE, "--bind_core_list 1,3-5 a", "try --numa-binding"),
        (&BARE, "--autotuning run a", "try the deepspeed command"),
        (&BARE, "--enable_each_rank_log /l -r 1 a", "cannot be used with"),
        (&listed, "--launcher mpich a", "try ssh, slurm or openmpi"),
        (
            &mixed,
            "a",
            "the first host is called localhost, by which each of the others would mean itself; try --master-addr",
        ),
        (&listed, "--num-gpus 3 a", "try --num-gpus 2, or --exclude node1"),
        (&listed, "--num-nodes 3 a", "try --num-nodes 2"),
        (&listed, "--include node9 a", "try one of node0, node1"),
        (&listed, "--nnodes 2 a", "try --num-nodes"),
        (&listed, "--num-gpus 2 --standalone a", "try without --standalone"),
    ] {
        let error = node.error(line);
        assert!(error.contains(expected), "{line}: {error}");
    }
}
