//! Am I a rank of a job that somebody else has started? Pure: the environment comes in as a function.

use drumline_rendezvous::worker_env;

/// Whether a launcher, MPI or `srun` has given this process a rank.
///
/// Inside `sbatch` and `salloc`, but outside `srun`, Slurm's variables describe the allocation and not this process: there
/// the answer is no.
pub(crate) fn is_rank_of_a_job(env: impl Fn(&str) -> Option<String>) -> bool {
    let launchers = [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK];
    let step_tasks = || env(worker_env::SLURM_STEP_NUM_TASKS)?.parse::<usize>().ok();
    launchers.iter().any(|name| env(name).is_some())
        || env(worker_env::SLURM_PROCID).is_some() && step_tasks().is_some_and(|tasks| tasks > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(variables: &[(&str, &str)]) -> bool {
        is_rank_of_a_job(|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn launchers_are_recognised() {
        assert!(!asked(&[]));
        assert!(asked(&[("RANK", "0"), ("WORLD_SIZE", "1")]));
        assert!(asked(&[("OMPI_COMM_WORLD_RANK", "1")]));
        assert!(asked(&[("PMI_RANK", "1")]));
        assert!(asked(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "4")]));
    }

    #[test]
    fn an_allocation_alone_is_no_job() {
        assert!(!asked(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]));
        assert!(!asked(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")]));
    }
}
