//! The flags of `drumline run`: torchrun's, DeepSpeed's, and ours. As typed; what they mean together is in `plan`.
//!
//! A flag whose default depends on others is an `Option`, and its description contains the default.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use drumline_launch::{HostTimeout, NodeRange, NumaBinding, RdzvConf, StdOf, parse_seconds};
use drumline_rendezvous::fault::{Fault, parse_faults};

use super::deepspeed::DeepspeedArgs;
use super::nproc::Nproc;

const NODES: &str = "Nodes and ranks";
const MEETING: &str = "How the nodes meet";
const HOSTS: &str = "Starting on other hosts (as deepspeed)";
const PROGRAM: &str = "Program";
const LIFE: &str = "Failures and stopping";
const OUTPUT: &str = "Output";
const PLACING: &str = "Cores and GPUs";
const ACCEPTED: &str = "Accepted from torchrun's command lines";

pub(super) const EXAMPLES: &str = "\
Examples:
  drumline run --nproc-per-node 4 train.py --lr 0.1    4 ranks of a Python script on this node
  drumline run --nproc-per-node gpu ./train            a rank for each GPU, of any program
  drumline run --standalone --nproc-per-node 2 -m pkg.train
  drumline run --dry-run --nproc-per-node 2 ./train    show ranks, environment and commands only
  drumline run --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 train.py
  drumline run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py
  drumline run -H hosts --include node0@node1:0,1 train.py

Flags come before PROGRAM; everything after it is passed to the program. Every flag can be written with _ for -, be abbreviated \
as long as it is unambiguous, and have its default in a variable: --nnodes in PET_NNODES. A flag wins over its variable.

A .py file is run by $PYTHON_EXEC, or by python3; anything else is executed.

Faults, several as several --fault: rank=N, when (step=N in programs on Drumline's training loops, after=30s in any), and what \
(kill, stop, stop=5s; with a step also exit=3, panic, sleep=250ms, slow=2, drop=RANK, delay=50ms,peer=RANK). Each happens before \
the first restart; restart=N or restart=any choose other times. More: docs/faults.md.";

/// Start this node's ranks of a program: takes torchrun's command lines
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// Nodes in the job: a number, or MIN:MAX to let it grow and shrink [default: 1]
    #[arg(long, value_name = "N|MIN:MAX", help_heading = NODES)]
    pub(super) nnodes: Option<NodeRange>,
    /// Ranks on each node: a number, gpu or cpu (one for each), or auto (gpu if there are any) [default: 1]
    #[arg(long, value_name = "N|auto|cpu|gpu|xpu", help_heading = NODES)]
    pub(super) nproc_per_node: Option<Nproc>,
    /// Number of this node, for --rdzv-backend static [default: 0]
    #[arg(long, value_name = "N", value_parser = whole, help_heading = NODES)]
    pub(super) node_rank: Option<usize>,
    /// Name of the ranks' role
    #[arg(long, value_name = "NAME", default_value = "default", help_heading = NODES)]
    pub(super) role: String,

    /// Host of node 0, for --rdzv-backend static [default: 127.0.0.1]
    #[arg(long, value_name = "HOST", help_heading = MEETING)]
    pub(super) master_addr: Option<String>,
    /// Port on node 0, for --rdzv-backend static [default: 29500, or a free one if there is only one node]
    #[arg(long, value_name = "PORT", help_heading = MEETING)]
    pub(super) master_port: Option<u16>,
    /// One node alone, on a free port: concurrent jobs never collide
    #[arg(long, help_heading = MEETING)]
    pub(super) standalone: bool,
    /// static (each node is given its rank) or c10d (nodes may join and leave)
    #[arg(long, value_name = "BACKEND", default_value = "static", help_heading = MEETING)]
    pub(super) rdzv_backend: String,
    /// Where the nodes meet [default: --master-addr and --master-port, or localhost:29400 for c10d]
    #[arg(long, value_name = "HOST:PORT", default_value = "", hide_default_value = true, help_heading = MEETING)]
    pub(super) rdzv_endpoint: String,
    /// Name of the job, the same on all nodes
    #[arg(long, value_name = "ID", default_value = "none", help_heading = MEETING)]
    pub(super) rdzv_id: String,
    /// Settings such as join_timeout=600,last_call_timeout=30,keep_alive_interval=5,keep_alive_max_attempt=6
    #[arg(long, value_name = "KEY=VALUE,...", default_value = "", hide_default_value = true, help_heading = MEETING)]
    pub(super) rdzv_conf: RdzvConf,
    /// Address at which other nodes reach this one [default: found automatically]
    #[arg(long, value_name = "HOST", help_heading = MEETING)]
    pub(super) local_addr: Option<String>,

    /// File with a line HOST slots=N for each host
    #[arg(short = 'H', long, value_name = "FILE", help_heading = HOSTS)]
    pub(super) hostfile: Option<PathBuf>,
    /// Only these hosts and slots
    #[arg(short, long, value_name = "HOST[:SLOT,..]@..", conflicts_with = "exclude", help_heading = HOSTS)]
    pub(super) include: Option<String>,
    /// All except these hosts and slots
    #[arg(short, long, value_name = "HOST[:SLOT,..]@..", help_heading = HOSTS)]
    pub(super) exclude: Option<String>,
    /// The first N hosts only; without a hostfile the same as --nnodes N
    #[arg(long, value_name = "N", conflicts_with = "nnodes", help_heading = HOSTS)]
    pub(super) num_nodes: Option<i64>,
    /// The first N GPUs of each host, with a rank for each
    #[arg(long, alias = "num_accelerators", value_name = "N", conflicts_with = "nproc_per_node", help_heading = HOSTS)]
    pub(super) num_gpus: Option<i64>,
    /// What starts the launchers on the other hosts [default: ssh]
    #[arg(long, value_enum, value_name = "WAY", help_heading = HOSTS)]
    pub(super) launcher: Option<Launcher>,

    /// PROGRAM is a Python module, as with python -m
    #[arg(short, long, help_heading = PROGRAM)]
    pub(super) module: bool,
    /// Execute PROGRAM even if its name ends in .py
    #[arg(long, help_heading = PROGRAM)]
    pub(super) no_python: bool,
    /// Run the Python script PROGRAM through runpy.run_path
    #[arg(long, help_heading = PROGRAM)]
    pub(super) run_path: bool,
    /// Show the whole plan (nodes, ranks, environment, commands) and start nothing
    #[arg(long, help_heading = PROGRAM)]
    pub(crate) dry_run: bool,
    /// Hold this rank for a debugger
    #[arg(long, value_name = "RANK", value_parser = whole, help_heading = PROGRAM)]
    pub(super) debug_rank: Option<usize>,

    /// How often all ranks are restarted before the job fails
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole, help_heading = LIFE)]
    pub(super) max_restarts: usize,
    /// How long a silent host is waited for, at least 1s; the same on all nodes [default: from --rdzv-conf keep_alive_… or
    /// $DRUMLINE_HOST_TIMEOUT, or 30s]
    #[arg(long, value_name = "TIME", help_heading = LIFE)]
    pub(super) host_timeout: Option<HostTimeout>,
    /// Seconds between checks of the nodes' state, at least 0.01; the end of a rank is noticed at once
    #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = parse_seconds, help_heading = LIFE)]
    pub(super) monitor_interval: Duration,
    /// Seconds between SIGTERM and SIGKILL [default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, help_heading = LIFE)]
    pub(super) shutdown_timeout: Option<Duration>,
    /// Signals that are passed on to the ranks
    #[arg(long, value_name = "LIST", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT", help_heading = LIFE)]
    pub(super) signals_to_handle: String,

    /// Inject a fault, such as rank=1,step=20,kill [see below]
    #[arg(long = "fault", value_name = "FAULT", value_parser = parse_faults, help_heading = LIFE)]
    pub(super) faults: Vec<Vec<Fault>>,

    /// Where log files go, in a folder for each run
    #[arg(long, alias = "logdir", value_name = "FOLDER", help_heading = OUTPUT)]
    pub(super) log_dir: Option<PathBuf>,
    /// Streams that go into files: 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:1,LOCAL_RANK:2
    #[arg(short, long, value_name = "WHAT", default_value = "0", help_heading = OUTPUT)]
    pub(super) redirects: StdOf,
    /// Streams that go into files and to the console; written as for --redirects
    #[arg(short, long, value_name = "WHAT", default_value = "0", help_heading = OUTPUT)]
    pub(super) tee: StdOf,
    /// The local ranks that are shown on the console [default: all]
    #[arg(long, value_name = "0,1,...", default_value = "", hide_default_value = true, help_heading = OUTPUT)]
    pub(super) local_ranks_filter: String,
    /// Only rank 0 is shown on the console
    #[arg(long, help_heading = OUTPUT)]
    pub(super) quiet_ranks: bool,
    /// Copy lines of stdout that contain one of these texts to a file; ,, is a comma
    #[arg(long, value_name = "TEXT,...", default_value = "", hide_default_value = true, help_heading = OUTPUT)]
    pub(super) duplicate_stdout_filters: String,
    /// Copy lines of stderr that contain one of these texts to a file; ,, is a comma
    #[arg(long, value_name = "TEXT,...", default_value = "", hide_default_value = true, help_heading = OUTPUT)]
    pub(super) duplicate_stderr_filters: String,

    /// Bind each rank to the cores near its GPU, or to none [default: to its own share, if there is a core for each]
    #[arg(long, value_enum, value_name = "HOW", help_heading = PLACING)]
    pub(super) numa_binding: Option<Numa>,
    /// Each rank sees its own GPU as number 0, and LOCAL_RANK=0
    #[arg(long, help_heading = PLACING)]
    pub(super) virtual_local_rank: bool,
    /// OMP_NUM_THREADS of each rank [default: what is set, or a fair share of the cores]
    #[arg(long, value_name = "N", value_parser = whole, help_heading = PLACING)]
    pub(super) omp: Option<usize>,

    // At the end, since flags without effect are listed last.
    #[command(flatten)]
    pub(super) deepspeed: DeepspeedArgs,
    /// No effect: every rank is a program of its own
    #[arg(long, value_enum, value_name = "HOW", default_value = "spawn", help_heading = ACCEPTED)]
    pub(super) start_method: StartMethod,
    /// No effect: events are printed to stderr
    #[arg(long, value_name = "NAME", default_value = "null", help_heading = ACCEPTED)]
    pub(super) event_log_handler: String,
    /// Not supported: a plug-in of torchrun
    #[arg(long, value_name = "NAME", help_heading = ACCEPTED)]
    pub(super) logs_specs: Option<String>,

    /// Take orders from the launcher at the other end of stdin
    #[arg(long, hide = true)]
    pub(super) led: bool,

    /// The program and its arguments, passed on unchanged
    #[arg(required = true, trailing_var_arg = true, value_names = ["PROGRAM", "ARGS"])]
    pub(super) command: Vec<OsString>,
}

impl RunArgs {
    /// The same flags for another program: an executable, with its arguments.
    pub(crate) fn of_program(self, words: &[OsString]) -> Self {
        Self { command: words.to_vec(), ..self }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Launcher {
    #[value(alias = "pdsh")]
    Ssh,
    Slurm,
    Openmpi,
    #[value(hide = true)]
    Mvapich,
    #[value(hide = true)]
    Mpich,
    #[value(hide = true)]
    Impi,
    #[value(hide = true)]
    Jsrun,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Numa {
    None,
    Node,
    Socket,
    Exclusive,
    CoreComplex,
}

impl From<Numa> for NumaBinding {
    fn from(numa: Numa) -> Self {
        match numa {
            Numa::None => Self::None,
            Numa::Node => Self::Node,
            Numa::Socket => Self::Socket,
            Numa::Exclusive => Self::Exclusive,
            Numa::CoreComplex => Self::CoreComplex,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum StartMethod {
    Spawn,
    Fork,
    Forkserver,
}

fn whole(text: &str) -> Result<usize, &'static str> {
    text.trim().parse().map_err(|_| "not a whole number; try 0 or more")
}
