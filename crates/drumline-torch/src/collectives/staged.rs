//! Collectives of ranks that share a GPU: through the host's memory, in pieces, by the group's own collectives there.
//!
//! The slots for pieces lie in the symmetric heap, where ranks reduce without a copy, and the GPU reads and writes them by itself. Where
//! the driver refuses that they are pinned memory of this rank.

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

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Bytes of a piece: long enough for full speed on the bus, short enough that the first is soon there.
const PIECE: usize = 4 << 20;

/// How often a wait for a copy yields before it sleeps.
const YIELDS: usize = 200;

/// How long it then sleeps at a time.
const NAP: Duration = Duration::from_micros(20);

/// A group's slots, and the streams of its copies.
#[derive(Debug)]
pub(super) struct Staged {
    /// Why not from GPU to GPU.
    pub(super) why: String,
    device: usize,
    down: Stream,
    up: Stream,
    /// Made with the first collective, by all ranks together.
    slots: Mutex<Option<Slots>>,
}

#[derive(Debug)]
struct Slots {
    /// Unpinned before the memory goes.
    _pinned: Option<Pinned>,
    bytes: Tensor,
}

/// What is done with a piece in the host's memory.
#[derive(Debug, Clone, Copy)]
enum Act {
    AllReduce(ReduceOp),
    Broadcast(usize),
}

impl Staged {
    pub(super) fn new(device: usize, why: String) -> Result<Self> {
        let stream = || Stream::new(device, Priority::High);
        Ok(Self { why, device, down: stream()?, up: stream()?, slots: Mutex::new(None) })
    }

    #[track_caller]
    pub(super) fn all_reduce(&self, group: &ProcessGroup, tensors: &[Tensor], op: ReduceOp) -> Result<bool> {
        self.each(group, tensors, Act::AllReduce(op))
    }

    #[track_caller]
    pub(super) fn broadcast(&self, group: &ProcessGroup, tensors: &[Tensor], root: usize) -> Result<bool> {
        self.each(group, tensors, Act::Broadcast(root))
    }

    /// One after the other; false for several, which travel together on the host, and for types that tch has no name for.
    #[track_caller]
    fn each(&self, group: &ProcessGroup, tensors: &[Tensor], act: Act) -> Result<bool> {
        let [tensor] = tensors else { return Ok(false) };
        let Ok(kind) = tensor.f_kind() else { return Ok(false) };
        if Stream::current(self.device)?.is_recording()? {
            return Err(TorchError::Unfit(format!(
                "{}, and what goes through the host's memory cannot be recorded in a graph",
                self.why
            )));
        }
        let resident = Resident::write(tensor, self.device)?;
        if let Act::AllReduce(op) = act {
            resident.carried.check(op)?;
        }
        self.carry(group, &resident, (kind, act))?;
        resident.finish()?;
        Ok(true)
    }

    #[track_caller]
    fn carry(&self, group: &ProcessGroup, resident: &Resident, (kind, act): (Kind, Act)) -> Result {
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
                tracing::debug!(%error, rank = group.rank(), "shared memory cannot be pinned: copies take a stop-over");
                Ok(Self { _pinned: None, bytes: pinned_like(&bytes)? })
            }
        }
    }
}

/// The copies of one collective.
struct Copies<'a> {
    group: &'a ProcessGroup,
    staged: &'a Staged,
    /// The GPU's memory.
    bytes: Tensor,
    slots: &'a Slots,
    kind: Kind,
    act: Act,
    /// For each slot: its last copy has come; has gone.
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

    /// Whether this rank's elements matter; they do not where it is given another's.
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
        let (event, standing) = (&self.downs[piece.slot], self.group.standing());
        for round in 0.. {
            if event.is_done()? {
                break;
            }
            match round < YIELDS {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
            // What the GPU does before the copy may take as long as it likes, but not if nobody waits any more.
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
