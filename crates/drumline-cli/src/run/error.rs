//! Why a command line cannot be run. Each message names the nearest right flag.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use drumline_launch::{
    EndpointError, EnvFileError, HostTimeoutError, HostfileError, NodeRange, SecondsError, SignalsError,
};
use drumline_rendezvous::fault::Fault;
use drumline_rendezvous::node_list::NodeListError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(
        "--standalone is for one node, but --nnodes is {0}; try --nnodes 1, or \
         --rdzv-backend c10d --rdzv-endpoint HOST:PORT instead of --standalone"
    )]
    StandaloneNodes(NodeRange),
    #[error("--standalone is for one node, but there are {0} hosts; try without --standalone")]
    StandaloneHosts(usize),
    #[error(
        "--nnodes {0} lets the job grow and shrink, which --rdzv-backend static cannot; \
         try --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    )]
    ElasticStatic(NodeRange),
    #[error("--node-rank is {rank}, but there are {nodes} nodes, counted from 0; try --nnodes {}", rank + 1)]
    NodeRank { rank: usize, nodes: usize },
    #[error("--rdzv-backend {0} is not supported; try --rdzv-backend c10d, which needs no other server")]
    Backend(String),
    #[error("--rdzv-backend cannot be `{0}`; try static or c10d")]
    UnknownBackend(String),
    #[error("--rdzv-endpoint: {0}")]
    Endpoint(EndpointError),
    #[error("--master-addr cannot be `{0}`; try a host name, and the port with --master-port")]
    MasterAddr(String),
    #[error("--nproc-per-node gpu: no GPU ({0}); try --nproc-per-node cpu, or a number")]
    NoGpu(String),
    #[error(
        "{flag} chooses among this node's GPUs: no GPU ({why}); try --nproc-per-node N for ranks without GPUs{more}"
    )]
    NoGpuToChoose { flag: &'static str, why: String, more: &'static str },
    #[error("--nproc-per-node xpu: XPUs cannot be counted; try a number")]
    NoXpu,
    #[error("--num-gpus {asked}: this node has {found}; try --nproc-per-node {asked} for ranks without GPUs")]
    FewGpus { asked: usize, found: usize },
    #[error("{flag} {given}: there must be at least one; try {flag} 1, or -1 for all")]
    Zero { flag: &'static str, given: i64 },
    #[error("-m runs a module with Python and --no-python forbids that; try one of them alone")]
    ModuleNoPython,
    #[error("--no-python passes no --local-rank to a program that may not know it; try --use-env as well")]
    NoPythonLocalRank,
    #[error("--signals-to-handle: {0}")]
    Signals(SignalsError),
    #[error("--local-ranks-filter cannot be `{0}`; try a list of local ranks such as 0,1")]
    LocalRanksFilter(String),
    #[error("--logs-specs {0} is a plug-in of torchrun; try --log-dir, --redirects and --tee")]
    LogsSpecs(String),
    #[error(
        "--duplicate-*-filters copy lines into the log folder, and --log-dir /dev/null has none; try another --log-dir"
    )]
    FiltersNowhere,
    #[error("--omp 0: a rank needs a thread; try --omp 1")]
    NoThreads,
    #[error("--debug-rank {rank}: there are {world} ranks, counted from 0; try --debug-rank 0")]
    DebugRank { rank: usize, world: usize },
    #[error("DRUMLINE_HOST_TIMEOUT is `{value}`: {source}")]
    HostTimeout { value: String, source: HostTimeoutError },
    #[error("--rdzv-conf keep_alive_interval times keep_alive_max_attempt is {meant:?}: {source}")]
    KeepAlive { meant: Duration, source: HostTimeoutError },
    #[error("--fault {fault}: there are ranks 0 to {} only", world - 1)]
    FaultRank { fault: Fault, world: usize },
    #[error("TORCH_ELASTIC_SHUTDOWN_TIMEOUT is `{value}`: {source}")]
    ShutdownTimeout { value: String, source: SecondsError },
    #[error("cannot read the hostfile {}: {source}; try --hostfile FILE", path.display())]
    Hostfile { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Hosts(HostfileError),
    #[error("--launcher needs hosts to start on; try --hostfile FILE")]
    NoHosts,
    #[error("--num-nodes {asked}: only {found} hosts are there; try --num-nodes {found}")]
    FewHosts { asked: usize, found: usize },
    #[error(
        "{host} has {slots} slots, --num-gpus asks for {asked}; try --num-gpus {slots}, or --exclude {host}"
    )]
    FewSlots { host: String, slots: usize, asked: usize },
    #[error("--hostfile, --include and --exclude choose the nodes, and so does --nnodes; try --num-nodes")]
    NodesTwice,
    #[error(
        "srun started {tasks} tasks on {nodes} nodes, and in each a drumline run that wants the whole node; \
         try srun --ntasks-per-node=1 drumline run --nproc-per-node N, or srun PROGRAM without drumline run"
    )]
    SlurmTasks { tasks: u64, nodes: usize },
    #[error("SLURM_STEP_NODELIST: {0}; try --nnodes, --node-rank and --master-addr")]
    SlurmNodes(NodeListError),
    #[error("{name} is `{value}`, expected a number; try --nnodes, --node-rank and --master-addr")]
    SlurmVariable { name: &'static str, value: String },
    #[error("there is no file `{0}` to be run with Python; try its full path, or -m for a module")]
    NoScript(String),
    #[error("{flag} is not supported; try {instead}")]
    Refused { flag: &'static str, instead: &'static str },
    #[error(
        "between machines a job needs a key that only its nodes know, and none was given; try `drumline key new job.key`, \
         copy job.key to every node (scp -p), and set DRUMLINE_JOB_KEY_FILE=job.key there"
    )]
    NoKey,
    #[error(
        "--no-ssh starts this host's ranks only, and needs to know which host that is; try --node-rank N"
    )]
    NoSshRank,
    #[error(
        "the first host is called {first}, by which each of the others would mean itself; try --master-addr with its \
         address, or that address in the hostfile"
    )]
    FirstIsLoopback { first: String },
    #[error("cannot read {}: {source}; try another file in DS_ENV_FILE", path.display())]
    EnvFile { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    EnvLine { path: PathBuf, source: EnvFileError },
}
