//! The jobs of a kernel on as many threads as libtorch uses.

use std::sync::{Mutex, PoisonError};

/// The elements of a job: enough that taking one costs nothing, and few enough that threads end together.
pub(crate) const JOB: usize = 64 << 10;

/// Runs all jobs. The calling thread takes part, and is alone if libtorch has one thread or there is one job.
pub(crate) fn on_threads<J: Send>(jobs: Vec<J>, run: impl Fn(J) + Sync) {
    let num_threads = (tch::get_num_threads().max(1) as usize).min(jobs.len());
    if num_threads <= 1 {
        return jobs.into_iter().for_each(run);
    }
    let jobs = Mutex::new(jobs.into_iter());
    let take = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some(job) = take() {
            run(job);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..num_threads {
            scope.spawn(work);
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_runs_once() {
        for num in [0, 1, 2, 1000] {
            let mut done = vec![0u32; num];
            on_threads(done.iter_mut().collect(), |done| *done += 1);
            assert_eq!(done, vec![1; num]);
        }
    }
}
