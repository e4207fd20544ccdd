//! Which cores each worker of this node runs on: a pure decision over a [`Topology`].
//!
//! ```text
//!   /sys, /proc, sched_getaffinity ─▶ Topology ─┐
//!   --numa-binding, --omp, GPUs ────▶ the plan ─┴▶ cores(): one set for each local rank, or none
//! ```
//!
//! A *core* here is a real one, with all its hardware threads (*CPUs*). A worker's *home* is the NUMA node of its GPU;
//! where not each worker has a GPU, the workers are dealt over the nodes in blocks.
//!
//! | `--numa-binding` | a worker gets |
//! |---|---|
//! | `node` | all CPUs of its home |
//! | `socket` | all CPUs of the sockets of its home |
//! | `exclusive` | its own share of the cores of its home |
//! | `core-complex` | the CPUs that share one last-level cache, in its home |
//! | `none` | whatever it may use |
//! | not given | an equal share of all cores, if there is one for each and its threads fit in |
//!
//! What the launcher itself may not use (a cgroup, Slurm, `taskset`) is never given.

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

/// Variables with which users place threads on cores themselves; an automatic choice would be in their way.
const PLACED_BY_HAND: [&str; 3] = ["GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES"];

/// What was asked of the binding cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacingError {
    /// The worker's GPU is where the launcher has no core.
    #[error(
        "--numa-binding: the GPU of local rank {local_rank} is on NUMA node {node}, and only the cores {allowed} \
         of other nodes may be used here; try --numa-binding none, or asking for cores near the GPU"
    )]
    NoCoreNearGpu {
        /// Whose GPU.
        local_rank: usize,
        /// Where it is.
        node: usize,
        /// What may be used.
        allowed: Cores,
    },
    /// More workers than cores on a node.
    #[error(
        "--numa-binding exclusive: NUMA node {node} has {cores} cores for {ranks} ranks; try fewer ranks, or \
         --numa-binding node"
    )]
    TooFewCores {
        /// The node.
        node: usize,
        /// Its cores that may be used.
        cores: usize,
        /// The workers that live there.
        ranks: usize,
    },
}

/// The CPUs of each local rank; `None` for one that is left where the scheduler puts it. `env` is the launcher's own
/// environment.
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
    let node = |name: &String| gpus.iter().enumerate().find_map(|(at, gpu)| gpu.is_called(name, at));
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
            let (node, allowed) = (gpus[local_rank], topology.allowed());
            Err(PlacingError::NoCoreNearGpu { local_rank, node, allowed })
        }
    }
}

/// All cores, dealt evenly to workers in the order of their GPUs' nodes. `None` if one worker would have them all, or
/// another none.
fn equal_shares(nproc: usize, topology: &Topology, gpus: Option<&[usize]>) -> Option<Vec<Cores>> {
    let real = topology.real_cores(|_| true);
    if nproc < 2 || real.len() < nproc {
        return None;
    }
    let mut order: Vec<_> = (0..nproc).collect();
    order.sort_by_key(|rank| gpus.map(|nodes| nodes[*rank]));
    let mut shares = vec![Cores::default(); nproc];
    order.into_iter().zip(dealt(&real, nproc)).for_each(|(rank, share)| shares[rank] = share);
    Some(shares)
}

/// The cores of each node, dealt evenly to the workers that live there.
fn exclusive(homes: &[usize], topology: &Topology) -> Result<Vec<Cores>, PlacingError> {
    let mut shares = vec![Cores::default(); homes.len()];
    for (node, ranks) in by_home(homes) {
        let real = topology.real_cores(|cpu| cpu.node == node);
        if real.len() < ranks.len() {
            return Err(PlacingError::TooFewCores { node, cores: real.len(), ranks: ranks.len() });
        }
        let dealt = dealt(&real, ranks.len());
        ranks.into_iter().zip(dealt).for_each(|(rank, share)| shares[rank] = share);
    }
    Ok(shares)
}

/// A cache for each worker: those with the most CPUs first, and again from the first when there are too few.
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

/// `real` in `parts` pieces, of which the first ones are larger by one if need be.
fn dealt(real: &[Cores], parts: usize) -> Vec<Cores> {
    let (each, more) = (real.len() / parts, real.len() % parts);
    let start = |part: usize| part * each + part.min(more);
    let joined = |part: usize| real[start(part)..start(part + 1)].iter().flat_map(Cores::iter).collect();
    (0..parts).map(joined).collect()
}

#[cfg(test)]
mod tests;
