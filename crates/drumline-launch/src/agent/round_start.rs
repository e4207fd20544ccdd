//! From a plan and a round to what this node's keeper is told: pure.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use drumline_rendezvous::{JobKey, worker_env};

use crate::environment::{Meeting, Place, worker_environment};
use crate::keeper::{Secret, Start, StoreOrder};
use crate::logs::AttemptLogs;
use crate::membership::{AgentId, Round};
use crate::placing::Cores;
use crate::plan::{LaunchPlan, LedBy};
use crate::stop::StopPolicy;
use crate::worker::WorkerSpec;

/// What stays the same from round to round.
pub(super) struct Ground<'a> {
    pub(super) plan: &'a LaunchPlan,
    /// What `CUDA_VISIBLE_DEVICES` says to the launcher itself.
    pub(super) visible: Option<&'a str>,
    pub(super) agent: AgentId,
    pub(super) key: &'a JobKey,
    pub(super) listen: IpAddr,
    /// Until when the workers may run if nothing more is said.
    pub(super) lease: Option<Duration>,
    /// The cores of each local rank.
    pub(super) cores: &'a [Option<Cores>],
}

impl Ground<'_> {
    /// The start of this node's workers in `round`; `None` if it has no part in it.
    pub(super) fn start(&self, round: &Round, logs: AttemptLogs) -> Option<Start> {
        let node_rank = round.node_rank(self.agent)?;
        let door = &round.members[0].agent.door;
        let meeting = Meeting {
            master_addr: door.master_addr.clone(),
            master_port: door.master_port,
            store: Some(door.store.clone()),
            round: round.number,
            restarts: round.restarts,
        };
        let workers =
            self.places(round, node_rank).map(|place| self.worker(&place, &meeting, &logs)).collect();
        let port = door.store.rsplit_once(':').map_or("0", |(_, port)| port);
        let listen = match self.listen {
            IpAddr::V4(ip) => format!("{ip}:{port}"),
            IpAddr::V6(ip) => format!("[{ip}]:{port}"),
        };
        let store = StoreOrder {
            address: door.store.clone(),
            listen: (node_rank == 0).then_some(listen),
            world_size: round.world(),
            round: round.number,
            host_timeout: self.plan.contact.host_timeout,
        };
        let stop = StopPolicy { grace: self.plan.shutdown_timeout, ..StopPolicy::default() };
        let (key, faults) = (Secret(*self.key.as_bytes()), self.plan.timed_faults(round.restarts));
        Some(Start { workers, logs, stop, key, lease: self.lease, store, faults })
    }

    fn places(&self, round: &Round, node_rank: usize) -> impl Iterator<Item = Place> {
        let member = &round.members[node_rank];
        let (first, local_world_size) = (member.first_rank, member.agent.slots);
        let (world_size, num_nodes) = (round.world(), round.members.len());
        (0..local_world_size).map(move |local_rank| Place {
            rank: first + local_rank,
            world_size,
            local_rank,
            local_world_size,
            node_rank,
            num_nodes,
        })
    }

    /// The node's first rank reads what the launcher is given; in the launcher, that is what its own leader says.
    fn stdin(&self, place: &Place) -> Option<PathBuf> {
        let is_readers = place.local_rank == 0 && self.plan.led == LedBy::Nobody;
        is_readers.then(|| format!("/proc/{}/fd/0", std::process::id()).into())
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
