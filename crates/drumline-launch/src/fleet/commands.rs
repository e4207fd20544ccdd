//! Decides which command starts an agent on each host: a pure function.
//!
//! ```text
//!   ssh     this host: the program itself       others: ssh HOST drumline on-host
//!   slurm   srun, one step with one task for each host
//!   openmpi mpirun, one with one process for each host
//! ```
//! There is one command for each host, whatever the starter: each has its own stdin, and its exit says which host
//! failed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use drumline_rendezvous::worker_env::{CUDA_VISIBLE_DEVICES, PET_PREFIX};

use super::agent_args::agent_args;
use super::exported::KEY_VARIABLES;
use super::order::Order;
use crate::membership::{HEARTBEAT, Policy};
use crate::shell::quoted;
use crate::{Fleet, HostSlots, LaunchPlan, Starter};

/// Prefixes of the variables that Open MPI sets for its processes. They are removed, so that a program of the job does
/// not act as an MPI process.
const OPEN_MPI_VARIABLES: [&str; 4] = ["OMPI_", "PMIX_", "PMI_", "PRTE_"];

/// The leader's own environment.
#[derive(Debug, Clone, Default)]
pub struct Site {
    /// The `drumline` program; every host has it at the same path.
    pub drumline: PathBuf,
    /// The program that runs as a host's agent: also `drumline`.
    pub agent: PathBuf,
    /// The working folder, on all hosts.
    pub dir: PathBuf,
    /// Variables for all hosts.
    pub variables: Vec<(OsString, OsString)>,
    /// The host names that mean this machine.
    pub here: BTreeSet<String>,
}

/// The command that starts an agent on one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCommand {
    /// The host's name.
    pub host: String,
    /// The program to start on this machine.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The order that it reads from its stdin first.
    pub order: Order,
}

impl Fleet {
    /// The command for each host of `plan`, which this fleet belongs to, in the order of node ranks.
    pub fn commands(&self, plan: &LaunchPlan, site: &Site) -> Vec<HostCommand> {
        let hosts = self.hosts.iter().enumerate();
        hosts.map(|(node_rank, host)| self.command(plan, site, node_rank, host)).collect()
    }

    fn command(&self, plan: &LaunchPlan, site: &Site, node_rank: usize, host: &HostSlots) -> HostCommand {
        let mut words = match self.starter {
            Starter::Ssh if site.here.contains(&host.name) => Vec::new(),
            Starter::Ssh => self.ssh(plan, &host.name),
            Starter::Slurm => self.srun(&host.name),
            Starter::OpenMpi => self.mpirun(&host.name),
        };
        let through_shell = words.first().is_some_and(|word| word == "ssh");
        let drumline = site.drumline.as_os_str();
        words.push(if through_shell { quoted(drumline) } else { drumline.to_owned() });
        words.push("on-host".into());
        let args = words.split_off(1);
        let program = words.remove(0);
        HostCommand { host: host.name.clone(), program, args, order: self.order(plan, site, node_rank) }
    }

    fn order(&self, plan: &LaunchPlan, site: &Site, node_rank: usize) -> Order {
        let host = &self.hosts[node_rank];
        let numbers = || host.slots.iter().map(usize::to_string).collect();
        // For this machine, the plan has the names under which its own programs see the GPUs.
        let own = plan.devices.clone().filter(|_| site.here.contains(&host.name));
        let devices: Vec<String> = own.unwrap_or_else(numbers);
        let mut env = site.variables.clone();
        env.push((CUDA_VISIBLE_DEVICES.into(), devices.join(",").into()));
        let open_mpi = OPEN_MPI_VARIABLES.iter().filter(|_| self.starter == Starter::OpenMpi);
        let without = [PET_PREFIX, KEY_VARIABLES].iter().chain(open_mpi).map(|name| name.to_string());
        Order {
            dir: site.dir.clone(),
            without: without.collect(),
            env,
            program: site.agent.clone().into(),
            args: agent_args(plan, node_rank, self.ranks_on(node_rank)),
        }
    }

    /// How many ranks the host with this node rank has.
    pub fn ranks_on(&self, node_rank: usize) -> usize {
        self.nproc.unwrap_or(self.hosts[node_rank].slots.len())
    }

    /// How many ranks all hosts have together.
    pub fn num_ranks(&self) -> usize {
        (0..self.hosts.len()).map(|node_rank| self.ranks_on(node_rank)).sum()
    }

    /// The user's own options come first, because `ssh` uses the first value it gets. A silent host is tolerated as
    /// long as its agent would be.
    fn ssh(&self, plan: &LaunchPlan, host: &str) -> Vec<OsString> {
        let mut words = vec!["ssh".to_string()];
        words.extend(self.starter_args.iter().cloned());
        words.extend(self.ssh_port.map(|port| format!("-p{port}")));
        let options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5"];
        words.extend(options.map(|option| format!("-o{option}")));
        let patience = Policy::patient(plan.contact.host_timeout, HEARTBEAT).give_up_after;
        words.push(format!("-oServerAliveCountMax={}", patience.as_secs() / 5 + 1));
        words.extend(["-T", "--", host, "exec"].map(str::to_string));
        words.into_iter().map(OsString::from).collect()
    }

    /// A step of one task gets all resources of the job on the node, without CPU binding: the agent binds the workers.
    fn srun(&self, host: &str) -> Vec<OsString> {
        let mut words: Vec<String> =
            ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"]
                .map(str::to_string)
                .to_vec();
        words.extend(["--export=ALL".to_string(), format!("--nodelist={}", without_user(host))]);
        words.extend(self.starter_args.iter().cloned());
        words.into_iter().map(OsString::from).collect()
    }

    fn mpirun(&self, host: &str) -> Vec<OsString> {
        let mut words: Vec<String> =
            ["mpirun", "-n", "1", "--bind-to", "none", "--host"].map(str::to_string).to_vec();
        words.push(format!("{}:1", without_user(host)));
        words.extend(self.starter_args.iter().cloned());
        words.into_iter().map(OsString::from).collect()
    }
}
/// The host of `user@host`: only ssh uses the user name.
fn without_user(host: &str) -> &str {
    host.rsplit_once('@').map_or(host, |(_, host)| host)
}
