//! Collectives of ranks that all share one GPU: each rank has a window of its memory, which the others read (CUDA IPC).
//!
//! ```text
//!   rank 0   tensor ─▶ window 0 ─┐ arrived 0      ┌─▶ sum of windows 0 and 1 ─▶ tensor   taken 0
//!                                ├─ hosts agree ──┤
//!   rank 1   tensor ─▶ window 1 ─┘ arrived 1      └─▶ sum of windows 0 and 1 ─▶ tensor   taken 1
//! ```
//! Nothing leaves the GPU. Copies and sums are queued, and the streams of the ranks wait for each other by flags in host
//! memory: `arrived` before a window is read, `taken` before it is filled again. A window has two halves, so that one is
//! filled while the other is read.
//!
//! Hosts agree on each piece before they queue waits for it. So a stream only waits for work that another rank has queued,
//! and waits cannot form a circle, whichever streams the GPU carries out one after the other. If the group fails, the host
//! raises all flags: no GPU waits for a rank that is gone.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_comm::{CommError, ExternalCall, GroupStatus, Op, ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::over_nccl::{check_count, check_root};
use super::resident::Resident;
use crate::cuda::{Flags, Priority, Stream, Window, WindowHandle};
use crate::error::TorchError;
use crate::memory::node_shared;
use crate::nccl::{Watched, enlist};
use crate::recordable::{HostRoute, NotRecordable};

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Bytes of half a window, and so of a piece.
const HALF: usize = 32 << 20;

const NUM_HALVES: u32 = 2;

/// How often a thread looks whether the group has failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// How long the end of a group waits for ranks that still read this rank's window.
const FAREWELL: Duration = Duration::from_secs(5);

/// When the group fails, flags are raised so far beyond the count, past all that a stream waits for.
const RAISED: u32 = 1 << 30;

/// Flags are a page of host memory, which can be pinned.
const NUM_FLAGS: usize = 1024;

/// The windows of a group on one GPU.
#[derive(Debug)]
pub(super) struct Windows {
    /// Why NCCL is not used.
    reason: HostRoute,
    device: usize,
    rank: usize,
    size: usize,
    stream: Stream,
    /// Held during a call.
    gate: Mutex<()>,
    /// The number of pieces so far.
    count: Arc<AtomicU32>,
    /// Each rank's window.
    windows: Vec<Window>,
    flags: Arc<Flags>,
    release: Release,
}

/// What other ranks learn about a rank's window. Errors cross processes as text.
#[derive(Debug, Serialize, Deserialize)]
enum Made {
    Window(Vec<u8>),
    Failed(String),
}

impl Windows {
    /// Makes this rank's window and opens the others'. All ranks of the group call it together. `None` on all ranks, with
    /// the reason in the log, if one of them cannot.
    #[track_caller]
    pub(super) fn new(group: &ProcessGroup, device: usize, reason: HostRoute) -> Result<Option<Self>> {
        if 2 * group.size() > NUM_FLAGS {
            return Ok(None);
        }
        let memory = node_shared(group, Kind::Int, NUM_FLAGS, &[])?;
        let made = Flags::new(memory).and_then(|flags| Ok((flags, Window::new(device, 2 * HALF)?)));
        let own = match &made {
            Ok((_, (_, handle))) => Made::Window(handle.to_vec()),
            Err(error) => Made::Failed(error.to_string()),
        };
        let all = group.all_gather_object(&own)?;
        let opened = made.and_then(|(flags, (own, _))| Ok((flags, open_all(group, device, own, &all)?)));
        let failure = opened.as_ref().err().map(ToString::to_string);
        let failures = group.all_gather_object(&failure)?;
        if let Some((rank, why)) =
            failures.iter().enumerate().find_map(|(rank, why)| Some((rank, why.as_ref()?)))
        {
            tracing::debug!(rank, why, "ranks that share a GPU cannot share its memory");
            return Ok(None);
        }
        let (flags, windows) = opened?;
        let (flags, stream) = (Arc::new(flags), Stream::new(device, Priority::High)?);
        let (rank, size, count) = (group.rank(), group.size(), Arc::new(AtomicU32::new(0)));
        let release = Release::new(flags.clone(), 2 * size, count.clone(), group.status())?;
        let gate = Mutex::new(());
        Ok(Some(Self { reason, device, rank, size, stream, gate, count, windows, flags, release }))
    }

    /// Why calls cannot be recorded in a CUDA graph.
    pub(super) fn not_recordable(&self) -> NotRecordable {
        NotRecordable::HostsAgree(self.reason.clone())
    }

    /// All-reduces each tensor. Returns false if the host must do it.
    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        if !tensors.iter().all(|tensor| can_reduce(tensor, op)) {
            return Ok(false);
        }
        for tensor in tensors {
            let all = Resident::write(tensor, self.device)?;
            let call = ExternalCall::new(Op::AllReduce, all.carried.dtype, all.span().count).reduce(op);
            let flat = all.flat()?;
            let fill = |piece: &Piece| piece.fill(self.rank, &piece.of(&flat)?);
            let take = |piece: &Piece| reduce_into(&piece.of(&flat)?, &piece.windows, op);
            self.in_pieces(group, call, &flat, 1, &Acts { fill, take })?;
            all.finish()?;
        }
        Ok(true)
    }

    /// Broadcasts each tensor.
    #[track_caller]
    pub(super) fn broadcast(&self, group: &ProcessGroup, tensors: &[Tensor], root: usize) -> Result {
        check_root(group, root)?;
        for tensor in tensors {
            let all = Resident::write(tensor, self.device)?;
            let call = ExternalCall::new(Op::Broadcast, all.carried.dtype, all.span().count).root(root);
            let bytes = all.bytes()?;
            let is_root = self.rank == root;
            let fill = |piece: &Piece| if is_root { piece.fill(root, &piece.of(&bytes)?) } else { Ok(()) };
            let take = |piece: &Piece| if is_root { Ok(()) } else { piece.take(root, &piece.of(&bytes)?) };
            self.in_pieces(group, call, &bytes, 1, &Acts { fill, take })?;
            all.finish()?;
        }
        Ok(())
    }

    /// `output` becomes all ranks' `input`, in rank order.
    #[track_caller]
    pub(super) fn all_gather(&self, group: &ProcessGroup, output: &Resident, input: &Resident) -> Result {
        let (from, to) = (input.span(), output.span());
        check_count("output", to.count, from.count * self.size)?;
        let call = ExternalCall::new(Op::AllGather, from.dtype, from.count);
        let (own, all) = (input.bytes()?, output.bytes()?.f_view([self.size as i64, -1])?);
        let fill = |piece: &Piece| piece.fill(self.rank, &piece.of(&own)?);
        let take = |piece: &Piece| {
            (0..self.size).try_for_each(|rank| piece.take(rank, &piece.of(&all.f_select(0, rank as i64)?)?))
        };
        self.in_pieces(group, call, &own, 1, &Acts { fill, take })
    }

    /// `output` becomes this rank's part of the reduction of all `input`s.
    #[track_caller]
    pub(super) fn reduce_scatter(
        &self,
        group: &ProcessGroup,
        output: &Resident,
        input: &Resident,
        op: ReduceOp,
    ) -> Result {
        let (from, to) = (input.span(), output.span());
        check_count("input", from.count, to.count * self.size)?;
        let call = ExternalCall::new(Op::ReduceScatter, from.dtype, from.count).reduce(op);
        let (parts, own) = (input.flat()?.f_view([self.size as i64, -1])?, output.flat()?);
        let divided = |window: &Tensor| window.f_view([self.size as i64, -1]);
        let fill = |piece: &Piece| {
            divided(&piece.windows[self.rank])?.f_copy_(&parts.f_narrow(1, piece.start, piece.len)?)?;
            Ok(())
        };
        let take = |piece: &Piece| {
            let own_part = |window| Ok(divided(window)?.f_select(0, self.rank as i64)?);
            let windows = piece.windows.iter().map(own_part).collect::<Result<Vec<_>>>()?;
            reduce_into(&piece.of(&own)?, &windows, op)
        };
        self.in_pieces(group, call, &own, self.size, &Acts { fill, take })
    }

    /// Carries out a call in pieces of `flat`: each fills this rank's window, and takes from all windows what it needs. A
    /// window holds `times` as many elements as a piece.
    fn in_pieces(
        &self,
        group: &ProcessGroup,
        call: ExternalCall,
        flat: &Tensor,
        times: usize,
        acts: &Acts<impl Fn(&Piece) -> Result, impl Fn(&Piece) -> Result>,
    ) -> Result {
        let (total, kind) = (flat.size1()?, flat.f_kind()?);
        let current = Stream::current(self.device)?;
        if current.is_recording()? {
            return Err(self.not_recordable().into());
        }
        let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if total == 0 {
            return Ok(group.agree_on(call)?);
        }
        let _no_grad = tch::no_grad_guard();
        self.stream.wait_for_stream(current)?;
        let on_stream = self.stream.enter()?;
        let longest = HALF / kind.elt_size_in_bytes() / times;
        for start in (0..total).step_by(longest) {
            let count = self.count.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
            let len = (longest as i64).min(total - start);
            let windows = self.halves(count, kind, len * times as i64)?;
            self.carry(group, call, count, &Piece { start, len, windows }, acts).map_err(
                |error| match error {
                    // The other ranks would wait for this one.
                    TorchError::Comm(_) => error,
                    other => group.abort(&other.to_string()).into(),
                },
            )?;
        }
        drop(on_stream);
        current.wait_for_stream(self.stream)
    }

    fn carry(
        &self,
        group: &ProcessGroup,
        call: ExternalCall,
        count: u32,
        piece: &Piece,
        acts: &Acts<impl Fn(&Piece) -> Result, impl Fn(&Piece) -> Result>,
    ) -> Result {
        let others = || (0..self.size).filter(|rank| *rank != self.rank);
        others().try_for_each(|rank| self.wait(taken(rank), count.wrapping_sub(NUM_HALVES)))?;
        (acts.fill)(piece)?;
        self.flags.write(self.stream, arrived(self.rank), count)?;
        group.agree_on(call)?;
        others().try_for_each(|rank| self.wait(arrived(rank), count))?;
        (acts.take)(piece)?;
        self.flags.write(self.stream, taken(self.rank), count)
    }

    fn wait(&self, flag: usize, count: u32) -> Result {
        self.flags.wait(self.stream, flag, count)
    }

    /// The first `len` elements of the half of each window that a piece uses.
    fn halves(&self, count: u32, kind: Kind, len: i64) -> Result<Vec<Tensor>> {
        let start = (count % NUM_HALVES) as usize * HALF;
        let half = |window: &Window| {
            let bytes = window.bytes.f_narrow(0, start as i64, len * kind.elt_size_in_bytes() as i64)?;
            Ok(bytes.f_view_dtype(kind)?)
        };
        self.windows.iter().map(half).collect()
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        // Other ranks may still read this rank's window.
        let count = self.count.load(Ordering::Acquire);
        let is_taken = || (0..self.size).all(|rank| self.flags.has_reached(taken(rank), count));
        let deadline = Instant::now() + FAREWELL;
        while !is_taken() && !self.release.has_failed() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What a call does with each piece.
struct Acts<F, T> {
    /// Fills this rank's window.
    fill: F,
    /// Takes what this rank needs from all windows.
    take: T,
}

/// A part of a call, with the windows' elements of it.
struct Piece {
    start: i64,
    len: i64,
    windows: Vec<Tensor>,
}

impl Piece {
    /// Its elements of a tensor.
    fn of(&self, flat: &Tensor) -> Result<Tensor> {
        Ok(flat.f_narrow(0, self.start, self.len)?)
    }

    fn fill(&self, rank: usize, from: &Tensor) -> Result {
        Ok(self.windows[rank].shallow_clone().f_copy_(from)?)
    }

    fn take(&self, rank: usize, into: &Tensor) -> Result {
        Ok(into.shallow_clone().f_copy_(&self.windows[rank])?)
    }
}

/// Opens the windows of the others. The result has all ranks' windows.
fn open_all(group: &ProcessGroup, device: usize, own: Window, all: &[Made]) -> Result<Vec<Window>> {
    let mut own = Some(own);
    let open = |(rank, made): (usize, &Made)| match (own.take_if(|_| rank == group.rank()), made) {
        (Some(own), _) => Ok(own),
        (None, Made::Window(handle)) => {
            let handle: WindowHandle = handle[..]
                .try_into()
                .map_err(|_| TorchError::Internal { what: "a window's handle does not have 64 bytes" })?;
            Window::open(device, &handle, 2 * HALF)
        }
        (None, Made::Failed(why)) => Err(TorchError::Library {
            operation: "another rank cannot share its GPU memory",
            message: why.clone(),
        }),
    };
    all.iter().enumerate().map(open).collect()
}

/// The flag by which a rank says that its window is filled.
fn arrived(rank: usize) -> usize {
    2 * rank
}

/// The flag by which a rank says that it has taken what it needs.
fn taken(rank: usize) -> usize {
    2 * rank + 1
}

/// Whether the GPU reduces such a tensor. All ranks pass the same type, and so decide alike.
pub(super) fn can_reduce(tensor: &Tensor, op: ReduceOp) -> bool {
    let is_float = matches!(tensor.f_kind(), Ok(Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16));
    is_float && !matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor)
}

/// The reduction of all ranks' elements, in rank order.
fn reduce_into(out: &Tensor, parts: &[Tensor], op: ReduceOp) -> Result {
    let [first, second, rest @ ..] = parts else {
        return Err(TorchError::Internal { what: "a window for each of several ranks" });
    };
    let add = |a: &Tensor, b: &Tensor| match op {
        ReduceOp::Max => a.f_maximum_out(out, b),
        ReduceOp::Min => a.f_minimum_out(out, b),
        ReduceOp::Prod => a.f_mul_out(out, b),
        _ => a.f_add_out(out, b),
    };
    let _ = add(first, second)?;
    for part in rest {
        let _ = add(out, part)?;
    }
    let mut out = out.shallow_clone();
    match op {
        ReduceOp::Avg => drop(out.f_div_scalar_(parts.len() as i64)?),
        ReduceOp::PreMulSum(factor) => drop(out.f_mul_scalar_(factor)?),
        _ => {}
    }
    Ok(())
}

/// The status of the group.
#[derive(Debug)]
struct Status(GroupStatus);

impl Watched for Status {
    fn failure(&self) -> Option<CommError> {
        self.0.failure()
    }
}

/// A thread that raises all flags when the group fails, so that no GPU waits for a rank that is gone.
#[derive(Debug)]
struct Release {
    status: Arc<Status>,
    is_ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Release {
    fn new(flags: Arc<Flags>, num_flags: usize, count: Arc<AtomicU32>, status: GroupStatus) -> Result<Self> {
        let (is_ending, status) = (Arc::new(AtomicBool::new(false)), Arc::new(Status(status)));
        let weak: Weak<Status> = Arc::downgrade(&status);
        enlist(weak);
        let (ends, watched) = (is_ending.clone(), status.clone());
        let watch = move || {
            while watched.failure().is_none() {
                if ends.load(Ordering::Acquire) {
                    return;
                }
                std::thread::sleep(CHECK_INTERVAL);
            }
            // Several ranks do this, with almost the same count. A write that a stream has queued may lower a flag again.
            let raised = count.load(Ordering::Acquire).wrapping_add(RAISED);
            loop {
                (0..num_flags).for_each(|flag| flags.on_host(flag).store(raised, Ordering::Release));
                if ends.load(Ordering::Acquire) {
                    return;
                }
                std::thread::sleep(CHECK_INTERVAL);
            }
        };
        let thread = std::thread::Builder::new().name("gpu-windows".into()).spawn(watch);
        let thread =
            thread.map_err(|cause| TorchError::Thread { what: "a thread that watches a group", cause })?;
        Ok(Self { status, is_ending, thread: Some(thread) })
    }

    fn has_failed(&self) -> bool {
        self.status.failure().is_some()
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
