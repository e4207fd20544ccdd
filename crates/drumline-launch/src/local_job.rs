//! A job on this machine only: N ranks of one program, and the store through which they find each other.
//!
//! ```text
//!   LocalJob ─start─▶ store on 127.0.0.1, random key ─▶ environment of each rank ─▶ RunningJob ─wait─▶ JobReport
//! ```
//!
//! The key is passed in a sealed memfd that the workers inherit: never in an argument, a variable or a file.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::LaunchError;
use crate::environment::{Environment, Place, add_nccl_settings, worker_environment};
use crate::hosted_store::HostedStore;
use crate::pump::Output;
use crate::running::{RunOptions, RunningJob};
use crate::stop::OnFailure;
use crate::supervise::Hooks;
use crate::worker::WorkerSpec;

/// A job to be started on this machine.
///
/// ```
/// use drumline_launch::{LocalJob, Output};
///
/// let job = LocalJob::new(2, "sh", ["-c", "echo rank $RANK of $WORLD_SIZE"]).output(Output::Capture);
/// let report = job.start()?.wait();
/// assert!(report.is_success());
/// assert_eq!(report.ranks[1].stdout, b"rank 1 of 2\n");
/// # Ok::<(), drumline_launch::LaunchError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LocalJob {
    nproc: usize,
    program: OsString,
    args: Vec<OsString>,
    env: Environment,
    kept: Vec<Arc<OwnedFd>>,
    options: RunOptions,
}

impl LocalJob {
    /// A job of `nproc` ranks of `program` with `args`.
    pub fn new<A: Into<OsString>>(
        nproc: usize,
        program: impl Into<OsString>,
        args: impl IntoIterator<Item = A>,
    ) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        Self {
            nproc,
            program: program.into(),
            args,
            env: Vec::new(),
            kept: Vec::new(),
            options: RunOptions::default(),
        }
    }

    /// A job of `nproc` ranks of the program that is running now.
    pub fn this_program<A: Into<OsString>>(
        nproc: usize,
        args: impl IntoIterator<Item = A>,
    ) -> io::Result<Self> {
        Ok(Self::new(nproc, std::env::current_exe()?, args))
    }

    /// Sets a variable in every worker; it overrides what the launcher would set.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Lets every worker inherit a descriptor, under the same number.
    pub fn keep(mut self, descriptor: Arc<OwnedFd>) -> Self {
        self.kept.push(descriptor);
        self
    }

    /// Sets where the workers' output goes; inherited by default.
    pub fn output(mut self, output: Output) -> Self {
        self.options.output = output;
        self
    }

    /// Stops the job when it has run this long; no limit by default.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = Some(deadline);
        self
    }

    /// Sets the time between SIGTERM and SIGKILL when the job is stopped; 5 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.options.stop.grace = grace;
        self
    }

    /// Sets what the first failure does to the other ranks; they are stopped by default.
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.options.stop.on_failure = on_failure;
        self
    }

    /// Starts the store and every rank. If one cannot be started, none is left running.
    pub fn start(self) -> Result<RunningJob, LaunchError> {
        if self.nproc == 0 {
            return Err(LaunchError::NoProcesses);
        }
        let store = HostedStore::start(self.nproc)?;
        let specs = (0..self.nproc).map(|rank| self.spec(rank, &store)).collect();
        let hooks = Hooks { on_exit: store.reporter(), ..Hooks::default() };
        RunningJob::supervised(specs, self.options, hooks, Some(store))
    }

    fn spec(&self, rank: usize, store: &HostedStore) -> WorkerSpec {
        let place = Place {
            rank,
            world_size: self.nproc,
            local_rank: rank,
            local_world_size: self.nproc,
            node_rank: 0,
            num_nodes: 1,
        };
        let mut env = worker_environment(&place, &store.meeting());
        env.extend(store.key_memory.environment());
        env.extend(self.env.iter().cloned());
        add_nccl_settings(&mut env, rank);
        let kept = self.kept.iter().cloned().chain([store.key_memory.descriptor()]).collect();
        WorkerSpec {
            rank,
            program: self.program.clone(),
            args: self.args.clone(),
            env,
            stdin: None,
            kept,
            cores: None,
        }
    }
}
