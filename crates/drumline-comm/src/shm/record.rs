//! The last call of a rank, where its peers can read it even when it is frozen.
//!
//! Only the owner writes, before each call; others read when something went wrong. A reader that meets a half-written
//! record sees two different sequence numbers and looks again.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::call::{Call, Op, Trace};
use crate::element::DType;
use crate::reduce::ReduceOp;

/// Longest `file:line` kept; the end of a longer one is kept, since that tells files apart.
const SITE_BYTES: usize = 96;

#[repr(C, align(128))]
pub(crate) struct Record {
    before: AtomicU64,
    kind: AtomicU64,
    count: AtomicU64,
    root: AtomicU64,
    factor: AtomicU64,
    extra: AtomicU64,
    site_len: AtomicU64,
    site: [AtomicU64; SITE_BYTES / 8],
    after: AtomicU64,
}

impl Record {
    /// Notes the call; `new_site` says whether the place in the program differs from that of the call before.
    #[inline]
    pub(crate) fn write(&self, call: &Call, sequence: u64, new_site: bool) {
        let put = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        put(&self.before, sequence);
        fence(Ordering::Release);
        let (reduce, factor) = reduce_code(call.reduce);
        put(&self.kind, call.op as u64 | call.dtype.map_or(0, |dtype| dtype as u64) << 8 | reduce << 16);
        put(&self.count, call.count as u64);
        put(&self.root, call.root.map_or(0, |root| root as u64 + 1));
        put(&self.factor, factor.to_bits());
        put(&self.extra, call.extra);
        if new_site {
            self.write_site(call);
        }
        self.after.store(sequence, Ordering::Release);
    }

    #[cold]
    fn write_site(&self, call: &Call) {
        let text = format!("{}:{}", call.site.file(), call.site.line());
        let bytes = &text.as_bytes()[text.len().saturating_sub(SITE_BYTES)..];
        for (word, chunk) in self.site.iter().zip(bytes.chunks(8)) {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        self.site_len.store(bytes.len() as u64, Ordering::Relaxed);
    }

    /// The last call noted here.
    pub(crate) fn read(&self) -> Trace {
        for _ in 0..1000 {
            let after = self.after.load(Ordering::Acquire);
            let trace = self.read_once(after);
            fence(Ordering::Acquire);
            if self.before.load(Ordering::Relaxed) == after {
                return trace;
            }
            std::hint::spin_loop();
        }
        self.read_once(self.after.load(Ordering::Acquire))
    }

    fn read_once(&self, sequence: u64) -> Trace {
        let take = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let kind = take(&self.kind);
        let len = (take(&self.site_len) as usize).min(SITE_BYTES);
        let bytes: Vec<u8> = self.site.iter().flat_map(|word| take(word).to_le_bytes()).take(len).collect();
        let call = Call {
            op: Op::from_code(kind as u8).unwrap_or(Op::Barrier),
            dtype: DType::from_code((kind >> 8) as u8),
            count: take(&self.count) as usize,
            reduce: reduce_of((kind >> 16) as u8, f64::from_bits(take(&self.factor))),
            root: (take(&self.root) as usize).checked_sub(1),
            extra: take(&self.extra),
            site: std::panic::Location::caller(),
        };
        Trace { sequence, what: call.to_string(), site: String::from_utf8_lossy(&bytes).into_owned() }
    }
}

const REDUCTIONS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

#[inline]
fn reduce_code(op: Option<ReduceOp>) -> (u64, f64) {
    match op {
        None => (0, 0.0),
        Some(ReduceOp::PreMulSum(factor)) => (9, factor),
        Some(plain) => (plain.code(), 0.0),
    }
}

fn reduce_of(code: u8, factor: f64) -> Option<ReduceOp> {
    match code {
        9 => Some(ReduceOp::PreMulSum(factor)),
        plain => REDUCTIONS.get(usize::from(plain).checked_sub(1)?).copied(),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::{Pages, Segment, create};

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let fd = create(4096, Pages::WhenTouched).unwrap();
        let segment = Segment::map(&fd, 4096, Pages::WhenTouched).unwrap();
        // SAFETY: fresh zeroed memory, aligned to a page; all-zero is a valid record of atomics.
        let record = unsafe { segment.at(0, size_of::<Record>()).cast::<Record>().as_ref() };
        assert_eq!(record.read().to_string(), "no call yet");
        let call = Call::new(Op::Reduce).of(DType::F16, 99).reduce(ReduceOp::PreMulSum(0.5)).root(3);
        record.write(&call, 12, true);
        assert_eq!(record.read(), call.trace(12));
        record.write(&call.reduce(ReduceOp::Max), 13, false);
        assert_eq!(record.read(), call.reduce(ReduceOp::Max).trace(13));
    }
}
