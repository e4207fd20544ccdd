//! A plan of one node, started: a store of its own, and a worker for each local rank.

use drumline_rendezvous::worker_env;

use crate::LaunchError;
use crate::environment::worker_environment;
use crate::hosted_store::HostedStore;
use crate::logs::AttemptLogs;
use crate::plan::LaunchPlan;
use crate::pump::Output;
use crate::running::{RunOptions, RunningJob};
use crate::stop::StopPolicy;
use crate::worker::WorkerSpec;

impl LaunchPlan {
    /// Starts every worker as the only node of the job. `visible` is what `CUDA_VISIBLE_DEVICES` says to the launcher.
    pub fn start_alone(&self, visible: Option<&str>, logs: &AttemptLogs) -> Result<RunningJob, LaunchError> {
        if self.nproc == 0 {
            return Err(LaunchError::NoProcesses);
        }
        let store = HostedStore::start(self.nproc)?;
        let spec = |local_rank| {
            let mut spec = self.spec(local_rank, visible, &store);
            let error_file = logs.error_file(local_rank).map(Into::into);
            spec.env.push((worker_env::TORCHELASTIC_ERROR_FILE.into(), error_file));
            spec
        };
        let specs = (0..self.nproc).map(spec).collect();
        let stop = StopPolicy { grace: self.shutdown_timeout, ..StopPolicy::default() };
        let on_exit = store.reporter()?;
        let options = RunOptions { output: Output::Logged(logs.clone()), stop, ..RunOptions::default() };
        RunningJob::supervised(specs, options, on_exit, Some(store))
    }

    fn spec(&self, local_rank: usize, visible: Option<&str>, store: &HostedStore) -> WorkerSpec {
        let place = self.place(local_rank, 0, 1);
        let (program, args) = self.command(&place);
        let mut env = worker_environment(&place, &store.meeting());
        env.extend(self.environment(&place, visible));
        env.extend(store.key_memory.environment());
        WorkerSpec { rank: place.rank, program, args, env, kept: vec![store.key_memory.descriptor()] }
    }
}
