//! One core for each rank of a node, where there are enough, as Open MPI does by default.
//!
//! In: the local rank, how many ranks the node has, the cores that it and its neighbours may use. Out: the core, if this rank
//! was bound to one. Ranks that a launcher has bound are left alone.

use std::io;

use drumline_launch::placing::{Cores, Cpu};
use rustix::thread::{CpuSet, sched_setaffinity};

/// What decides where a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binding {
    /// This command: each rank has a core of its own.
    OwnCore,
    /// The launcher: it has given the ranks different cores.
    Launcher,
    /// The scheduler.
    Free,
}

impl Binding {
    /// What holds before we bind anything, from the cores that each rank of this node may use.
    pub(super) fn found<'a>(mut allowed: impl Iterator<Item = &'a Cores>) -> Self {
        let first = allowed.next();
        if allowed.any(|other| Some(other) != first) { Self::Launcher } else { Self::Free }
    }
}

/// Binds the calling thread to one of the CPUs that it may use. Returns [`Binding::Free`], and does nothing, if there are fewer
/// CPUs than ranks.
pub(super) fn bind_to_core(local_rank: usize, local_ranks: usize, allowed: &[Cpu]) -> io::Result<Binding> {
    let Some(core) = core_of(local_rank, local_ranks, &real_cores_first(allowed)) else {
        return Ok(Binding::Free);
    };
    let mut mine = CpuSet::new();
    mine.set(core);
    sched_setaffinity(None, &mine)?;
    Ok(Binding::OwnCore)
}

fn core_of(local_rank: usize, local_ranks: usize, cpus: &[usize]) -> Option<usize> {
    if local_ranks > cpus.len() { None } else { cpus.get(local_rank).copied() }
}

/// One hardware thread of each physical core, then their siblings.
fn real_cores_first(cpus: &[Cpu]) -> Vec<usize> {
    let mut cpus: Vec<_> = cpus.iter().map(|cpu| (cpu.core != cpu.id, cpu.id)).collect();
    cpus.sort_unstable();
    cpus.into_iter().map(|(_, id)| id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_gets_its_own_core_or_none_does() {
        assert_eq!((0..2).map(|rank| core_of(rank, 2, &[4, 7])).collect::<Vec<_>>(), [Some(4), Some(7)]);
        assert_eq!(core_of(0, 3, &[4, 7]), None);
    }

    #[test]
    fn physical_cores_come_before_their_second_threads() {
        let cpus = |core_of: fn(usize) -> usize| {
            let cpu = |id| Cpu { id, core: core_of(id), cache: 0, node: 0, socket: 0 };
            real_cores_first(&(0..6).map(cpu).collect::<Vec<_>>())
        };
        assert_eq!(cpus(|id| id / 2 * 2), [0, 2, 4, 1, 3, 5]);
        assert_eq!(cpus(|id| id % 3), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn ranks_with_different_cores_were_bound_by_their_launcher() {
        let found = |lists: &[&str]| {
            let cores: Vec<Cores> = lists.iter().map(|list| list.parse().unwrap()).collect();
            Binding::found(cores.iter())
        };
        assert_eq!(found(&["0", "1"]), Binding::Launcher);
        assert_eq!(found(&["0-1", "0-1"]), Binding::Free);
        assert_eq!(found(&["3"]), Binding::Free);
    }
}
