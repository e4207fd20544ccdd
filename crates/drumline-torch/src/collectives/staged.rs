//! Collectives of ranks that share a GPU: in pieces, through host memory, with the group's collectives there.
//!
//! The slots for pieces are in the symmetric heap, where ranks reduce without a copy, and are pinned, so that the GPU
//! can copy to and from them directly. If the driver refuses to pin them, the fallback is pinned memory of this rank.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use drumline_comm::{ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

use super::TensorCollectives;
use super::pieces::{Mover, Piece, SLOTS, move_all};
use super::resident::Resident;
use crate::cuda::{Event, Pinned, Priority, Stream, Timing, copy_async, pinned_like};
use crate::error::TorchError;
use crate::memory::HeapTensor;
use crate::recordable::{HostRoute, NotRecordable};

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Bytes of a piece: large enough for full speed on the bus, small enough that the first one arrives soon.
const PIECE: usize = 4 << 20;

/// How many times a wait for a copy yields before it sleeps.
const YIELDS: usize = 200;

/// How long it then sleeps each time.
const NAP: Duration = Duration::from_micros(20);

/// A group's slots, and the streams for its copies.
#[derive(Debug)]
pub(super) struct Staged {
    /// Why NCCL is not used.
    pub(super) reason: HostRoute,
    device: usize,
    down: Stream,
    up: Stream,
    /// Created in the first collective, by all ranks together.
    slots: Mutex<Option<Slots>>,
}

#[derive(Debug)]
struct Slots {
    /// Dropped before the memory, to unpin it.
    _pinned: Option<Pinned>,
    bytes: Tensor,
}

/// The collective on a piece in host memory.
#[derive(Debug, Clone, Copy)]
enum Act {
    AllReduce(ReduceOp),
    Broadcast(usize),
}

impl Staged {
    pub(super) fn new(device: usize, reason: HostRoute) -> Result<Self> {
        let stream = || Stream::new(device, Priority::High);
        Ok(Self { reason, device, down: stream()?, up: stream()?, slots: Mutex::new(None) })
    }

    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        self.each(group, tensors, Act::AllReduce(op))
    }

    #[track_caller]
    pub(super) fn broadcast(&self, group: &ProcessGroup, tensors: &[Tensor], root: usize) -> Result<bool> {
        self.each(group, tensors, Act::Broadcast(root))
    }

    /// Runs the collective on one tensor. Returns false for several tensors, which the host sends together, and for
    /// types that tch does not have.
    #[track_caller]
    fn each(&self, group: &ProcessGroup, tensors: &[Tensor], act: Act) -> Result<bool> {
        let [tensor] = tensors else { return Ok(false) };
        let Ok(kind) = tensor.f_kind() else { return Ok(false) };
        if Stream::current(self.device)?.is_recording()? {
            return Err(NotRecordable::ThroughHost(self.reason.clone()).into());
        }
        let resident = Resident::write(tensor, self.device)?;
        if let Act::AllReduce(op) = act {
            resident.carried.check(op)?;
        }
        self.carry(group, &resident, kind, act)?;
        resident.finish()?;
        Ok(true)
    }

    #[track_caller]
    fn carry(&self, group: &ProcessGroup, resident: &Resident, kind: Kind, act: Act) -> Result {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = match &mut *slots {
            Some(slots) => slots,
            none => none.insert(Slots::new(group)?),
        };
        let bytes = resident.flat()?.f_view_dtype(Kind::Uint8)?;
        let (len, current) = (bytes.numel(), Stream::current(self.device)?);
        self.down.wait_for_stream(current)?;
        self.up.wait_for_stream(current)?;
        let event = |_| Event::new(Timing::Off);
        let (downs, ups) =
            ((0..SLOTS).map(event).collect::<Result<_>>()?, (0..SLOTS).map(event).collect::<Result<_>>()?);
        let mut copies = Copies { group, staged: self, bytes, slots, kind, act, downs, ups };
        move_all(len, PIECE, &mut copies)?;
        current.wait_for_stream(self.up)
    }
}

impl Slots {
    #[track_caller]
    fn new(group: &ProcessGroup) -> Result<Self> {
        let heap = HeapTensor::zeros(group, Kind::Uint8, SLOTS * PIECE)?;
        let bytes = heap.tensor().shallow_clone();
        match Pinned::new(&bytes) {
            Ok(pinned) => Ok(Self { _pinned: Some(pinned), bytes }),
            Err(error) => {
                tracing::debug!(%error, rank = group.rank(), "shared memory cannot be pinned: copies go through a pinned buffer");
                Ok(Self { _pinned: None, bytes: pinned_like(&bytes)? })
            }
        }
    }
}

/// The state of one collective.
struct Copies<'a> {
    group: &'a ProcessGroup,
    staged: &'a Staged,
    /// The tensor on the GPU, as bytes.
    bytes: Tensor,
    slots: &'a Slots,
    kind: Kind,
    act: Act,
    /// For each slot: its last copy down; its last copy up.
    downs: Vec<Event>,
    ups: Vec<Event>,
}

impl Copies<'_> {
    fn on_gpu(&self, piece: &Piece) -> Result<Tensor> {
        Ok(self.bytes.f_narrow(0, piece.bytes.start as i64, piece.bytes.len() as i64)?)
    }

    fn on_host(&self, piece: &Piece) -> Result<Tensor> {
        Ok(self.slots.bytes.f_narrow(0, (piece.slot * PIECE) as i64, piece.bytes.len() as i64)?)
    }

    /// Whether this rank's elements are an input of the collective.
    fn gives(&self) -> bool {
        !matches!(self.act, Act::Broadcast(root) if root != self.group.rank())
    }

    fn takes(&self) -> bool {
        !matches!(self.act, Act::Broadcast(root) if root == self.group.rank())
    }
}

impl Mover for Copies<'_> {
    fn down(&mut self, piece: &Piece) -> Result {
        let Staged { down, .. } = *self.staged;
        down.wait_for(&self.ups[piece.slot])?;
        if self.gives() {
            let _on = down.enter()?;
            copy_async(&mut self.on_host(piece)?, &self.on_gpu(piece)?)?;
        }
        self.downs[piece.slot].record(down)
    }

    fn arrived(&mut self, piece: &Piece) -> Result {
        let (event, standing) = (&self.downs[piece.slot], self.group.status());
        for round in 0.. {
            if event.is_done()? {
                break;
            }
            if round < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
            // The work before the copy may take any time, but a group that has failed ends the wait.
            if round % YIELDS == 0
                && let Some(cause) = standing.failure()
            {
                return Err(cause.into());
            }
        }
        Ok(())
    }

    #[track_caller]
    fn act(&mut self, piece: &Piece) -> Result {
        let mut elements = self.on_host(piece)?.f_view_dtype(self.kind)?;
        match self.act {
            Act::AllReduce(op) => self.group.all_reduce_tensor(&mut elements, op),
            Act::Broadcast(root) => self.group.broadcast_tensor(&mut elements, root),
        }
    }

    fn up(&mut self, piece: &Piece) -> Result {
        let Staged { up, .. } = *self.staged;
        if self.takes() {
            let _on = up.enter()?;
            copy_async(&mut self.on_gpu(piece)?, &self.on_host(piece)?)?;
        }
        self.ups[piece.slot].record(up)
    }
}
