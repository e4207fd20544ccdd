//! A thread that communicates while backward runs.
//!
//! ```text
//!   hooks ──jobs──▶ lane: one collective after the other, in the agreed order ──done──▶ end of backward
//! ```
//! Its worker has groups of its own, so that its calls cannot mix with those of the program. After an error it returns
//! that error for each job. On a GPU it uses its own stream: a job there waits for its gradients, and is done here when
//! it is queued.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use drumline_comm::{on_behalf_of, panic_text};
use drumline_torch::TorchError;
use drumline_torch::cuda::{Stream, StreamScope, set_device};

use crate::error::ParallelError;
use crate::observer::Watch;
use crate::reduction::Site;

/// The result of a job: which parameters any rank uses, for a job of flags.
pub(crate) type Done = Result<Option<Vec<u8>>, ParallelError>;

/// What carries out the jobs of a lane, on its thread.
pub(crate) trait Worker: Send + 'static {
    /// What it is given.
    type Job: Send + 'static;

    /// The stream of its jobs, for gradients on a GPU.
    fn stream(&self) -> Option<Stream>;

    /// A job has failed: other ranks may wait in a call that this rank does not make.
    fn abort(&self, cause: &str);

    /// Carries out a job.
    fn carry_out(&mut self, job: Self::Job) -> Done;
}

/// The thread, and channels to it. Dropping it joins the thread.
pub(crate) struct Lane<J> {
    jobs: Option<Sender<(Site, J)>>,
    done: Receiver<Done>,
    /// Jobs sent since the last [`wait`](Self::wait).
    num_sent: usize,
    /// Of these, how many are done.
    num_done: usize,
    /// The first error among them, or the flags.
    outcome: Done,
    thread: Option<JoinHandle<()>>,
    watch: Watch,
    /// Whether jobs are recorded in a CUDA graph.
    is_recorded: bool,
}

impl<J: Send + 'static> Lane<J> {
    /// Starts the thread. `watch` observes how long `wait` takes.
    pub(crate) fn new(mut worker: impl Worker<Job = J>, watch: Watch) -> Result<Self, ParallelError> {
        let ((jobs, work), (results, done)) = (channel(), channel());
        let run = move || serve(&mut worker, &work, &results);
        let what = "the thread that reduces gradients";
        let thread = std::thread::Builder::new().name("ddp".into()).spawn(run);
        let thread = thread.map_err(|cause| ParallelError::Thread { what, cause })?;
        Ok(Self {
            jobs: Some(jobs),
            done,
            num_sent: 0,
            num_done: 0,
            outcome: Ok(None),
            thread: Some(thread),
            watch,
            is_recorded: false,
        })
    }

    /// Says whether the jobs that follow are recorded in a CUDA graph. Only one thread at a time may add to a graph, so
    /// that sending such a job waits until it is queued.
    pub(crate) fn set_recorded(&mut self, is_recorded: bool) {
        self.is_recorded = is_recorded;
    }

    /// Sends a job. Its calls report `site` as their location, so that errors name the program and not this file.
    pub(crate) fn send(&mut self, site: Site, job: J) {
        // The thread lives until the sender is dropped.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send((site, job)).is_ok()) {
            self.num_sent += 1;
            if self.is_recorded {
                self.wait_for(self.num_sent);
            }
        }
    }

    /// Whether the first `num` jobs since the last [`wait`](Self::wait) are done.
    pub(crate) fn has_done(&mut self, num: usize) -> bool {
        while self.num_done < num {
            match self.done.try_recv() {
                Ok(done) => self.note(done),
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until the first `num` jobs since the last [`wait`](Self::wait) are done. Errors are returned there.
    pub(crate) fn wait_for(&mut self, num: usize) {
        while self.num_done < num.min(self.num_sent) {
            let ended = ParallelError::Internal { what: "the thread that reduces gradients has ended" };
            let done = self.done.recv().unwrap_or(Err(ended));
            self.note(done);
        }
    }

    fn note(&mut self, done: Done) {
        self.num_done += 1;
        match (&self.outcome, &done) {
            (Err(_), _) | (Ok(_), Ok(None)) => {}
            (Ok(_), _) => self.outcome = done,
        }
    }

    /// Waits for all jobs. Returns the flags, if they were sent.
    pub(crate) fn wait(&mut self) -> Done {
        let watch = self.watch.clone();
        watch.over(|| self.wait_for_all(), |observer, begin, end| observer.waited(begin, end))
    }

    fn wait_for_all(&mut self) -> Done {
        self.wait_for(self.num_sent);
        (self.num_sent, self.num_done) = (0, 0);
        std::mem::replace(&mut self.outcome, Ok(None))
    }
}

impl<J> Drop for Lane<J> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It has returned its errors already.
            let _ = thread.join();
        }
    }
}

fn serve<W: Worker>(worker: &mut W, jobs: &Receiver<(Site, W::Job)>, results: &Sender<Done>) {
    // Autograd must not record the reduction.
    let _no_grad = tch::no_grad_guard();
    let entered = worker.stream().map(on_stream).transpose();
    let mut failure: Option<String> = entered.as_ref().err().map(TorchError::to_string);
    for (site, job) in jobs {
        let done = match &failure {
            None => catch_unwind(AssertUnwindSafe(|| on_behalf_of(site, || worker.carry_out(job))))
                .unwrap_or_else(|panic| {
                    Err(ParallelError::HookPanicked { message: panic_text(&*panic).to_owned() })
                }),
            Some(cause) => Err(ParallelError::ReductionEnded { cause: cause.clone() }),
        };
        if let (None, Err(error)) = (&failure, &done) {
            worker.abort(&error.to_string());
            failure = Some(error.to_string());
        }
        if results.send(done).is_err() {
            return;
        }
    }
}

/// Makes the stream and its GPU the current ones of this thread.
fn on_stream(stream: Stream) -> Result<StreamScope, TorchError> {
    set_device(stream.device())?;
    stream.enter()
}
