//! Decides which cores each worker of this node runs on: a pure function of a [`Topology`].
//!
//! ```text
//!   /sys, /proc, sched_getaffinity ─▶ Topology ─┐
//!   --numa-binding, --omp, GPUs ────▶ the plan ─┴▶ cores(): one set for each local rank, or none
//! ```
//!
//! A *core* here is a physical one, with all its hardware threads (*CPUs*). A worker's *home* is the NUMA node of its
//! GPU. If not every worker has a GPU, the workers are distributed over the nodes in blocks.
//!
//! | `--numa-binding` | a worker gets |
//! |---|---|
//! | `node` | all CPUs of its home |
//! | `socket` | all CPUs of the sockets of its home |
//! | `exclusive` | its own share of the cores of its home |
//! | `core-complex` | the CPUs that share one last-level cache, in its home |
//! | `none` | no binding |
//! | not given | an equal share of all cores, if each worker gets at least one and its threads fit |
//!
//! CPUs that the launcher itself may not use (because of a cgroup, Slurm, `taskset`) are never assigned.

mod cores;
mod gpu;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use drumline_rendezvous::worker_env as names;

pub use cores::{Cores, CoresError};
pub use gpu::Gpu;
pub use topology::{Cpu, Topology, cpus_of_the_machine};

use crate::plan::{LaunchPlan, NumaBinding, visible_gpus};

/// Variables with which users place threads on cores themselves; an automatic choice would conflict with them.
const PLACED_BY_HAND: [&str; 3] = ["GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES"];

/// Why the requested binding is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacingError {
    /// The worker's GPU is on a NUMA node where the launcher may use no core.
    #[error(
        "--numa-binding: the GPU of local rank {local_rank} is on NUMA node {node}, and only the cores {allowed} \
         of other nodes may be used here; try --numa-binding none, or asking for cores near the GPU"
    )]
    NoCoreNearGpu {
        /// The worker with that GPU.
        local_rank: usize,
        /// The GPU's NUMA node.
        node: usize,
        /// The cores that may be used.
        allowed: Cores,
    },
    /// A NUMA node has more workers than cores.
    #[error(
        "--numa-binding exclusive: NUMA node {node} has {cores} cores for {ranks} ranks; try fewer ranks, or \
         --numa-binding node"
    )]
    TooFewCores {
        /// The node.
        node: usize,
        /// Its cores that may be used.
        cores: usize,
        /// The number of workers whose home it is.
        ranks: usize,
    },
}

/// The CPUs of each local rank; `None` for a rank that is not bound. `env` is the launcher's own environment.
pub fn cores(
    plan: &LaunchPlan,
    topology: &Topology,
    env: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Vec<Option<Cores>>, PlacingError> {
    let free = || vec![None; plan.nproc];
    if topology.cpus().is_empty() || plan.numa == Some(NumaBinding::None) {
        return Ok(free());
    }
    let text = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
    let gpus = gpu_nodes(plan, topology, text(names::CUDA_VISIBLE_DEVICES).as_deref());
    let Some(binding) = plan.numa else {
        let by_hand = PLACED_BY_HAND.iter().any(|name| env(name).is_some());
        let threads = plan.omp.or_else(|| threads_of(&text(names::OMP_NUM_THREADS)?));
        let shares = equal_shares(plan.nproc, topology, gpus.as_deref());
        return Ok(shares.filter(|shares| !by_hand && fits(shares, threads)).map_or_else(free, bound));
    };
    let homes = homes(plan.nproc, topology, gpus)?;
    let chosen = match binding {
        NumaBinding::None | NumaBinding::Node => homes.iter().map(|home| topology.of_node(*home)).collect(),
        NumaBinding::Socket => homes.iter().map(|home| topology.of_sockets_of_node(*home)).collect(),
        NumaBinding::Exclusive => exclusive(&homes, topology)?,
        NumaBinding::CoreComplex => core_complexes(&homes, topology),
    };
    Ok(bound(chosen))
}

fn bound(shares: Vec<Cores>) -> Vec<Option<Cores>> {
    shares.into_iter().map(Some).collect()
}

/// `4` or, for nested teams, `4,2`.
fn threads_of(omp_num_threads: &str) -> Option<usize> {
    omp_num_threads.split(',').next()?.trim().parse().ok()
}

fn fits(shares: &[Cores], threads: Option<usize>) -> bool {
    shares.iter().all(|share| threads.is_none_or(|threads| threads <= share.len()))
}

/// The NUMA node of each worker's GPU; `None` unless each has one that is known.
fn gpu_nodes(plan: &LaunchPlan, topology: &Topology, visible: Option<&str>) -> Option<Vec<usize>> {
    let gpus = topology.gpus();
    let names = plan.devices.clone().unwrap_or_else(|| visible_gpus(gpus.len(), visible));
    let node = |name: &String| gpus.iter().enumerate().find_map(|(at, gpu)| gpu.node_if_named(name, at));
    let nodes: Vec<_> = names.iter().take(plan.nproc).map_while(node).collect();
    (nodes.len() == plan.nproc).then_some(nodes)
}

/// The NUMA node of each worker.
fn homes(nproc: usize, topology: &Topology, gpus: Option<Vec<usize>>) -> Result<Vec<usize>, PlacingError> {
    let nodes: Vec<_> =
        topology.cpus().iter().map(|cpu| cpu.node).collect::<BTreeSet<_>>().into_iter().collect();
    let Some(gpus) = gpus else {
        return Ok((0..nproc).map(|rank| nodes[rank * nodes.len() / nproc]).collect());
    };
    match gpus.iter().position(|node| !nodes.contains(node)) {
        None => Ok(gpus),
        Some(local_rank) => {
            let node = gpus[local_rank];
            let allowed = topology.allowed();
            Err(PlacingError::NoCoreNearGpu { local_rank, node, allowed })
        }
    }
}

/// Distributes all cores evenly to the workers, in the order of their GPUs' nodes. `None` if there is only one worker,
/// or fewer cores than workers.
fn equal_shares(nproc: usize, topology: &Topology, gpus: Option<&[usize]>) -> Option<Vec<Cores>> {
    let real = topology.real_cores(|_| true);
    if nproc < 2 || real.len() < nproc {
        return None;
    }
    let mut order: Vec<_> = (0..nproc).collect();
    order.sort_by_key(|rank| gpus.map(|nodes| nodes[*rank]));
    let mut shares = vec![Cores::default(); nproc];
    order.into_iter().zip(split_evenly(&real, nproc)).for_each(|(rank, share)| shares[rank] = share);
    Some(shares)
}

/// Distributes the cores of each node evenly to the workers whose home it is.
fn exclusive(homes: &[usize], topology: &Topology) -> Result<Vec<Cores>, PlacingError> {
    let mut shares = vec![Cores::default(); homes.len()];
    for (node, ranks) in by_home(homes) {
        let real = topology.real_cores(|cpu| cpu.node == node);
        if real.len() < ranks.len() {
            return Err(PlacingError::TooFewCores { node, cores: real.len(), ranks: ranks.len() });
        }
        let node_shares = split_evenly(&real, ranks.len());
        ranks.into_iter().zip(node_shares).for_each(|(rank, share)| shares[rank] = share);
    }
    Ok(shares)
}

/// Assigns a cache to each worker: those with the most CPUs first, and from the start again if there are too few.
fn core_complexes(homes: &[usize], topology: &Topology) -> Vec<Cores> {
    let mut chosen = vec![Cores::default(); homes.len()];
    for (node, ranks) in by_home(homes) {
        let caches = topology.caches_of_node(node);
        ranks.into_iter().zip(caches.iter().cycle()).for_each(|(rank, cache)| chosen[rank] = cache.clone());
    }
    chosen
}

fn by_home(homes: &[usize]) -> BTreeMap<usize, Vec<usize>> {
    let mut ranks = BTreeMap::<_, Vec<_>>::new();
    homes.iter().enumerate().for_each(|(rank, home)| ranks.entry(*home).or_default().push(rank));
    ranks
}

/// Splits `real` into `parts`; the first ones get one more if it does not divide evenly.
fn split_evenly(real: &[Cores], parts: usize) -> Vec<Cores> {
    let each = real.len() / parts;
    let more = real.len() % parts;
    let start = |part: usize| part * each + part.min(more);
    let joined = |part: usize| real[start(part)..start(part + 1)].iter().flat_map(Cores::iter).collect();
    (0..parts).map(joined).collect()
}

#[cfg(test)]
mod tests;
