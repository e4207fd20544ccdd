//! The environment of one worker: the variables that torchrun sets. Their names are in
//! `drumline_rendezvous::worker_env`.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread::available_parallelism;

use drumline_rendezvous::worker_env as names;

/// Variables to set, or to remove if the value is `None`.
pub type Environment = Vec<(OsString, Option<OsString>)>;

/// A worker's place in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its rank among all workers.
    pub rank: usize,
    /// Number of all workers.
    pub world_size: usize,
    /// Its rank among the workers of its node.
    pub local_rank: usize,
    /// Number of workers of its node.
    pub local_world_size: usize,
    /// The rank of its node.
    pub node_rank: usize,
    /// Number of nodes.
    pub num_nodes: usize,
}

/// Where the workers of a round find each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meeting {
    /// Host of rank 0.
    pub master_addr: String,
    /// A port there for services of rank 0.
    pub master_port: u16,
    /// `host:port` of the store that a launcher hosts; if `None`, rank 0 hosts it on the master port.
    pub store: Option<String>,
    /// The number of the round.
    pub round: u64,
    /// The number of restarts so far.
    pub restarts: usize,
}

/// The variables with which the worker at `place` finds the others.
pub fn worker_environment(place: &Place, meeting: &Meeting) -> Environment {
    let count = |n: usize| n.to_string();
    let mut env = vec![
        (names::RANK, count(place.rank)),
        (names::WORLD_SIZE, count(place.world_size)),
        (names::LOCAL_RANK, count(place.local_rank)),
        (names::LOCAL_WORLD_SIZE, count(place.local_world_size)),
        (names::GROUP_RANK, count(place.node_rank)),
        (names::GROUP_WORLD_SIZE, count(place.num_nodes)),
        (names::ROLE_RANK, count(place.rank)),
        (names::ROLE_NAME, "default".to_string()),
        (names::ROLE_WORLD_SIZE, count(place.world_size)),
        (names::MASTER_ADDR, meeting.master_addr.clone()),
        (names::MASTER_PORT, meeting.master_port.to_string()),
        (names::TORCHELASTIC_RESTART_COUNT, count(meeting.restarts)),
        (names::TORCHELASTIC_MAX_RESTARTS, count(0)),
        (names::TORCHELASTIC_RUN_ID, "none".to_string()),
        // Our store does not speak PyTorch's protocol: PyTorch's rank 0 hosts its own store on the master port.
        (names::TORCHELASTIC_USE_AGENT_STORE, "False".to_string()),
        (names::DRUMLINE_ROUND, meeting.round.to_string()),
    ];
    env.extend(unless_set(names::TORCH_NCCL_ASYNC_ERROR_HANDLING, || count(1)));
    env.extend(
        chosen_threads(place.local_world_size).map(|threads| (names::OMP_NUM_THREADS, count(threads))),
    );
    env.extend(short_spins().map(|(name, value)| (name, value.to_owned())));
    let mut env: Environment =
        env.into_iter().map(|(name, value)| (name.into(), Some(value.into()))).collect();
    env.push((names::DRUMLINE_STORE.into(), meeting.store.clone().map(Into::into)));
    add_nccl_settings(&mut env, place.rank);
    env
}

/// With `DRUMLINE_SHARED_GPU=nccl`, adds settings with which ranks that share a GPU can use NCCL: a host id for each, because
/// NCCL refuses two ranks of one host on one GPU, and sockets on loopback, by which hosts communicate.
pub(crate) fn add_nccl_settings(env: &mut Environment, rank: usize) {
    let value = |env: &Environment, name: &str| {
        let given = env.iter().rev().find(|(other, _)| other == name);
        given.map_or_else(|| std::env::var_os(name), |(_, value)| value.clone())
    };
    if value(env, names::DRUMLINE_SHARED_GPU).is_none_or(|way| way != "nccl") {
        return;
    }
    let id = format!("drumline-{rank}");
    for (name, setting) in
        [("NCCL_HOSTID", id.as_str()), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")]
    {
        if value(env, name).is_none() {
            env.push((name.into(), Some(setting.into())));
        }
    }
}

fn unless_set(name: &'static str, value: impl FnOnce() -> String) -> Option<(&'static str, String)> {
    std::env::var_os(name).is_none().then(|| (name, value()))
}

/// The terminal that this process writes to, if both stdout and stderr do.
pub(crate) fn terminal() -> Option<PathBuf> {
    let shown = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    shown.then(|| std::fs::read_link("/proc/self/fd/2").ok()).flatten()
}

/// The value for `OMP_NUM_THREADS` if the launcher chooses it: with several workers, unless it is set.
pub(crate) fn chosen_threads(workers: usize) -> Option<usize> {
    let is_ours = workers > 1 && std::env::var_os(names::OMP_NUM_THREADS).is_none();
    is_ours.then(|| threads_each(workers))
}

/// A value for `GOMP_SPINCOUNT`, unless the user has set how OpenMP's threads wait. By default they spin 300,000 times,
/// which takes some milliseconds, at each end of a parallel region before they sleep. On a busy machine that takes time
/// from the very thread they wait for.
pub fn short_spins() -> Option<(&'static str, &'static str)> {
    let is_set =
        [names::GOMP_SPINCOUNT, "OMP_WAIT_POLICY"].iter().any(|name| std::env::var_os(name).is_some());
    (!is_set).then_some((names::GOMP_SPINCOUNT, "1000"))
}

/// A fair share of the cores for each of `workers`.
fn threads_each(workers: usize) -> usize {
    let cores = available_parallelism().map_or(1, usize::from);
    (cores / workers).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_get_host_ids_if_they_ask_for_nccl() {
        let mut env: Environment = vec![("NCCL_IB_DISABLE".into(), Some("0".into()))];
        add_nccl_settings(&mut env, 3);
        assert_eq!(env.len(), 1, "they do not ask");
        env.push((names::DRUMLINE_SHARED_GPU.into(), Some("nccl".into())));
        add_nccl_settings(&mut env, 3);
        let id = env.iter().find(|(name, _)| name == "NCCL_HOSTID");
        assert_eq!(id.and_then(|(_, value)| value.as_deref()), Some("drumline-3".as_ref()));
        assert_eq!(env[0].1.as_deref(), Some("0".as_ref()), "a setting of the user stays");
        assert_eq!(env.len(), 4);
    }

    #[test]
    fn the_second_of_two_nodes_gets_its_place() {
        let place =
            Place { rank: 3, world_size: 4, local_rank: 1, local_world_size: 2, node_rank: 1, num_nodes: 2 };
        let meeting = Meeting { master_addr: "10.77.0.1".into(), master_port: 29500, ..Meeting::default() };
        let env = worker_environment(&place, &meeting);
        let is = |name: &str, value: &str| env.contains(&(name.into(), Some(value.into())));
        assert!(is("RANK", "3") && is("WORLD_SIZE", "4"));
        assert!(is("LOCAL_RANK", "1") && is("LOCAL_WORLD_SIZE", "2"));
        assert!(is("GROUP_RANK", "1") && is("GROUP_WORLD_SIZE", "2"));
        assert!(is("MASTER_ADDR", "10.77.0.1") && is("MASTER_PORT", "29500"));
    }
}
