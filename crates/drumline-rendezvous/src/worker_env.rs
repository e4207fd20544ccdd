//! Every environment variable that a worker gets or reads, by name, in this one file.
//!
//! The first block is what torchrun sets for its workers, so that a Python script and a Rust program start the same
//! way. Not here: how the values are combined (`init`).

use std::time::Duration;

/// The rank of this worker in the job, from 0.
pub const RANK: &str = "RANK";
/// Number of workers in the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// The rank of this worker on its node, from 0.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of workers on this node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// The rank of this node (agent) in the job, from 0.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Number of nodes (agents) in the job.
pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// The rank of this worker in its role, from 0.
pub const ROLE_RANK: &str = "ROLE_RANK";
/// The name of the role; by default `default`.
pub const ROLE_NAME: &str = "ROLE_NAME";
/// Number of workers with this role.
pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
/// Host of rank 0: a name or an address.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// A port there, on which rank 0 hosts the store, unless `DRUMLINE_STORE` names a launcher's store.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// The number of restarts so far.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// The number of allowed restarts.
pub const TORCHELASTIC_MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
/// Name of the job.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Whether a Python worker may use the agent's store as torch's own store.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// The file into which a failing worker writes its error as JSON.
pub const TORCHELASTIC_ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Makes NCCL errors end the process; torchrun sets it to 1 unless set.
pub const TORCH_NCCL_ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Threads of one worker's CPU kernels.
pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
/// How often GNU's OpenMP, which libtorch uses, spins before a waiting thread sleeps.
pub const GOMP_SPINCOUNT: &str = "GOMP_SPINCOUNT";
/// The GPUs that a program may see, in its order.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The prefix of variables that set a launcher flag's default; the flag's name in capitals follows.
pub const PET_PREFIX: &str = "PET_";
/// The launcher: the Python interpreter for scripts.
pub const PYTHON_EXEC: &str = "PYTHON_EXEC";
/// The launcher: seconds between SIGTERM and SIGKILL.
pub const TORCH_ELASTIC_SHUTDOWN_TIMEOUT: &str = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
/// The launcher: the prefix of each line of a worker's output.
pub const TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";

/// Slurm: this task among all tasks of the step.
pub const SLURM_PROCID: &str = "SLURM_PROCID";
/// Slurm: number of tasks of the job (or of the step, inside `srun`).
pub const SLURM_NTASKS: &str = "SLURM_NTASKS";
/// Slurm: number of tasks of the step; wins over `SLURM_NTASKS`.
pub const SLURM_STEP_NUM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
/// Slurm: this task among those of its node.
pub const SLURM_LOCALID: &str = "SLURM_LOCALID";
/// Slurm: this node among the nodes of the step.
pub const SLURM_NODEID: &str = "SLURM_NODEID";
/// Slurm: nodes of the step; wins over those of the job.
pub const SLURM_STEP_NODELIST: &str = "SLURM_STEP_NODELIST";
/// Slurm: nodes of the job.
pub const SLURM_JOB_NODELIST: &str = "SLURM_JOB_NODELIST";
/// Slurm: nodes of the job, older spelling.
pub const SLURM_NODELIST: &str = "SLURM_NODELIST";
/// Slurm: tasks on each node of the step, e.g. `4(x2),3`; wins over that of the job.
pub const SLURM_STEP_TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
/// Slurm: tasks on each node, e.g. `4(x2),3`.
pub const SLURM_TASKS_PER_NODE: &str = "SLURM_TASKS_PER_NODE";
/// Slurm: number of the job.
pub const SLURM_JOB_ID: &str = "SLURM_JOB_ID";
/// Slurm: number of the step inside the job.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";

/// Open MPI: this process among all.
pub const OMPI_COMM_WORLD_RANK: &str = "OMPI_COMM_WORLD_RANK";
/// Open MPI: number of processes.
pub const OMPI_COMM_WORLD_SIZE: &str = "OMPI_COMM_WORLD_SIZE";
/// Open MPI: this process among those of its node.
pub const OMPI_COMM_WORLD_LOCAL_RANK: &str = "OMPI_COMM_WORLD_LOCAL_RANK";
/// Open MPI: number of processes on this node.
pub const OMPI_COMM_WORLD_LOCAL_SIZE: &str = "OMPI_COMM_WORLD_LOCAL_SIZE";
/// PMIx (Open MPI, some Slurm set-ups): name of the job, the same on all its processes.
pub const PMIX_NAMESPACE: &str = "PMIX_NAMESPACE";
/// MPICH and Intel MPI: this process among all.
pub const PMI_RANK: &str = "PMI_RANK";
/// MPICH and Intel MPI: number of processes.
pub const PMI_SIZE: &str = "PMI_SIZE";
/// MPICH and Intel MPI: this process among those of its node.
pub const MPI_LOCALRANKID: &str = "MPI_LOCALRANKID";
/// MPICH and Intel MPI: number of processes on this node.
pub const MPI_LOCALNRANKS: &str = "MPI_LOCALNRANKS";

/// Number of an inherited descriptor that holds the 32 bytes of the job key (a sealed memfd).
pub const DRUMLINE_JOB_KEY_FD: &str = "DRUMLINE_JOB_KEY_FD";
/// Path of a file, readable by its owner only, with the job key as 64 hex digits.
pub const DRUMLINE_JOB_KEY_FILE: &str = "DRUMLINE_JOB_KEY_FILE";
/// `auto`, `shm` or `tcp`: how the ranks of a group exchange data.
pub const DRUMLINE_TRANSPORT: &str = "DRUMLINE_TRANSPORT";
/// Default deadline of a call, e.g. `300s`.
pub const DRUMLINE_TIMEOUT: &str = "DRUMLINE_TIMEOUT";
/// How long to wait for a silent host, e.g. `30s`, before its ranks count as lost.
pub const DRUMLINE_HOST_TIMEOUT: &str = "DRUMLINE_HOST_TIMEOUT";
/// `none`, `mac` or `aead`: how the data between hosts is protected.
pub const DRUMLINE_LINK_SECURITY: &str = "DRUMLINE_LINK_SECURITY";
/// `ipc` (the default), `host` or `nccl`: how ranks that share a GPU communicate.
pub const DRUMLINE_SHARED_GPU: &str = "DRUMLINE_SHARED_GPU";
/// `host:port` of the store that a launcher hosts. If unset, rank 0 hosts it at `MASTER_ADDR:MASTER_PORT`.
pub const DRUMLINE_STORE: &str = "DRUMLINE_STORE";
/// For the ranks of `drumline::spawn`: which call of the program they carry out, as JSON.
pub const DRUMLINE_SPAWN: &str = "DRUMLINE_SPAWN";
/// The number of the round; by default 0.
pub const DRUMLINE_ROUND: &str = "DRUMLINE_ROUND";
/// Set for a single rank without a launcher: it reports signals itself when it ends.
pub const DRUMLINE_ALONE: &str = "DRUMLINE_ALONE";
/// Faults to inject, as in `drumline run --fault`, joined by `;` (see [`fault`](crate::fault)).
pub const DRUMLINE_FAULTS: &str = "DRUMLINE_FAULTS";
/// The user's terminal, on which ranks of the same machine may draw; their normal output goes through the launcher.
pub const DRUMLINE_TERMINAL: &str = "DRUMLINE_TERMINAL";

/// The longest allowed time, 100 years: no job needs more, and every clock can represent it.
pub const LONGEST_DURATION: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The default of `DRUMLINE_HOST_TIMEOUT`: how long to wait for a silent host. A rank that is proved dead is reported
/// at once; this is for hosts that cannot be reached.
pub const DEFAULT_HOST_TIMEOUT: Duration = Duration::from_secs(30);

/// The value of `DRUMLINE_HOST_TIMEOUT`, or the default if it is unset or invalid; at least a second.
pub fn host_timeout() -> Duration {
    let text = std::env::var(DRUMLINE_HOST_TIMEOUT).ok();
    let given = text.as_deref().and_then(parse_duration).filter(|duration| !duration.is_zero());
    given.unwrap_or(DEFAULT_HOST_TIMEOUT).max(Duration::from_secs(1))
}

/// Parses `300s`, `500ms`, `5m`, `2h` or a plain number of seconds.
///
/// ```
/// use drumline_rendezvous::worker_env::parse_duration;
/// use std::time::Duration;
/// assert_eq!(parse_duration("1.5s"), Some(Duration::from_millis(1500)));
/// assert_eq!(parse_duration("soon"), None);
/// ```
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let scale = match &text[split..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let duration = Duration::try_from_secs_f64(text[..split].trim().parse::<f64>().ok()? * scale).ok();
    duration.filter(|duration| *duration <= LONGEST_DURATION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_with_their_unit() {
        for (text, expected) in
            [("300s", 300_000), ("500ms", 500), ("5m", 300_000), ("2", 2_000), ("0.5s", 500)]
        {
            assert_eq!(parse_duration(text), Some(Duration::from_millis(expected)), "{text}");
        }
        for text in ["", "s", "-1s", "5 parsecs", "1e400s", "1e19", "876001h"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }
}
