//! A bucket of gradients, the hook that reduces it, and how the lane does that.

use std::ops::Range;
use std::sync::Arc;

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::cuda::{Event, Stream};
use drumline_torch::{HeapTensor, TorchError, tensor_within};
use tch::{Device, Kind, Tensor};

use crate::lane::{Done, Worker};
use crate::observer::{ReducedBucket, Watch};

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

/// A job of the lane.
pub(super) enum Job {
    /// The bucket, and on a GPU the event after which its gradients are in it.
    Reduce(GradBucket, Option<Event>),
    /// Which parameters have a gradient on this rank; the result is: on any rank.
    Flags(Vec<u8>),
}

/// Reduces buckets with a hook.
pub(super) struct BucketWorker {
    pub(super) group: Arc<ProcessGroup>,
    pub(super) hook: Box<dyn CommHook>,
    pub(super) watch: Watch,
    pub(super) stream: Option<Stream>,
}

impl Worker for BucketWorker {
    type Job = Job;

    fn stream(&self) -> Option<Stream> {
        self.stream
    }

    fn abort(&self, cause: &str) {
        self.group.abort(cause);
    }

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
