//! The environment of one worker: what torchrun would give it. The names are in `drumline_rendezvous::worker_env`.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::thread::available_parallelism;

use drumline_rendezvous::worker_env as names;

/// Variables to set, or with `None` to take away.
pub type Environment = Vec<(OsString, Option<OsString>)>;

/// Where a worker stands in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Among all workers.
    pub rank: usize,
    /// Number of all workers.
    pub world_size: usize,
    /// Among those of its node.
    pub local_rank: usize,
    /// Number of those of its node.
    pub local_world_size: usize,
    /// Its node among the nodes.
    pub node_rank: usize,
    /// Number of nodes.
    pub num_nodes: usize,
}

/// Where and when the workers of a round meet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meeting {
    /// Host of rank 0.
    pub master_addr: String,
    /// A port there for whatever rank 0 hosts.
    pub master_port: u16,
    /// `host:port` of the store that a launcher hosts; `None`: rank 0 hosts it, at the master's port.
    pub store: Option<String>,
    /// The round.
    pub round: u64,
    /// Restarts so far.
    pub restarts: usize,
}

/// What the worker at `place` is given so that it meets the others.
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
        // Our store does not speak PyTorch's language: its rank 0 hosts one of its own at the master's port.
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
    env
}

fn unless_set(name: &'static str, value: impl FnOnce() -> String) -> Option<(&'static str, String)> {
    std::env::var_os(name).is_none().then(|| (name, value()))
}

/// The terminal that this process writes to, if both its outputs do.
pub(crate) fn terminal() -> Option<PathBuf> {
    let shown = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    shown.then(|| std::fs::read_link("/proc/self/fd/2").ok()).flatten()
}

/// `OMP_NUM_THREADS` where we choose it: for several workers, unless it is set.
pub(crate) fn chosen_threads(workers: usize) -> Option<usize> {
    let is_ours = workers > 1 && std::env::var_os(names::OMP_NUM_THREADS).is_none();
    is_ours.then(|| threads_each(workers))
}

/// `GOMP_SPINCOUNT` where nobody has said how OpenMP's threads wait. By themselves they look 300,000 times, some milliseconds, at each end of a parallel part before
/// they sleep; on a machine that has other work that is time which they take from the very thread that they wait for.
pub fn short_spins() -> Option<(&'static str, &'static str)> {
    let is_said =
        [names::GOMP_SPINCOUNT, "OMP_WAIT_POLICY"].iter().any(|name| std::env::var_os(name).is_some());
    (!is_said).then_some((names::GOMP_SPINCOUNT, "1000"))
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
    fn second_node_of_two_is_told_its_place() {
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
