//! Ranks on several hosts. Other hosts could not reach a launcher's store, so rank 0 hosts it.

use std::ffi::OsString;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Result, ensure};
use drumline_launch::{KeyMemory, Meeting, Place, WorkerSpec, worker_environment};
use drumline_rendezvous::JobKey;

use crate::netns::Hosts;

/// Which ranks run on which host.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    hosts: Vec<Host>,
}

#[derive(Debug, Clone)]
struct Host {
    prefix: Vec<OsString>,
    address: IpAddr,
    ranks: Vec<usize>,
}

impl Placement {
    /// The n-th list has the ranks of the n-th host; together they are 0, 1, … each once.
    pub(crate) fn new(hosts: &Hosts, ranks: &[&[usize]]) -> Self {
        assert!(
            ranks.len() <= hosts.num_hosts(),
            "{} hosts for {} lists of ranks",
            hosts.num_hosts(),
            ranks.len()
        );
        let mut all = ranks.concat();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..all.len()), "each rank from 0 on has one host, got {ranks:?}");
        let host = |(host, ranks): (usize, &&[usize])| Host {
            prefix: hosts.prefix(host),
            address: hosts.address(host).into(),
            ranks: ranks.to_vec(),
        };
        Self { hosts: ranks.iter().enumerate().map(host).collect() }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.hosts.iter().map(|host| host.ranks.len()).sum()
    }

    /// What to execute for each rank: `program` with `args` on its host.
    pub(crate) fn specs(&self, program: &OsString, args: &[&str]) -> Result<Vec<WorkerSpec>> {
        ensure!(self.world_size() > 0, "no host has a rank");
        let meeting = self.meeting();
        let key = KeyMemory::new(&JobKey::random())?;
        let words: Vec<_> = [program.clone()].into_iter().chain(args.iter().map(OsString::from)).collect();
        let spec = |place: Place| {
            let mut line = self.hosts[place.node_rank].prefix.iter().chain(&words).cloned();
            let program = line.next().unwrap_or_default();
            let mut env = worker_environment(&place, &meeting);
            env.extend(key.environment());
            let args = line.collect();
            let kept = vec![key.descriptor()];
            WorkerSpec { rank: place.rank, program, args, env, stdin: None, kept, cores: None }
        };
        Ok(self.places().map(spec).collect())
    }

    fn places(&self) -> impl Iterator<Item = Place> {
        let world_size = self.world_size();
        let num_nodes = self.hosts.len();
        self.hosts.iter().enumerate().flat_map(move |(node_rank, host)| {
            let local_world_size = host.ranks.len();
            host.ranks.iter().enumerate().map(move |(local_rank, rank)| Place {
                rank: *rank,
                world_size,
                local_rank,
                local_world_size,
                node_rank,
                num_nodes,
            })
        })
    }

    /// Where rank 0 hosts the store: a different port for each run, as the hosts may serve several.
    fn meeting(&self) -> Meeting {
        static PORTS: AtomicU16 = AtomicU16::new(0);
        let master_port = 20_000 + PORTS.fetch_add(1, Ordering::Relaxed) % 10_000;
        let host = self.hosts.iter().find(|host| host.ranks.contains(&0)).unwrap_or(&self.hosts[0]);
        Meeting { master_addr: host.address.to_string(), master_port, ..Meeting::default() }
    }
}
