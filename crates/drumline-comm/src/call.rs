//! A call: what a rank asked its group to do, and where in its program.
//!
//! Ranks must make the same calls in the same order. Each call has a **fingerprint**, a 64-bit number that rides beside
//! the data and is compared on arrival; when two differ, the full calls are looked up and both are shown. The place in
//! the program is shown but not compared: two branches may rightly make the same call.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::element::DType;
use crate::reduce::ReduceOp;

/// Makes [`Op`] of the one list of operations and their names. A code is a place in the list, counted from 1.
macro_rules! operations {
    ($first:ident => $first_name:literal, $($op:ident => $name:literal,)*) => {
        /// What a rank can ask of its group.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum Op {
            $first = 1,
            $($op,)*
        }

        impl Op {
            const ALL: &[Self] = &[Self::$first, $(Self::$op,)*];

            /// The name of the function, as in `all_reduce`.
            pub fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$op => $name,)*
                }
            }
        }
    };
}

operations! {
    AllReduce => "all_reduce",
    Broadcast => "broadcast",
    Reduce => "reduce",
    Gather => "gather",
    AllGather => "all_gather",
    Scatter => "scatter",
    ReduceScatter => "reduce_scatter",
    AllToAll => "all_to_all",
    Barrier => "barrier",
    MonitoredBarrier => "monitored_barrier",
    Send => "send",
    Recv => "recv",
    Batch => "batch",
    HeapAlloc => "heap_alloc",
    SharedAlloc => "shared_alloc",
    NewGroup => "new_group",
    Split => "split",
}

impl Op {
    /// The number of operations.
    pub(crate) const NUM: usize = Self::ALL.len();

    /// Its place among all operations.
    pub(crate) fn index(self) -> usize {
        self as usize - 1
    }

    /// The operation with this code, if there is one.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

thread_local! {
    /// The call site that calls of this thread report, if a library has set one with [`on_behalf_of`].
    static ON_BEHALF_OF: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// The place in the program that errors about this call name: the one set by [`on_behalf_of`], or else the caller.
#[track_caller]
pub fn call_site() -> &'static Location<'static> {
    let caller = Location::caller();
    ON_BEHALF_OF.get().unwrap_or(caller)
}

/// Runs `body`; the calls that it makes on this thread report `site` as their call site. For libraries that make calls for
/// their caller, perhaps on a thread of their own. If it is nested, the outermost site counts.
///
/// ```
/// use drumline_comm::{LocalGroup, ProcessGroup, CommError, call_site, on_behalf_of};
///
/// #[track_caller]
/// fn meet(group: &ProcessGroup) -> Result<(), CommError> {
///     let site = call_site();
///     // An error names the caller of `meet`.
///     on_behalf_of(site, || (0..3).try_for_each(|_| group.barrier()))
/// }
/// LocalGroup::run(2, |group| meet(&group))?;
/// # Ok::<(), CommError>(())
/// ```
pub fn on_behalf_of<R>(site: &'static Location<'static>, body: impl FnOnce() -> R) -> R {
    struct Before(Option<&'static Location<'static>>);
    impl Drop for Before {
        fn drop(&mut self) {
            ON_BEHALF_OF.set(self.0);
        }
    }
    let before = Before(ON_BEHALF_OF.get());
    ON_BEHALF_OF.set(before.0.or(Some(site)));
    body()
}

/// What calls are about, such as a layer of a model. It is part of the fingerprint: ranks that make equal calls about
/// different subjects get an error that names both.
///
/// ```
/// use drumline_comm::{GroupOptions, LocalGroup, Subject, about};
///
/// let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| {
///     let layer = Subject::new(if group.rank() == 0 { "layer 3" } else { "layer 4" });
///     about(layer, || group.all_gather(&[1f32], &mut [0.0; 2]))
/// });
/// for outcome in outcomes {
///     let error = outcome.unwrap_err().to_string();
///     assert!(error.contains("all_gather(1 f32, layer 3)") && error.contains("all_gather(1 f32, layer 4)"));
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject(&'static Name);

/// A name, and a number that stands for it in fingerprints.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    text: String,
    hash: u64,
}

impl Subject {
    /// A subject with this name. Names are kept until the process ends, each once.
    pub fn new(name: &str) -> Self {
        static NAMES: Mutex<BTreeMap<String, &'static Name>> = Mutex::new(BTreeMap::new());
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(name) {
            return Self(known);
        }
        let hash = name.bytes().fold(0x9e37, |hash, byte| mix(hash ^ u64::from(byte)));
        let kept: &'static Name = Box::leak(Box::new(Name { text: name.to_owned(), hash }));
        names.insert(name.to_owned(), kept);
        Self(kept)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        &self.0.text
    }
}

thread_local! {
    /// The subject of this thread's calls, if a library has set one with [`about`].
    static ABOUT: Cell<Option<Subject>> = const { Cell::new(None) };
}

/// Runs `body`; the calls that it makes on this thread are about `subject`.
pub fn about<R>(subject: Subject, body: impl FnOnce() -> R) -> R {
    struct Before(Option<Subject>);
    impl Drop for Before {
        fn drop(&mut self) {
            ABOUT.set(self.0);
        }
    }
    let _before = Before(ABOUT.replace(Some(subject)));
    body()
}

/// One call on one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) dtype: Option<DType>,
    pub(crate) count: usize,
    pub(crate) reduce: Option<ReduceOp>,
    /// The root of a collective, the other rank of a message.
    pub(crate) root: Option<usize>,
    /// A hash of what else must agree: uneven counts, the ranks of a new group. The tag of a message.
    pub(crate) extra: u64,
    pub(crate) subject: Option<Subject>,
    pub(crate) site: &'static Location<'static>,
}

impl Call {
    #[track_caller]
    pub(crate) fn new(op: Op) -> Self {
        let subject = ABOUT.get();
        Self { op, dtype: None, count: 0, reduce: None, root: None, extra: 0, subject, site: call_site() }
    }

    pub(crate) fn of(self, dtype: DType, count: usize) -> Self {
        Self { dtype: Some(dtype), count, ..self }
    }

    pub(crate) fn reduce(self, op: ReduceOp) -> Self {
        Self { reduce: Some(op), ..self }
    }

    pub(crate) fn root(self, root: usize) -> Self {
        Self { root: Some(root), ..self }
    }

    pub(crate) fn extra(self, numbers: impl IntoIterator<Item = usize>) -> Self {
        Self { extra: numbers.into_iter().fold(0x9e37, |hash, number| mix(hash ^ number as u64)), ..self }
    }

    /// Equal on ranks that make the same call as their `sequence`-th, different otherwise.
    #[inline]
    pub(crate) fn fingerprint(&self, sequence: u64) -> u64 {
        let kind = self.op as u64
            | self.dtype.map_or(0, |dtype| dtype as u64) << 8
            | self.root.map_or(0, |root| root as u64 + 1) << 16;
        let reduce = self.reduce.map_or(0, ReduceOp::code);
        // Odd factors keep each part's bits apart; the last step spreads them.
        mix(kind.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ sequence.wrapping_mul(0xc2b2_ae3d_27d4_eb4f)
            ^ (self.count as u64).wrapping_mul(0x1656_67b1_9e37_79f9).rotate_left(23)
            ^ reduce.wrapping_mul(0x27d4_eb2f_1656_67c5).rotate_left(41)
            ^ self.subject.map_or(0, |subject| subject.0.hash.rotate_left(11))
            ^ self.extra)
    }

    /// The call in text form: shown in errors, and sent when another rank asks for this rank's last call.
    pub(crate) fn trace(&self, sequence: u64) -> Trace {
        Trace { sequence, what: self.to_string(), site: format!("{}:{}", self.site.file(), self.site.line()) }
    }
}

/// Spreads every bit over all bits (the finaliser of the splitmix64 generator).
#[inline]
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, self.subject.map_or("", Subject::name))
    }
}

/// A call that is about a subject of another process.
struct About<'a>(&'a Call, &'a str);

impl fmt::Display for About<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(f, self.1)
    }
}

impl Call {
    /// The call, if it is about a subject with this name.
    pub(crate) fn to_text(self, subject: &str) -> String {
        About(&self, subject).to_string()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, subject: &str) -> fmt::Result {
        write!(f, "{}(", self.op)?;
        if self.op == Op::Batch {
            return write!(f, "{} messages)", self.count);
        }
        let mut separator = "";
        if let Some(dtype) = self.dtype {
            write!(f, "{} {dtype}", self.count)?;
            separator = ", ";
        }
        if let Some(reduce) = self.reduce {
            write!(f, "{separator}{reduce}")?;
            separator = ", ";
        }
        if let Op::Send | Op::Recv = self.op {
            return self.write_peer(f, separator);
        }
        if let Some(root) = self.root {
            write!(f, "{separator}root {root}")?;
            separator = ", ";
        }
        if self.extra != 0 {
            write!(f, "{separator}lists {:04x}", self.extra & 0xffff)?;
            separator = ", ";
        }
        if !subject.is_empty() {
            write!(f, "{separator}{subject}")?;
        }
        f.write_str(")")
    }
}

impl Call {
    /// Writes the other rank of a message, and the closing bracket.
    fn write_peer(&self, f: &mut fmt::Formatter<'_>, separator: &str) -> fmt::Result {
        let direction = if self.op == Op::Send { "to" } else { "from" };
        match self.root {
            Some(rank) => write!(f, "{separator}{direction} {rank}, tag {})", self.extra),
            None => write!(f, "{separator}{direction} any rank, tag {})", self.extra),
        }
    }
}

/// A call in text form: `all_reduce(1024 f32, sum) #12 at src/train.rs:91`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The number of the call: the rank's calls on this group, counted from 1. Messages and collectives are counted apart.
    pub sequence: u64,
    /// The call and its arguments.
    pub what: String,
    /// `file:line` of the caller.
    pub site: String,
}

impl Trace {
    /// For a rank that has made no call.
    pub(crate) fn none() -> Self {
        Self { sequence: 0, what: String::new(), site: String::new() }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.sequence == 0 {
            return f.write_str("no call yet");
        }
        write!(f, "{} #{} at {}", self.what, self.sequence, self.site)
    }
}

/// A collective that has not returned yet: `all_reduce(1024 f32, sum) #12 of world at src/train.rs:91`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OngoingCall {
    /// The group's name.
    pub group: String,
    /// The call.
    pub call: Trace,
}

impl fmt::Display for OngoingCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trace { sequence, what, site } = &self.call;
        write!(f, "{what} #{sequence} of {} at {site}", self.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_difference_changes_the_fingerprint() {
        let call = Call::new(Op::AllReduce).of(DType::F32, 1024).reduce(ReduceOp::Sum);
        let variants = [
            call.fingerprint(1),
            call.fingerprint(2),
            Call { op: Op::Broadcast, ..call }.fingerprint(1),
            call.of(DType::F64, 1024).fingerprint(1),
            call.of(DType::F32, 1025).fingerprint(1),
            call.reduce(ReduceOp::Max).fingerprint(1),
            call.reduce(ReduceOp::PreMulSum(0.5)).fingerprint(1),
            call.reduce(ReduceOp::PreMulSum(0.25)).fingerprint(1),
            call.root(0).fingerprint(1),
            call.root(1).fingerprint(1),
            call.extra([1, 2]).fingerprint(1),
            call.extra([2, 1]).fingerprint(1),
            Call { subject: Some(Subject::new("h.0")), ..call }.fingerprint(1),
            Call { subject: Some(Subject::new("h.1")), ..call }.fingerprint(1),
        ];
        assert_eq!(variants.iter().collect::<HashSet<_>>().len(), variants.len());
        let elsewhere = Call::new(Op::AllReduce).of(DType::F32, 1024).reduce(ReduceOp::Sum);
        assert_eq!(elsewhere.fingerprint(1), call.fingerprint(1), "the place in the program is not compared");
    }

    #[test]
    fn codes_read_back() {
        for op in Op::ALL {
            assert_eq!(Op::from_code(*op as u8), Some(*op));
        }
        assert_eq!([0, Op::ALL.len() as u8 + 1].map(Op::from_code), [None, None]);
    }

    #[test]
    fn a_call_names_the_place_that_it_is_made_for() {
        let line = |call: Call| call.site.line();
        let outer = call_site();
        let inner = call_site();
        let [own, for_outer, nested] = on_behalf_of(outer, || {
            let nested = on_behalf_of(inner, || Call::new(Op::Barrier));
            [call_site(), Call::new(Op::Barrier).site, nested.site].map(Location::line)
        });
        assert_eq!([own, for_outer, nested], [outer.line(); 3], "the outermost counts");
        let unwound = std::panic::catch_unwind(|| on_behalf_of(outer, || panic!("on purpose")));
        assert!(unwound.is_err());
        assert_eq!(line(Call::new(Op::Barrier)), line!(), "and only while it lasts");
    }

    #[test]
    fn calls_are_formatted_for_people() {
        let call = Call::new(Op::Reduce).of(DType::Bf16, 3).reduce(ReduceOp::Avg).root(2);
        let text = call.trace(7).to_string();
        assert!(text.starts_with("reduce(3 bf16, avg, root 2) #7 at "), "{text}");
        assert!(text.contains("call.rs:"), "{text}");
        let send = Call { extra: 7, ..Call::new(Op::Send).of(DType::U8, 4).root(2) };
        assert_eq!(send.to_string(), "send(4 u8, to 2, tag 7)");
        let recv = Call { op: Op::Recv, root: None, ..send };
        assert_eq!(recv.to_string(), "recv(4 u8, from any rank, tag 7)");
        assert_eq!(Call { count: 3, ..Call::new(Op::Batch) }.to_string(), "batch(3 messages)");
    }
}
