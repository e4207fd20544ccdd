//! Gradients are sent in 16 bits.
//!
//! ```text
//!   bucket, f32 ─cast─▶ bucket, 16 bits, in the same kind of memory ─▶ the hook inside, e.g. all-reduce ─cast─▶ bucket, f32
//! ```
//! The 16-bit bucket is kept between steps. Means of halves cannot overflow if the halves did not: an all-reduce adds
//! 16-bit elements in `f32`, divides, and rounds once.

use std::collections::BTreeMap;

use drumline_comm::ProcessGroup;
use drumline_torch::TorchError;
use tch::Kind;

use super::Traffic;
use crate::ddp::{AllReduce, BucketShape, CommHook, GradBucket};

/// Casts buckets to 16 bits for an inner hook: by default the mean, or another hook with [`around`](Self::around).
///
/// In `half` a gradient beyond ±65504 becomes infinite; `bf16` has the range of `f32`, but only 8 bits of precision.
#[derive(Debug)]
pub struct Compressed<H = AllReduce> {
    kind: Kind,
    inner: H,
    /// By index of the bucket: its layout, and its 16-bit copy.
    buckets: BTreeMap<usize, (BucketShape, GradBucket)>,
    traffic: Traffic,
}

impl Compressed {
    /// float16, as PyTorch's `fp16_compress_hook`.
    pub fn half() -> Self {
        Self { kind: Kind::Half, inner: AllReduce, buckets: BTreeMap::new(), traffic: Traffic::default() }
    }

    /// bfloat16, as PyTorch's `bf16_compress_hook`.
    pub fn bf16() -> Self {
        Self { kind: Kind::BFloat16, ..Self::half() }
    }

    /// The same for another hook, such as [`PowerSgd`](crate::PowerSgd), which then works on 16-bit buckets.
    pub fn around<H: CommHook>(self, hook: H) -> Compressed<H> {
        Compressed { kind: self.kind, inner: hook, buckets: BTreeMap::new(), traffic: self.traffic }
    }
}

impl<H> Compressed<H> {
    /// Counts the bytes of the buckets, and those of their 16-bit copies.
    pub fn traffic(&self) -> Traffic {
        self.traffic.clone()
    }
}

impl<H: CommHook> CommHook for Compressed<H> {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        if bucket.kind().elt_size_in_bytes() <= self.kind.elt_size_in_bytes() {
            return self.inner.reduce(bucket, group);
        }
        let shape = bucket.shape();
        let mut narrow = match self.buckets.remove(&bucket.index).filter(|(known, _)| *known == shape) {
            Some((_, narrow)) => narrow,
            // The first step, or the buckets have changed, which happens on all ranks in the same step.
            None => bucket.in_kind(group, self.kind)?,
        };
        narrow.num_buckets = bucket.num_buckets;
        narrow.tensor().f_copy_(&bucket.tensor())?;
        self.inner.reduce(&narrow, group)?;
        bucket.tensor().f_copy_(&narrow.tensor())?;
        self.traffic.add(bucket.num_bytes(), narrow.num_bytes());
        self.buckets.insert(bucket.index, (shape, narrow));
        // There may have been more buckets before they changed.
        self.buckets.retain(|index, _| *index < bucket.num_buckets);
        Ok(())
    }

    fn is_recordable(&self) -> bool {
        self.inner.is_recordable()
    }
}
