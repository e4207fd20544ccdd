//! What a launcher will do, decided before anything is started: plain data.
//!
//! ```text
//!   command line ─▶ LaunchPlan ─┬▶ printed (--dry-run)
//!                               └▶ workers: command and environment of each
//! ```
//! Not here: parsing the command line and deciding, which are both in `drumline-cli`.

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
    /// This node's rank; a dynamic rendezvous assigns another one.
    pub node_rank: usize,
    /// The number of workers on this node.
    pub nproc: usize,
    /// The name of the workers' role.
    pub role: String,
    /// The name of the job.
    pub run_id: String,
    /// How the nodes find each other.
    pub rendezvous: Rendezvous,
    /// How long to wait for the other nodes.
    pub join_timeout: Duration,
    /// How the nodes keep in touch.
    pub contact: Contact,
    /// The address at which other nodes reach this one; detected if `None`.
    pub local_addr: Option<String>,
    /// How often all workers may be restarted.
    pub max_restarts: usize,
    /// How often to check the workers. Their exits are noticed at once, whatever it is.
    pub monitor_interval: Duration,
    /// What the workers run.
    pub program: Program,
    /// The program's own arguments, untouched.
    pub args: Vec<OsString>,
    /// Whether the local rank is the first argument, and how it is spelled.
    pub local_rank_arg: Option<LocalRankArg>,
    /// Where output goes.
    pub logs: LogPlan,
    /// The signals that stop the job and are forwarded to the workers.
    pub signals: Vec<Signal>,
    /// Time between SIGTERM and SIGKILL.
    pub shutdown_timeout: Duration,
    /// How workers are bound to cores; if `None`, each gets its own share where possible.
    pub numa: Option<NumaBinding>,
    /// Each worker sees its own GPU as number 0, and its local rank as 0.
    pub virtual_local_rank: bool,
    /// The GPUs of this node to use, as programs number them; all if `None`.
    pub devices: Option<Vec<String>>,
    /// `OMP_NUM_THREADS` of each worker; a fair share of the cores if `None`.
    pub omp: Option<usize>,
    /// Faults to inject.
    pub faults: Vec<Fault>,
    /// The rank that waits for a debugger.
    pub debug_rank: Option<HeldRank>,
    /// The other hosts, if this launcher starts agents there.
    pub fleet: Option<Fleet>,
    /// The Slurm step that defines the nodes, if there is one.
    pub slurm_step: Option<String>,
    /// Whether another launcher leads this one.
    pub led: LedBy,
}

impl LaunchPlan {
    /// The plan of `drumline run` without flags: one rank of `program` on this node.
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

/// Whether another launcher leads a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LedBy {
    /// No: it was started by hand, or by something that does not lead it.
    #[default]
    Nobody,
    /// Yes: the launcher at the other end of its stdin. See [`led`](crate::led).
    Stdin,
}

/// A rank that stops itself before its program begins, until it is continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldRank {
    /// Its rank in the job.
    pub rank: usize,
    /// The `drumline` program: it runs first in the rank's process, stops itself, and executes the program once
    /// continued.
    pub holder: OsString,
}

/// Which cores a worker is bound to, relative to its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumaBinding {
    /// No binding.
    None,
    /// The cores of the GPU's NUMA node.
    Node,
    /// The cores of the GPU's socket.
    Socket,
    /// Cores of the NUMA node that no other worker uses.
    Exclusive,
    /// The cores that share a last-level cache.
    CoreComplex,
}

/// The hosts on which this launcher starts agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    /// The hosts, in the order of their node ranks.
    pub hosts: Vec<HostSlots>,
    /// The number of ranks on each host; one for each slot if `None`.
    pub nproc: Option<usize>,
    /// How agents are started there.
    pub starter: Starter,
    /// The port of the other hosts' `sshd`; the default of `ssh` if `None`.
    pub ssh_port: Option<u16>,
    /// The user's own arguments for the starter.
    pub starter_args: Vec<String>,
}

/// What starts an agent on another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// `ssh`, one for each host.
    Ssh,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI.
    OpenMpi,
}
