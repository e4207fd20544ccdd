//! Tests which commands a plan becomes, host by host.

use std::time::Duration;

use drumline_rendezvous::fault::parse_faults;

use super::*;
use crate::{
    Bars, Fleet, HeldRank, HostSlots, LaunchPlan, LineFilters, LocalRankArg, LogPlan, NodeRange, Program,
    RdzvConf, Rendezvous, Signal, Starter,
};

fn plan() -> LaunchPlan {
    LaunchPlan {
        nodes: NodeRange::exactly(2),
        nproc: 2,
        run_id: "job".to_string(),
        rendezvous: Rendezvous::Static { addr: "a".to_string(), port: 29500 },
        local_addr: Some("only-here".to_string()),
        max_restarts: 3,
        args: vec!["--lr".into(), "0.1 'x'".into()],
        signals: vec![Signal::TERM, Signal::INT],
        devices: Some(vec!["6".into(), "7".into()]),
        ..LaunchPlan::new(Program::Python { interpreter: "python3".into(), script: "train.py".into() })
    }
}

fn fleet(starter: Starter) -> Fleet {
    let host = |name: &str, slots: &[usize]| HostSlots { name: name.to_string(), slots: slots.to_vec() };
    let hosts = vec![host("a", &[0, 1]), host("b", &[1, 2, 3])];
    Fleet { hosts, nproc: None, starter, ssh_port: None, starter_args: Vec::new() }
}

fn site() -> Site {
    Site {
        drumline: "/opt/drum line".into(),
        agent: "/opt/drum line".into(),
        dir: "/work".into(),
        variables: vec![("NCCL_DEBUG".into(), "INFO".into())],
        here: ["a".to_string()].into(),
    }
}

fn started(fleet: &Fleet) -> Vec<String> {
    let words = |command: HostCommand| {
        let words = std::iter::once(command.program).chain(command.args);
        words.map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    fleet.commands(&plan(), &site()).into_iter().map(words).collect()
}

fn agent(plan: &LaunchPlan, node_rank: usize) -> String {
    let order = fleet(Starter::Ssh).commands(plan, &site()).remove(node_rank).order;
    order.args.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn each_starter_has_its_own_command() {
    let options =
        "-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 -oServerAliveCountMax=8 -T -- b exec";
    let ssh = Fleet { ssh_port: Some(2222), starter_args: vec!["-v".into()], ..fleet(Starter::Ssh) };
    assert_eq!(
        started(&ssh),
        ["/opt/drum line on-host".to_string(), format!("ssh -v -p2222 {options} '/opt/drum line' on-host")]
    );
    let slurm = Fleet { starter_args: vec!["--account=x".into()], ..fleet(Starter::Slurm) };
    let srun = "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --cpu-bind=none --export=ALL";
    assert_eq!(
        started(&slurm),
        ["a", "b"].map(|host| format!("{srun} --nodelist={host} --account=x /opt/drum line on-host"))
    );
    assert_eq!(
        started(&fleet(Starter::OpenMpi)),
        ["a", "b"].map(|host| format!("mpirun -n 1 --bind-to none --host {host}:1 /opt/drum line on-host"))
    );
}

#[test]
fn an_agent_gets_the_plan_as_arguments() {
    assert_eq!(
        agent(&plan(), 1),
        "run --led --nnodes=2 --node-rank=1 --nproc-per-node=3 --master-addr=a --master-port=29500 --host-timeout=30 --rdzv-id=job \
         --role=default --max-restarts=3 --monitor-interval=0.1 --shutdown-timeout=30 \
         --signals-to-handle=SIGTERM,SIGINT -- train.py --lr 0.1 'x'"
    );
    let logs = LogPlan {
        dir: Some("/l".into()),
        tee: "0:1".parse().unwrap(),
        redirects: "3".parse().unwrap(),
        filter: Some([0, 2].into()),
        quiet_ranks: true,
        prefix: None,
        duplicates: LineFilters { stdout: vec!["a,b".into(), "c".into()], stderr: Vec::new() },
        bars: Bars::Redrawn,
    };
    let conf = RdzvConf { join_timeout: Duration::from_secs(9), is_host: Some(true), ..RdzvConf::default() };
    let other = LaunchPlan {
        rendezvous: Rendezvous::Dynamic { endpoint: "a:1".to_string(), conf },
        local_rank_arg: Some(LocalRankArg::Underscore),
        program: Program::PythonModule { interpreter: "python3".into(), module: "m".into() },
        numa: Some(crate::NumaBinding::CoreComplex),
        virtual_local_rank: true,
        omp: Some(4),
        faults: parse_faults("rank=1,step=2,kill;rank=0,after=1s,stop").unwrap(),
        debug_rank: Some(HeldRank { rank: 1, holder: "only here".into() }),
        logs,
        ..plan()
    };
    let args = agent(&other, 0);
    for part in [
        "launch --rank-spelling=underscore --led ",
        "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=a:1 --rdzv-conf=join_timeout=9,",
        "--log-dir=/l --redirects=3 --tee=0:1 --local-ranks-filter=0,2 --quiet-ranks \
         --duplicate-stdout-filters=a,,b,c --numa-binding=core-complex --virtual-local-rank --omp=4 --fault=rank=1,step=2,kill \
         --fault=rank=0,after=1s,stop --debug-rank=1 \
         --module -- m --lr",
    ] {
        assert!(args.contains(part), "no `{part}` in {args}");
    }
    assert!(!args.contains("is_host") && !args.contains("only-here"), "{args}");
    let native = LaunchPlan { program: Program::Executable("./train.py".into()), ..plan() };
    assert!(agent(&native, 0).contains(" --no-python -- ./train.py --lr"));
}

#[test]
fn an_order_has_the_folder_the_variables_and_the_gpus_of_its_host() {
    let orders: Vec<_> =
        fleet(Starter::Ssh).commands(&plan(), &site()).into_iter().map(|command| command.order).collect();
    let gpus = |order: &Order| order.env.last().cloned().unwrap();
    assert_eq!(
        gpus(&orders[0]),
        ("CUDA_VISIBLE_DEVICES".into(), "6,7".into()),
        "the names that this host's programs use"
    );
    assert_eq!(gpus(&orders[1]), ("CUDA_VISIBLE_DEVICES".into(), "1,2,3".into()));
    assert_eq!(orders[1].env[0], ("NCCL_DEBUG".into(), "INFO".into()));
    assert_eq!((orders[1].dir.to_str(), orders[1].program.to_str()), (Some("/work"), Some("/opt/drum line")));
    assert_eq!(orders[1].without, ["PET_", "DRUMLINE_JOB_KEY"]);
    let mpi = fleet(Starter::OpenMpi).commands(&plan(), &site()).remove(0).order;
    assert!(mpi.without.contains(&"OMPI_".to_string()));
}

#[test]
fn ranks_follow_the_slots_unless_their_number_is_given() {
    let slots = fleet(Starter::Ssh);
    assert_eq!(([slots.ranks_on(0), slots.ranks_on(1)], slots.num_ranks()), ([2, 3], 5));
    let given = Fleet { nproc: Some(4), ..slots };
    assert_eq!(([given.ranks_on(0), given.ranks_on(1)], given.num_ranks()), ([4, 4], 8));
}
