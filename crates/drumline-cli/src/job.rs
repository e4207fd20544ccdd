//! Whether this process is a rank of a job. Pure: the environment comes in as a function.

use drumline_rendezvous::worker_env;

/// The variable in which a launcher, MPI or `srun` has set this process's rank.
///
/// Inside `sbatch` and `salloc`, but outside `srun`, Slurm's variables describe the allocation and not this process. Then the
/// answer is `None`.
pub(crate) fn rank_variable(env: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let launchers = [worker_env::RANK, worker_env::OMPI_COMM_WORLD_RANK, worker_env::PMI_RANK];
    let step_tasks = || env(worker_env::SLURM_STEP_NUM_TASKS)?.parse::<usize>().ok();
    let in_step = || env(worker_env::SLURM_PROCID).is_some() && step_tasks().is_some_and(|tasks| tasks > 1);
    let launcher = launchers.into_iter().find(|name| env(name).is_some());
    launcher.or_else(|| in_step().then_some(worker_env::SLURM_PROCID))
}

/// Whether this process is a rank other than the first. Messages that are the same on all ranks come from the first only.
pub(crate) fn is_later_rank(env: impl Fn(&str) -> Option<String>) -> bool {
    let rank = rank_variable(&env).and_then(|name| env(name)?.trim().parse::<usize>().ok());
    rank.is_some_and(|rank| rank > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(variables: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
    }

    fn variable(variables: &[(&str, &str)]) -> Option<&'static str> {
        rank_variable(of(variables))
    }

    #[test]
    fn launchers_are_recognised() {
        assert_eq!(variable(&[]), None);
        assert_eq!(variable(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Some("RANK"));
        assert_eq!(variable(&[("OMPI_COMM_WORLD_RANK", "1")]), Some("OMPI_COMM_WORLD_RANK"));
        assert_eq!(variable(&[("PMI_RANK", "1")]), Some("PMI_RANK"));
        assert_eq!(variable(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "4")]), Some("SLURM_PROCID"));
    }

    #[test]
    fn an_allocation_alone_is_no_job() {
        assert_eq!(variable(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), None);
        let one_task = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(variable(&one_task), None);
    }

    #[test]
    fn later_ranks_are_distinguished_from_the_first_and_from_no_rank() {
        let later = |variables: &[(&str, &str)]| is_later_rank(of(variables));
        assert!(later(&[("RANK", "1")]) && later(&[("PMI_RANK", "3")]));
        assert!(!later(&[("RANK", "0")]) && !later(&[("RANK", "x")]) && !later(&[]));
        assert!(!later(&[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4")]));
    }
}
