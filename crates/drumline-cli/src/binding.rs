//! One core for each rank of a node, where there are enough, as Open MPI does by default.
//!
//! In: the local rank, how many ranks the node has, the cores that it and its neighbours may use. Out: the core, bound to
//! or not. What a launcher has bound is left as it is.

use std::fs;
use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Who says where a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    /// We: each rank has a core of its own.
    OwnCore,
    /// Whoever started the ranks has given them different cores.
    Launcher,
    /// The scheduler.
    Free,
}

impl Binding {
    /// What was so before we did anything, from the cores that each rank of this node may use.
    pub(crate) fn found<'a>(mut allowed: impl Iterator<Item = &'a Vec<usize>>) -> Self {
        let first = allowed.next();
        if allowed.any(|other| Some(other) != first) { Self::Launcher } else { Self::Free }
    }
}

/// The cores that the calling thread may use.
pub(crate) fn allowed_cores() -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// How many cores the machine has, as far as the system says.
pub(crate) fn cores_of_the_machine() -> Option<usize> {
    count_of_list(&fs::read_to_string("/sys/devices/system/cpu/online").ok()?)
}

/// The length of a list such as `0-3,8`.
fn count_of_list(list: &str) -> Option<usize> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?).map(|more| more + 1)
    };
    list.trim().split(',').map(count).sum()
}

/// Binds the calling thread to one of the cores it may use. [`Binding::Free`]: there are fewer than ranks, and nothing was
/// done.
pub(crate) fn bind_to_core(
    local_rank: usize,
    local_ranks: usize,
    allowed: Vec<usize>,
) -> io::Result<Binding> {
    let Some(core) = core_of(local_rank, local_ranks, &real_cores_first(allowed, first_sibling)) else {
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

    #[test]
    fn ranks_with_different_cores_were_bound_by_their_launcher() {
        assert_eq!(Binding::found([vec![0], vec![1]].iter()), Binding::Launcher);
        assert_eq!(Binding::found([vec![0, 1], vec![0, 1]].iter()), Binding::Free);
        assert_eq!(Binding::found([vec![3]].iter()), Binding::Free);
    }

    #[test]
    fn lists_of_cores_are_counted() {
        assert_eq!(["0", "0-1\n", "0-3,8,10-11"].map(count_of_list), [Some(1), Some(2), Some(7)]);
        assert_eq!(["", "3-1", "all"].map(count_of_list), [None; 3]);
    }
}
