//! The nodes as Slurm gives them to `srun --ntasks-per-node=1 drumline run …`. Pure: the environment comes in with
//! the [`Host`].
//!
//! Only a step's variables count, which `srun` sets for its tasks; those of a job do not show who runs where. A step of one task
//! on one node may as well be the user's own shell, so the defaults apply.

use drumline_launch::{NodeRange, Rendezvous};
use drumline_rendezvous::{derived_port, node_list, slurm_number, worker_env};

use super::args::RunArgs;
use super::error::PlanError;
use super::host::Host;

/// What a step shows about the nodes of the job.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Number of the job and of the step in it: `12.0`.
    pub(super) name: String,
    pub(super) job: u64,
    pub(super) nodes: NodeRange,
    pub(super) node_rank: usize,
    /// At the first node, on a port that is derived from the numbers of job and step.
    pub(super) rendezvous: Rendezvous,
}

impl Step {
    /// The step that this process is a task of; `None` if there is none, or the command line gives the nodes.
    pub(super) fn taken(args: &RunArgs, host: &Host<'_>) -> Result<Option<Self>, PlanError> {
        let tasks = number(host, worker_env::SLURM_STEP_NUM_TASKS)?;
        let list = host.text(worker_env::SLURM_STEP_NODELIST);
        let (Some(tasks), Some(list), false) = (tasks, list, args.give_nodes()) else { return Ok(None) };
        let names = node_list::expand(&list).map_err(PlanError::SlurmNodes)?;
        match names.len() {
            nodes if tasks as usize != nodes => Err(PlanError::SlurmTasks { tasks, nodes }),
            1 => Ok(None),
            _ => Self::of_nodes(&names, host).map(Some),
        }
    }

    fn of_nodes(names: &[String], host: &Host<'_>) -> Result<Self, PlanError> {
        let job = needed(host, worker_env::SLURM_JOB_ID)?;
        let step = needed(host, worker_env::SLURM_STEP_ID)?;
        let node_rank = needed(host, worker_env::SLURM_NODEID)?;
        let port = derived_port(slurm_number(job, step));
        Ok(Self {
            name: format!("{job}.{step}"),
            job,
            nodes: NodeRange::exactly(names.len()),
            node_rank: node_rank as usize,
            rendezvous: Rendezvous::Static { addr: names[0].clone(), port },
        })
    }
}

impl RunArgs {
    /// Whether a flag gives the nodes or how they meet. Then Slurm's variables are not used at all.
    pub(crate) fn give_nodes(&self) -> bool {
        let lists = self.hostfile.is_some() || self.include.is_some() || self.exclude.is_some();
        let counts = self.nnodes.is_some() || self.num_nodes.is_some() || self.node_rank.is_some();
        let master = self.master_addr.is_some() || self.master_port.is_some();
        let meeting = self.rdzv_backend != "static" || !self.rdzv_endpoint.trim().is_empty();
        self.standalone || lists || counts || master || meeting
    }
}

fn number(host: &Host<'_>, name: &'static str) -> Result<Option<u64>, PlanError> {
    let Some(value) = host.text(name) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|_| PlanError::SlurmVariable { name, value })
}

fn needed(host: &Host<'_>, name: &'static str) -> Result<u64, PlanError> {
    number(host, name)?.ok_or(PlanError::SlurmVariable { name, value: String::new() })
}
