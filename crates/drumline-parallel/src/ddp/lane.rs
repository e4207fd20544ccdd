//! The thread that reduces buckets while backward goes on.
//!
//! ```text
//!   hooks ──jobs──▶ lane: one collective after the other, in the agreed order ──done──▶ end of backward
//! ```
//! It has a group of its own, so that calls that the program makes meanwhile cannot come between. After an error it only answers with that.
//! On a GPU it works on a stream of its own: a job begins there when its gradients are there, and is done here when it is queued.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use drumline_comm::{ProcessGroup, ReduceOp, on_behalf_of};
use drumline_torch::cuda::{Event, Stream, StreamScope, set_device};
use drumline_torch::{HeapTensor, TorchError, tensor_within};
use tch::{Device, Kind, Tensor};

use super::observer::{ReducedBucket, Watch};
use crate::error::ParallelError;

/// What a [`CommHook`] is given: gradients that are reduced together, one after the other in one piece of memory.
#[derive(Debug)]
pub struct GradBucket {
    /// Its number, in the order of reduction, as long as the order stays.
    pub index: usize,
    /// How many buckets there are.
    pub num_buckets: usize,
    pub(super) flat: Arc<HeapTensor>,
    pub(super) range: Range<usize>,
    /// The gradients, each with its parameter's sizes.
    pub gradients: Vec<Tensor>,
}

impl GradBucket {
    /// A bucket of zeros of these sizes, made by all ranks of the group together: to try a hook of one's own without a model.
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

    /// The same bucket in other memory, for elements of another kind; made by all ranks of the group together.
    pub(crate) fn in_kind(&self, group: &ProcessGroup, kind: Kind) -> Result<Self, TorchError> {
        let flat = Arc::new(HeapTensor::zeros_on(group, self.device(), kind, self.range.len())?);
        let place = |(gradient, at): (&Tensor, usize)| tensor_within(flat.tensor(), at, gradient);
        let gradients = self.gradients.iter().zip(self.offsets()).map(place).collect::<Result<_, _>>()?;
        let Self { index, num_buckets, .. } = *self;
        Ok(Self { index, num_buckets, range: 0..self.range.len(), flat, gradients })
    }

    /// All its gradients as one tensor of one dimension, with some zeros between; the same memory.
    pub fn tensor(&self) -> Tensor {
        self.flat.tensor().narrow(0, self.range.start as i64, self.range.len() as i64)
    }

    /// The kind of its elements.
    pub fn kind(&self) -> Kind {
        self.flat.kind()
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.flat.device()
    }

    /// Whether no other comes after it in this step.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.num_buckets
    }

    /// How many bytes an all-reduce of it moves from a rank's memory.
    pub fn num_bytes(&self) -> usize {
        self.range.len() * self.kind().elt_size_in_bytes()
    }

    /// What must be equal for memory that was laid out for one bucket to fit another.
    pub(crate) fn shape(&self) -> BucketShape {
        let gradient = |(gradient, at): (&Tensor, usize)| (at, gradient.size(), gradient.stride());
        let gradients = self.gradients.iter().zip(self.offsets()).map(gradient).collect();
        BucketShape { kind: self.kind(), len: self.range.len(), gradients }
    }

    /// Where each gradient begins in it.
    fn offsets(&self) -> impl Iterator<Item = usize> {
        let (start, size) = (self.tensor().data_ptr() as usize, self.kind().elt_size_in_bytes());
        // A gradient without elements has no address.
        let offset = move |gradient: &Tensor| (gradient.data_ptr() as usize).saturating_sub(start) / size;
        self.gradients.iter().map(offset)
    }

    /// All-reduces it where it is.
    #[track_caller]
    pub fn all_reduce(&self, group: &ProcessGroup, op: ReduceOp) -> Result<(), TorchError> {
        self.flat.all_reduce(group, self.range.clone(), op)
    }
}

/// How the gradients lie in a bucket: for each its offset, sizes and strides.
#[derive(Debug, PartialEq)]
pub(crate) struct BucketShape {
    kind: Kind,
    len: usize,
    gradients: Vec<(usize, Vec<i64>, Vec<i64>)>,
}

/// How a bucket is reduced. The default is [`AllReduce`]; compression is another.
///
/// Runs beside backward, on a thread of its own, for one bucket after the other, in the same order on all ranks. Afterwards the
/// bucket must hold the same bits on all ranks: the mean, or what stands for it.
pub trait CommHook: Send {
    /// Reduces the bucket.
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError>;

    /// Whether what it does on a GPU can be recorded in a graph, so that each launch does the same: it reads no values, and decides nothing from
    /// step to step.
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

/// A place in the program.
pub(super) type Site = &'static Location<'static>;

pub(super) enum Job {
    /// The bucket, and on a GPU the mark after which its gradients are in it.
    Reduce(GradBucket, Option<Event>),
    /// Which parameters have a gradient here; becomes: anywhere.
    Flags(Vec<u8>),
}

/// What a job leaves: the flags, if it was those.
pub(super) type Done = Result<Option<Vec<u8>>, ParallelError>;

/// The thread and the way to it. Dropping it ends the thread.
pub(super) struct Lane {
    jobs: Option<Sender<(Site, Job)>>,
    done: Receiver<Done>,
    pending: usize,
    thread: Option<JoinHandle<()>>,
    watch: Watch,
}

impl Lane {
    /// With the stream to work on, for gradients on a GPU.
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

    /// The job's calls name `site`: whoever looks for a stall looks in the program, not here.
    pub(super) fn send(&mut self, site: Site, job: Job) {
        // The thread lives until the sender is dropped.
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send((site, job)).is_ok()) {
            self.pending += 1;
        }
    }

    /// Waits for all that was sent; the flags, if they were sent.
    pub(super) fn wait(&mut self) -> Done {
        let watch = self.watch.clone();
        watch.over(|| self.wait_for_all(), |observer, begin, end| observer.waited(begin, end))
    }

    fn wait_for_all(&mut self) -> Done {
        let mut outcome = Ok(None);
        for _ in 0..std::mem::take(&mut self.pending) {
            let gone = || Err(ParallelError::Unfit("the thread that reduces gradients is gone".into()));
            match (&outcome, self.done.recv().unwrap_or_else(|_| gone())) {
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
            // It has told its errors.
            let _ = thread.join();
        }
    }
}

/// What the thread works with.
struct Worker {
    group: Arc<ProcessGroup>,
    hook: Box<dyn CommHook>,
    watch: Watch,
    stream: Option<Stream>,
}

fn serve(worker: &mut Worker, jobs: &Receiver<(Site, Job)>, results: &Sender<Done>) {
    // Gradients are no business of autograd here.
    let _no_grad = tch::no_grad_guard();
    let entered = worker.stream.map(on_stream).transpose();
    let mut failure: Option<String> = entered.as_ref().err().map(TorchError::to_string);
    for (site, job) in jobs {
        let done = match &failure {
            None => catch_unwind(AssertUnwindSafe(|| on_behalf_of(site, || worker.carry_out(job))))
                .unwrap_or_else(|_| Err(ParallelError::Unfit("a communication hook panicked".into()))),
            Some(cause) => {
                Err(ParallelError::Unfit(format!("gradients are not reduced any more, since: {cause}")))
            }
        };
        if let (None, Err(error)) = (&failure, &done) {
            // The others may be in a call for which this rank will not come.
            worker.group.abort(&error.to_string());
            failure = Some(error.to_string());
        }
        if results.send(done).is_err() {
            return;
        }
    }
}

/// This thread works with the stream's GPU, and no other.
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
