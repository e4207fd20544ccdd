//! Gradients travel as 16 bits each.
//!
//! ```text
//!   bucket, f32 ─cast─▶ bucket, 16 bits, in the symmetric heap ─▶ the hook inside, e.g. all-reduce ─cast─▶ bucket, f32
//! ```
//! The 16-bit bucket is kept between steps. Sums are made in `f32` on a node, but cross between nodes in 16 bits; so that they
//! cannot overflow there, halves are divided by the number of ranks before and multiplied after.

use std::collections::BTreeMap;

use drumline_comm::ProcessGroup;
use drumline_torch::TorchError;
use tch::Kind;

use super::Traffic;
use crate::ddp::{AllReduce, BucketShape, CommHook, GradBucket};

/// Casts buckets to 16 bits for the hook inside, which is the plain mean unless another is put [around](Self::around).
///
/// A gradient beyond ±65504 becomes infinite as `half`; `bf16` has the range of `f32` but only 8 bits of precision.
#[derive(Debug)]
pub struct Compressed<H = AllReduce> {
    kind: Kind,
    inner: H,
    /// By number of the bucket: how it lies, and its 16-bit form.
    buckets: BTreeMap<usize, (BucketShape, GradBucket)>,
    traffic: Traffic,
}

impl Compressed {
    /// IEEE halves, as PyTorch's `fp16_compress_hook`.
    pub fn half() -> Self {
        Self { kind: Kind::Half, inner: AllReduce, buckets: BTreeMap::new(), traffic: Traffic::default() }
    }

    /// Brain floats, as PyTorch's `bf16_compress_hook`.
    pub fn bf16() -> Self {
        Self { kind: Kind::BFloat16, ..Self::half() }
    }

    /// The same for another hook, such as [`PowerSgd`](crate::PowerSgd), which then works on 16-bit buckets.
    pub fn around<H: CommHook>(self, hook: H) -> Compressed<H> {
        Compressed { kind: self.kind, inner: hook, buckets: BTreeMap::new(), traffic: self.traffic }
    }
}

impl<H> Compressed<H> {
    /// Counts what the hook inside is given to reduce.
    pub fn traffic(&self) -> Traffic {
        self.traffic.clone()
    }

    /// What halves are divided by; the same on all ranks.
    fn divisor(&self, group: &ProcessGroup) -> f64 {
        if self.kind == Kind::Half && group.num_nodes() > 1 { group.size() as f64 } else { 1.0 }
    }

    /// The 16-bit form of a bucket; made anew when the buckets have changed, which they do on all ranks in the same step.
    fn narrow(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        let shape = bucket.shape();
        if self.buckets.get(&bucket.index).is_none_or(|(known, _)| *known != shape) {
            self.buckets.retain(|index, _| *index != bucket.index && *index < bucket.num_buckets);
            let narrow = bucket.in_kind(group, self.kind)?;
            self.buckets.insert(bucket.index, (shape, narrow));
        }
        Ok(())
    }
}

impl<H: CommHook> CommHook for Compressed<H> {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        if bucket.kind().elt_size_in_bytes() <= self.kind.elt_size_in_bytes() {
            return self.inner.reduce(bucket, group);
        }
        self.narrow(bucket, group)?;
        let divisor = self.divisor(group);
        let Some((_, narrow)) = self.buckets.get_mut(&bucket.index) else {
            return Err(TorchError::Unfit("a bucket has a 16-bit form".into()));
        };
        narrow.num_buckets = bucket.num_buckets;
        let mut wide = bucket.tensor();
        if divisor != 1.0 {
            let _ = wide.f_div_scalar_(divisor)?;
        }
        narrow.tensor().f_copy_(&wide)?;
        self.inner.reduce(narrow, group)?;
        self.traffic.add(bucket.num_bytes(), narrow.num_bytes());
        wide.f_copy_(&narrow.tensor())?;
        if divisor != 1.0 {
            let _ = wide.f_mul_scalar_(divisor)?;
        }
        Ok(())
    }
}
