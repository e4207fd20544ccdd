//! What a launcher is to do, decided before anything is started: plain data.
//!
//! ```text
//!   command line ─▶ LaunchPlan ─┬▶ printed (--dry-run)
//!                               └▶ workers: command and environment of each
//! ```
//! Not here: the command line itself (`drumline-cli`), and the deciding, which is there too.

mod contact;
mod gpus;
mod hostfile;
mod nodes;
mod program;
mod rdzv;
mod signals;
mod workers;

#[cfg(test)]
pub(crate) use workers::tests;

use std::ffi::OsString;
use std::time::Duration;

use drumline_rendezvous::fault::Fault;

pub use contact::{Contact, HostTimeout, HostTimeoutError};
pub use gpus::{installed_gpus, visible_gpus};
pub use hostfile::{HostSlots, HostfileError, exclude_slots, include_slots, parse_hostfile};
pub use nodes::{NodeRange, NodeRangeError};
pub use program::{LocalRankArg, Program};
pub use rdzv::{EndpointError, RdzvConf, RdzvConfError, Rendezvous, split_endpoint};
pub use signals::{PASSED_ON, SignalsError, parse_signals};

use crate::{LogPlan, Signal};

/// Everything about one job as this node's launcher sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchPlan {
    /// How many nodes.
    pub nodes: NodeRange,
    /// This node among them; a dynamic rendezvous gives it another.
    pub node_rank: usize,
    /// Workers on this node.
    pub nproc: usize,
    /// Name of their role.
    pub role: String,
    /// Name of the job.
    pub run_id: String,
    /// How the nodes meet.
    pub rendezvous: Rendezvous,
    /// How long the other nodes are waited for.
    pub join_timeout: Duration,
    /// How the nodes keep in touch.
    pub contact: Contact,
    /// The address under which other nodes reach this one; found out if `None`.
    pub local_addr: Option<String>,
    /// How often all workers may be started again.
    pub max_restarts: usize,
    /// How often to look at the workers. Their ends are seen at once whatever it is.
    pub monitor_interval: Duration,
    /// What the workers run.
    pub program: Program,
    /// The program's own arguments, untouched.
    pub args: Vec<OsString>,
    /// Whether, and how spelled, the local rank is the first argument.
    pub local_rank_arg: Option<LocalRankArg>,
    /// Where output goes.
    pub logs: LogPlan,
    /// The signals that are handed on to the workers.
    pub signals: Vec<Signal>,
    /// Time between SIGTERM and SIGKILL.
    pub shutdown_timeout: Duration,
    /// How workers are bound to cores; if `None`, each to its own share where that can be.
    pub numa: Option<NumaBinding>,
    /// Each worker sees its own GPU as number 0, and its local rank as 0.
    pub virtual_local_rank: bool,
    /// The GPUs of this node to be used, as the programs number them; all if `None`.
    pub devices: Option<Vec<String>>,
    /// `OMP_NUM_THREADS` of each worker; a fair share of the cores if `None`.
    pub omp: Option<usize>,
    /// Faults on purpose.
    pub faults: Vec<Fault>,
    /// The rank that waits for a debugger.
    pub debug_rank: Option<HeldRank>,
    /// The other hosts, if this launcher starts theirs.
    pub fleet: Option<Fleet>,
    /// The Slurm step that says which nodes there are, if one does.
    pub slurm_step: Option<String>,
    /// Who leads this launcher.
    pub led: LedBy,
}

impl LaunchPlan {
    /// One rank of `program` on this node alone, as `drumline run` with no flag has it.
    pub fn new(program: Program) -> Self {
        Self {
            nodes: NodeRange::exactly(1),
            node_rank: 0,
            nproc: 1,
            role: "default".to_string(),
            run_id: "none".to_string(),
            rendezvous: Rendezvous::Standalone,
            join_timeout: Duration::from_secs(600),
            contact: Contact::default(),
            local_addr: None,
            max_restarts: 0,
            monitor_interval: Duration::from_millis(100),
            program,
            args: Vec::new(),
            local_rank_arg: None,
            logs: LogPlan::default(),
            signals: vec![Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT],
            shutdown_timeout: Duration::from_secs(30),
            numa: None,
            virtual_local_rank: false,
            devices: None,
            omp: None,
            faults: Vec::new(),
            debug_rank: None,
            fleet: None,
            slurm_step: None,
            led: LedBy::Nobody,
        }
    }
}

/// Who leads a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LedBy {
    /// It was started by hand, or by something that has no more to say.
    #[default]
    Nobody,
    /// The launcher at the other end of its stdin: see [`led`](crate::led).
    Stdin,
}

/// A rank that stops before its program begins, until it is continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldRank {
    /// Its rank in the job.
    pub rank: usize,
    /// The `drumline` program: it stands in the rank's place, stops itself, and executes the program once continued.
    pub holder: OsString,
}

/// What the cores of a worker have in common with its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumaBinding {
    /// Nothing: it runs wherever it may.
    None,
    /// The NUMA node.
    Node,
    /// The socket.
    Socket,
    /// Cores of the NUMA node that no other worker has.
    Exclusive,
    /// The cores that share a last-level cache.
    CoreComplex,
}

/// Hosts on which this launcher starts launchers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    /// In the order of their node ranks.
    pub hosts: Vec<HostSlots>,
    /// Ranks on each host; one for each slot if `None`.
    pub nproc: Option<usize>,
    /// How.
    pub starter: Starter,
    /// The port of the other hosts' `sshd`; what `ssh` would take if `None`.
    pub ssh_port: Option<u16>,
    /// The user's own arguments for the starter.
    pub starter_args: Vec<String>,
}

/// What starts a launcher on another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// `ssh`, one for each host.
    Ssh,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI.
    OpenMpi,
}
