//! The thread that reduces buckets while backward runs.
//!
//! ```text
//!   hooks ──jobs──▶ lane: one collective after the other, in the agreed order ──done──▶ end of backward
//! ```
//! It has its own group, so that its calls cannot mix with those of the program. After an error it returns that error
//! for each job. On a GPU it uses its own stream: a job there waits for its gradients, and is done here when it is
//! queued.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use drumline_comm::{ProcessGroup, ReduceOp, on_behalf_of, panic_text};
use drumline_torch::cuda::{Event, Stream, StreamScope, set_device};
use drumline_torch::{HeapTensor, TorchError, tensor_within};
use tch::{Device, Kind, Tensor};

use super::observer::{ReducedBucket, Watch};
use crate::error::ParallelError;

/// Gradients that are reduced together, contiguous in memory: the argument of a [`CommHook`].
#[derive(Debug)]
pub struct GradBucket {
    /// Its index in the order of reduction.
    pub index: usize,
    /// The number of buckets.
    pub num_buckets: usize,
    pub(super) flat: Arc<HeapTensor>,
    pub(super) range: Range<usize>,
    /// The gradients, each with its parameter's sizes.
    pub gradients: Vec<Tensor>,
}

impl GradBucket {
    /// A bucket of zeros with these sizes, to test a hook without a model. All ranks of the group call it together.
    pub fn zeros(group: &ProcessGroup, kind: Kind, sizes: &[Vec<i64>]) -> Result<Self, TorchError> {
        let numel = |sizes: &Vec<i64>| sizes.iter().product::<i64>();
        let len: i64 = sizes.iter().map(numel).sum();
        let flat = Arc::new(HeapTensor::zeros(group, kind, len as usize)?);
        let mut gradients = Vec::new();
        let mut offset = 0;
        for sizes in sizes {
            gradients.push(flat.tensor().f_narrow(0, offset, numel(sizes))?.f_view(sizes.as_slice())?);
            offset += numel(sizes);
        }
        Ok(Self { index: 0, num_buckets: 1, flat, range: 0..len as usize, gradients })
    }

    /// A bucket of zeros with the same layout, for another kind of elements. All ranks of the group call it together.
    pub(crate) fn in_kind(&self, group: &ProcessGroup, kind: Kind) -> Result<Self, TorchError> {
        let flat = Arc::new(HeapTensor::zeros_on(group, self.device(), kind, self.range.len())?);
        let place = |(gradient, at): (&Tensor, usize)| tensor_within(flat.tensor(), at, gradient);
        let gradients = self.gradients.iter().zip(self.offsets()).map(place).collect::<Result<_, _>>()?;
        let Self { index, num_buckets, .. } = *self;
        Ok(Self { index, num_buckets, range: 0..self.range.len(), flat, gradients })
    }

    /// All its gradients as a one-dimensional tensor that shares the memory, with padding of zeros between them.
    pub fn tensor(&self) -> Tensor {
        self.flat.tensor().narrow(0, self.range.start as i64, self.range.len() as i64)
    }

    /// The kind of its elements.
    pub fn kind(&self) -> Kind {
        self.flat.kind()
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.flat.device()
    }

    /// Whether it is the last bucket of the step.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.num_buckets
    }

    /// The size in bytes.
    pub fn num_bytes(&self) -> usize {
        self.range.len() * self.kind().elt_size_in_bytes()
    }

    /// The layout of the bucket. Buckets with equal layouts can use the same memory.
    pub(crate) fn shape(&self) -> BucketShape {
        let gradient = |(gradient, at): (&Tensor, usize)| (at, gradient.size(), gradient.stride());
        let gradients = self.gradients.iter().zip(self.offsets()).map(gradient).collect();
        BucketShape { kind: self.kind(), len: self.range.len(), gradients }
    }

    /// The offset of each gradient in the bucket.
    fn offsets(&self) -> impl Iterator<Item = usize> {
        let (start, size) = (self.tensor().data_ptr() as usize, self.kind().elt_size_in_bytes());
        // A gradient without elements has a null pointer.
        let offset = move |gradient: &Tensor| (gradient.data_ptr() as usize).saturating_sub(start) / size;
        self.gradients.iter().map(offset)
    }

    /// All-reduces it in place.
    #[track_caller]
    pub fn all_reduce(&self, group: &ProcessGroup, op: ReduceOp) -> Result<(), TorchError> {
        self.flat.all_reduce(group, self.range.clone(), op)
    }
}

/// The layout of a bucket: offset, sizes and strides of each gradient.
#[derive(Debug, PartialEq)]
pub(crate) struct BucketShape {
    kind: Kind,
    len: usize,
    gradients: Vec<(usize, Vec<i64>, Vec<i64>)>,
}

/// A communication hook, which reduces a bucket. The default is [`AllReduce`].
///
/// It runs in parallel with backward, on another thread, for one bucket after the other, in the same order on all
/// ranks. Afterwards the bucket must hold the same bits on all ranks: the mean, or an approximation of it.
pub trait CommHook: Send {
    /// Reduces the bucket.
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError>;

    /// Whether its work on a GPU can be recorded in a CUDA graph: it reads no values, and does the same in each step.
    fn is_recordable(&self) -> bool {
        false
    }
}

/// The mean over all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        bucket.all_reduce(group, ReduceOp::Avg)
    }

    fn is_recordable(&self) -> bool {
        true
    }
}

/// A location in the program.
pub(super) type Site = &'static Location<'static>;

pub(super) enum Job {
    /// The bucket, and on a GPU the event after which its gradients are in it.
    Reduce(GradBucket, Option<Event>),
    /// Which parameters have a gradient on this rank; the result is: on any rank.
    Flags(Vec<u8>),
}

/// The result of a job: the flags, for a job of flags.
pub(super) type Done = Result<Option<Vec<u8>>, ParallelError>;

/// The thread, and channels to it. Dropping it joins the thread.
pub(super) struct Lane {
    jobs: Option<Sender<(Site, Job)>>,
    done: Receiver<Done>,
    pending: usize,
    thread: Option<JoinHandle<()>>,
    watch: Watch,
}

impl Lane {
    /// `stream` is for gradients on a GPU.
    pub(super) fn new(
        group: Arc<ProcessGroup>,
        hook: Box<dyn CommHook>,
        watch: Watch,
        stream: Option<Stream>,
    ) -> std::io::Result<Self> {
        let ((jobs, work), (results, done)) = (channel(), channel());
        let mut worker = Worker { group, hook, watch: watch.clone(), stream };
        let run = move || serve(&mut worker, &work, &results);
        let thread = std::thread::Builder::new().name("ddp".into()).spawn(run)?;
        Ok(Self { jobs: Some(jobs), done, pending: 0, thread: Some(thread), watch })
    }

    /// Sends a job. Its calls report `site` as their location, so that errors name the program and not this file.
    pub(super) fn send(&mut self, site: Site, job: Job) {
        // The thread lives until the sender is dropped.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send((site, job)).is_ok()) {
            self.pending += 1;
        }
    }

    /// Waits for all jobs. Returns the flags, if they were sent.
    pub(super) fn wait(&mut self) -> Done {
        let watch = self.watch.clone();
        watch.over(|| self.wait_for_all(), |observer, begin, end| observer.waited(begin, end))
    }

    fn wait_for_all(&mut self) -> Done {
        let mut outcome = Ok(None);
        for _ in 0..std::mem::take(&mut self.pending) {
            let ended = ParallelError::Internal { what: "the thread that reduces gradients has ended" };
            match (&outcome, self.done.recv().unwrap_or(Err(ended))) {
                (Err(_), _) => {}
                (Ok(_), Ok(None)) => {}
                (Ok(_), done) => outcome = done,
            }
        }
        outcome
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It has returned its errors already.
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Worker {
    group: Arc<ProcessGroup>,
    hook: Box<dyn CommHook>,
    watch: Watch,
    stream: Option<Stream>,
}

fn serve(worker: &mut Worker, jobs: &Receiver<(Site, Job)>, results: &Sender<Done>) {
    // Autograd must not record the reduction.
    let _no_grad = tch::no_grad_guard();
    let entered = worker.stream.map(on_stream).transpose();
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
            // The other ranks may wait in a call that this rank does not make.
            worker.group.abort(&error.to_string());
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

impl Worker {
    fn carry_out(&mut self, job: Job) -> Done {
        match job {
            Job::Reduce(bucket, ready) => {
                if let (Some(stream), Some(ready)) = (self.stream, &ready) {
                    stream.wait_for(ready)?;
                }
                let (index, bytes) = (bucket.index, bucket.num_bytes());
                let reduce = || self.hook.reduce(&bucket, &self.group);
                self.watch.over(reduce, |observer, begin, end| {
                    observer.bucket_reduced(ReducedBucket { index, bytes, begin, end });
                })?;
                Ok(None)
            }
            Job::Flags(mut flags) => {
                self.group.all_reduce(&mut flags, ReduceOp::Max)?;
                Ok(Some(flags))
            }
        }
    }
}
