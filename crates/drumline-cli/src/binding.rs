//! One core for each rank of a node, where there are enough, as Open MPI does by default.
//!
//! In: the local rank, how many ranks the node has, the cores this process may use. Out: the core, bound to or not.

use std::fs;
use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to a core of its own. `false`: there are fewer cores than ranks, and nothing was done.
pub(crate) fn bind_to_core(local_rank: usize, local_ranks: usize) -> io::Result<bool> {
    let allowed = sched_getaffinity(None)?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let Some(cpu) = core_of(local_rank, local_ranks, &real_cores_first(cpus, first_sibling)) else {
        return Ok(false);
    };
    let mut mine = CpuSet::new();
    mine.set(cpu);
    sched_setaffinity(None, &mine)?;
    Ok(true)
}

fn core_of(local_rank: usize, local_ranks: usize, cpus: &[usize]) -> Option<usize> {
    if local_ranks > cpus.len() { None } else { cpus.get(local_rank).copied() }
}

/// One hardware thread of each real core, then their siblings.
fn real_cores_first(mut cpus: Vec<usize>, first_sibling: impl Fn(usize) -> usize) -> Vec<usize> {
    cpus.sort_by_key(|&cpu| (first_sibling(cpu) != cpu, cpu));
    cpus
}

/// The lowest hardware thread of the same core; itself where the system does not say.
fn first_sibling(cpu: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = fs::read_to_string(path).unwrap_or_default();
    list.split([',', '-']).next().and_then(|first| first.trim().parse().ok()).unwrap_or(cpu)
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
    fn real_cores_come_before_their_second_threads() {
        assert_eq!(real_cores_first((0..6).collect(), |cpu| cpu / 2 * 2), [0, 2, 4, 1, 3, 5]);
        assert_eq!(real_cores_first((0..4).collect(), |cpu| cpu % 2), [0, 1, 2, 3]);
    }
}
