//! The last call of a rank, where its peers can read it even when it is frozen.
//!
//! Only the owner writes, before each call; others read when something went wrong. A reader that finds a half-written record
//! sees two different sequence numbers and reads again. The text of a call site is written when a call is first made from
//! there; later calls only refer to its slot.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::call::{Call, Op, Subject, Trace};
use crate::element::DType;
use crate::reduce::ReduceOp;

/// The longest `file:line` or subject that is kept. Of a longer one the end is kept, since that tells files apart.
const TEXT_BYTES: usize = if cfg!(loom) { 8 } else { 96 };

/// How many call sites are remembered. Loom tries all orders, so there is only one under loom.
const SITES: usize = if cfg!(loom) { 1 } else { 64 };

#[repr(C, align(128))]
pub(crate) struct Record {
    before: AtomicU64,
    kind: AtomicU64,
    count: AtomicU64,
    root: AtomicU64,
    factor: AtomicU64,
    extra: AtomicU64,
    site: AtomicU64,
    after: AtomicU64,
    subject: Text,
    sites: [Text; SITES],
}

#[repr(C)]
struct Text {
    len: AtomicU64,
    words: [AtomicU64; TEXT_BYTES / 8],
}

impl Text {
    fn write(&self, text: &str) {
        let bytes = &text.as_bytes()[text.len().saturating_sub(TEXT_BYTES)..];
        for (word, chunk) in self.words.iter().zip(bytes.chunks(8)) {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        self.len.store(bytes.len() as u64, Ordering::Relaxed);
    }

    fn read(&self) -> String {
        let take = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let len = (take(&self.len) as usize).min(TEXT_BYTES);
        if len == 0 {
            return String::new();
        }
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| take(word).to_le_bytes()).take(len).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// The texts that the owner has written to its record.
#[derive(Debug)]
pub(crate) struct KnownTexts {
    sites: [usize; SITES],
    subject: Option<Subject>,
}

impl Default for KnownTexts {
    fn default() -> Self {
        Self { sites: [0; SITES], subject: None }
    }
}

impl Record {
    /// Records the call.
    #[inline]
    pub(crate) fn write(&self, call: &Call, sequence: u64, known: &mut KnownTexts) {
        let put = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        put(&self.before, sequence);
        fence(Ordering::Release);
        let (reduce, factor) = reduce_code(call.reduce);
        put(&self.kind, call.op as u64 | call.dtype.map_or(0, |dtype| dtype as u64) << 8 | reduce << 16);
        put(&self.count, call.count as u64);
        put(&self.root, call.root.map_or(0, |root| root as u64 + 1));
        put(&self.factor, factor.to_bits());
        put(&self.extra, call.extra);
        put(&self.site, self.slot(call, known) as u64);
        if known.subject != call.subject {
            known.subject = call.subject;
            self.subject.write(call.subject.map_or("", Subject::name));
        }
        self.after.store(sequence, Ordering::Release);
    }

    #[inline]
    fn slot(&self, call: &Call, known: &mut KnownTexts) -> usize {
        let address = std::ptr::from_ref(call.site) as usize;
        // Locations lie next to each other in the binary.
        let slot = address / size_of::<std::panic::Location<'_>>() % SITES;
        if known.sites[slot] != address {
            known.sites[slot] = address;
            self.write_site(slot, call);
        }
        slot
    }

    #[cold]
    fn write_site(&self, slot: usize, call: &Call) {
        self.sites[slot].write(&format!("{}:{}", call.site.file(), call.site.line()));
    }

    /// The number of the last recorded call.
    pub(crate) fn sequence(&self) -> u64 {
        self.after.load(Ordering::Relaxed)
    }

    /// The last recorded call.
    pub(crate) fn read(&self) -> Trace {
        for _ in 0..1000 {
            if let Some(trace) = self.read_whole() {
                return trace;
            }
            std::hint::spin_loop();
        }
        self.read_once(self.after.load(Ordering::Acquire))
    }

    /// The last call, unless the owner is just writing it.
    fn read_whole(&self) -> Option<Trace> {
        let after = self.after.load(Ordering::Acquire);
        let trace = self.read_once(after);
        // A reader that has seen a word of a later call also sees that call's number in `before`.
        fence(Ordering::Acquire);
        (self.before.load(Ordering::Relaxed) == after).then_some(trace)
    }

    fn read_once(&self, sequence: u64) -> Trace {
        let take = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let kind = take(&self.kind);
        let site = &self.sites[take(&self.site) as usize % SITES];
        let call = Call {
            op: Op::from_code(kind as u8).unwrap_or(Op::Barrier),
            dtype: DType::from_code((kind >> 8) as u8),
            count: take(&self.count) as usize,
            reduce: reduce_of((kind >> 16) as u8, f64::from_bits(take(&self.factor))),
            root: (take(&self.root) as usize).checked_sub(1),
            extra: take(&self.extra),
            subject: None,
            site: std::panic::Location::caller(),
        };
        Trace { sequence, what: call.to_text(&self.subject.read()), site: site.read() }
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
    use crate::shm::segment::{Segment, create};

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let fd = create(size_of::<Record>()).unwrap();
        let segment = Segment::map(&fd, size_of::<Record>()).unwrap();
        // SAFETY: fresh zeroed memory, aligned to a page; all-zero is a valid record of atomics.
        let record = unsafe { segment.at(0, size_of::<Record>()).cast::<Record>().as_ref() };
        assert_eq!(record.read().to_string(), "no call yet");
        let call = Call::new(Op::Reduce).of(DType::F16, 99).reduce(ReduceOp::PreMulSum(0.5)).root(3);
        let mut known = KnownTexts::default();
        record.write(&call, 12, &mut known);
        assert_eq!(record.read(), call.trace(12));
        let elsewhere = Call::new(Op::Barrier);
        record.write(&elsewhere, 13, &mut known);
        assert_eq!(record.read(), elsewhere.trace(13));
        record.write(&call, 14, &mut known);
        assert_eq!(record.read(), call.trace(14));
        let about_a_layer = Call { subject: Some(Subject::new("h.3")), ..call };
        record.write(&about_a_layer, 15, &mut known);
        assert_eq!(record.read(), about_a_layer.trace(15));
        record.write(&call, 16, &mut known);
        assert_eq!(record.read(), call.trace(16));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::shm::line::loom_cells::model;

    fn record() -> Record {
        let word = || AtomicU64::new(0);
        let text = || Text { len: word(), words: std::array::from_fn(|_| word()) };
        Record {
            before: word(),
            kind: word(),
            count: word(),
            root: word(),
            factor: word(),
            extra: word(),
            site: word(),
            after: word(),
            subject: text(),
            sites: std::array::from_fn(|_| text()),
        }
    }

    fn first() -> Call {
        Call::new(Op::Reduce).of(DType::F16, 99).root(3)
    }

    fn second() -> Call {
        Call::new(Op::Broadcast).of(DType::U8, 5).root(1)
    }

    fn texts(trace: &Trace) -> (u64, String) {
        (trace.sequence, trace.what.clone())
    }

    /// What a reader may see while `write` notes two calls, the second over the first.
    fn watch(write: fn(&Record)) {
        model(2, move || {
            let record = loom::sync::Arc::new(record());
            let none = record.read_once(0);
            let theirs = record.clone();
            let writer = loom::thread::spawn(move || write(&theirs));
            let seen = record.read_whole();
            writer.join().unwrap();
            let Some(seen) = seen else { return };
            let whole = [none, first().trace(1), second().trace(2)];
            assert!(whole.iter().any(|call| texts(call) == texts(&seen)), "half of each: {seen}");
        });
    }

    #[test]
    fn loom_a_record_is_seen_whole_or_not_at_all() {
        watch(|record| {
            let mut known = KnownTexts::default();
            record.write(&first(), 1, &mut known);
            record.write(&second(), 2, &mut known);
        });
    }

    /// The control: a writer that does not first write the number of the call.
    #[test]
    #[should_panic(expected = "half of each")]
    fn loom_finds_a_record_without_its_first_number() {
        watch(|record| {
            let mut known = KnownTexts::default();
            record.write(&first(), 1, &mut known);
            record.count.store(second().count as u64, Ordering::Relaxed);
            record.before.store(2, Ordering::Relaxed);
            record.after.store(2, Ordering::Release);
        });
    }
}
