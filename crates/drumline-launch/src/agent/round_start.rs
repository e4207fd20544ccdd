//! Turns a plan and a round into the start command for this node's keeper. Pure: no clock, no socket.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use drumline_rendezvous::fault::Fault;
use drumline_rendezvous::{JobKey, worker_env};

use crate::environment::{Meeting, Place, worker_environment};
use crate::keeper::{Secret, Start, StoreSettings};
use crate::logs::AttemptLogs;
use crate::membership::{AgentId, Round};
use crate::placing::Cores;
use crate::plan::{LaunchPlan, LedBy};
use crate::stop::StopPolicy;
use crate::worker::WorkerSpec;

/// What a round's start needs besides the round itself.
pub(super) struct RoundInputs<'a> {
    pub(super) plan: &'a LaunchPlan,
    /// The launcher's own `CUDA_VISIBLE_DEVICES`.
    pub(super) visible: Option<&'a str>,
    pub(super) agent: AgentId,
    pub(super) key: &'a JobKey,
    pub(super) listen: IpAddr,
    /// Until when the workers may run unless the lease is renewed.
    pub(super) lease: Option<Duration>,
    /// The cores of each local rank.
    pub(super) cores: &'a [Option<Cores>],
}

impl RoundInputs<'_> {
    /// The start command for this node's workers in `round`; `None` if the node is no member.
    pub(super) fn start(&self, round: &Round, logs: AttemptLogs) -> Option<Start> {
        let node_rank = round.node_rank(self.agent)?;
        let point = &round.members[0].agent.meeting_point;
        let meeting = Meeting {
            master_addr: point.master_addr.clone(),
            master_port: point.master_port,
            store: Some(point.store.clone()),
            round: round.number,
            restarts: round.restarts,
        };
        let workers: Vec<_> =
            self.places(round, node_rank).map(|place| self.worker(&place, &meeting, &logs)).collect();
        let port = point.store.rsplit_once(':').map_or("0", |(_, port)| port);
        let listen = match self.listen {
            IpAddr::V4(ip) => format!("{ip}:{port}"),
            IpAddr::V6(ip) => format!("[{ip}]:{port}"),
        };
        let store = StoreSettings {
            address: point.store.clone(),
            listen: (node_rank == 0).then_some(listen),
            world_size: round.world(),
            round: round.number,
            host_timeout: self.plan.contact.host_timeout,
        };
        let stop = StopPolicy { grace: self.plan.shutdown_timeout, ..StopPolicy::default() };
        let key = Secret(*self.key.as_bytes());
        let is_here = |fault: &Fault| workers.iter().any(|worker| worker.rank == fault.rank);
        let faults = self.plan.timed_faults(round.restarts).into_iter().filter(is_here).collect();
        Some(Start { workers, logs, stop, key, lease: self.lease, store, faults })
    }

    fn places(&self, round: &Round, node_rank: usize) -> impl Iterator<Item = Place> {
        let member = &round.members[node_rank];
        let first_rank = member.first_rank;
        let local_world_size = member.agent.slots;
        let world_size = round.world();
        let num_nodes = round.members.len();
        (0..local_world_size).map(move |local_rank| Place {
            rank: first_rank + local_rank,
            world_size,
            local_rank,
            local_world_size,
            node_rank,
            num_nodes,
        })
    }

    /// The node's first rank reads the launcher's stdin, unless a leading launcher uses it.
    fn stdin(&self, place: &Place) -> Option<PathBuf> {
        let reads_stdin = place.local_rank == 0 && self.plan.led == LedBy::Nobody;
        reads_stdin.then(|| format!("/proc/{}/fd/0", std::process::id()).into())
    }

    fn worker(&self, place: &Place, meeting: &Meeting, logs: &AttemptLogs) -> WorkerSpec {
        let (program, args) = self.plan.command(place);
        let mut env = worker_environment(place, meeting);
        env.extend(self.plan.environment(place, self.visible));
        let error_file = logs.error_file(place.local_rank).map(Into::into);
        env.push((worker_env::TORCHELASTIC_ERROR_FILE.into(), error_file));
        WorkerSpec {
            rank: place.rank,
            program,
            args,
            env,
            stdin: self.stdin(place),
            kept: Vec::new(),
            cores: self.cores.get(place.local_rank).cloned().flatten(),
        }
    }
}
