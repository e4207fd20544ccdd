//! The ranks of one group that share memory, and the round: the step that all their collectives consist of.
//!
//! In a round each rank fills its buffer, publishes, waits for all others, and reads their buffers; `line` explains why that is
//! safe without a second barrier. Every round carries the call's fingerprint and every rank compares all of them, so all
//! ranks see a mismatch at once. Not here: the collectives themselves (`all_reduce`, `exchange`).

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::heap::Symmetric;
use super::layout::{Area, Control, Layout, STAGE};
use super::line::Bell;
use super::record::KnownTexts;
use super::segment::Segment;
use super::wait::{Backoff, CoreShare, Stop, Watch, wake};
use crate::call::Call;
use crate::element::Element;
use crate::select::DIRECT_MIN;
use crate::slices::chunks;

/// How long late ranks are waited for once it is known that others made different calls.
const LATE_RANK_WAIT: Duration = Duration::from_millis(500);

/// What a collective needs to know about its call.
#[derive(Debug, Clone)]
pub(crate) struct Context<'a> {
    /// The call's fingerprint.
    pub(crate) fingerprint: u64,
    /// The number of calls that this rank has made on the group.
    pub(crate) sequence: u64,
    pub(crate) watch: Watch<'a>,
}

/// This process's view of the memory it shares with the other ranks of its node.
#[derive(Debug)]
pub(crate) struct Node {
    segment: Arc<Segment>,
    controls: Vec<NonNull<Control>>,
    layout: Layout,
    /// The ranks of the group on this node, in order.
    members: Vec<usize>,
    me: usize,
    /// The last round this rank published.
    epoch: u64,
    backoff: Backoff,
    core_share: CoreShare,
    /// Whether the next data round is the first of its call: in it a peer may announce a symmetric buffer.
    first: bool,
    known_texts: KnownTexts,
}

// SAFETY: the pointers lead into `segment`, which is kept alive here and is not tied to a thread.
unsafe impl Send for Node {}

impl Node {
    /// The view of local rank `me`; `members` are the ranks of the group on this node, for which the segment was made.
    pub(crate) fn new(segment: Arc<Segment>, members: Vec<usize>, me: usize, core_share: CoreShare) -> Self {
        let layout = Layout::new(members.len());
        let controls = (0..members.len())
            .map(|rank| segment.at(layout.control(rank), size_of::<Control>()).cast())
            .collect();
        let backoff = Backoff::new(core_share);
        let known_texts = KnownTexts::default();
        Self {
            segment,
            controls,
            layout,
            members,
            me,
            epoch: 0,
            backoff,
            core_share,
            first: false,
            known_texts,
        }
    }

    pub(super) fn core_share(&self) -> CoreShare {
        self.core_share
    }

    pub(crate) fn me(&self) -> usize {
        self.me
    }

    /// The ranks of the group on this node, in order.
    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    pub(crate) fn ranks(&self) -> usize {
        self.controls.len()
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.controls.len()).filter(move |&rank| rank != me)
    }

    #[inline]
    fn control(&self, rank: usize) -> &Control {
        // SAFETY: points into the mapped segment at an aligned offset; a `Control` is made of atomics only, for which
        // the zeroed memory of a new segment is valid, so sharing it with other processes is sound.
        unsafe { self.controls[rank].as_ref() }
    }

    /// Records the call where peers can read it.
    #[inline]
    pub(crate) fn note(&mut self, call: &Call, sequence: u64) {
        // SAFETY: as in `control`, which cannot be called while another field is borrowed mutably.
        let control = unsafe { self.controls[self.me].as_ref() };
        control.record.write(call, sequence, &mut self.known_texts);
    }

    /// Publishes the next round; `words` are stored beside the flag.
    #[inline]
    fn publish(&mut self, cx: &Context<'_>, words: &[u64]) {
        self.epoch += 1;
        self.control(self.me).flags.publish(self.epoch, cx.fingerprint, words);
    }

    /// Waits until `peer` has published this round too, and checks that it makes the same call.
    #[inline]
    fn await_peer(&self, cx: &Context<'_>, peer: usize) -> Result<(), Stop> {
        let flags = &self.control(peer).flags;
        let (bell, member) = (&self.control(self.me).flags.bell, self.members[peer]);
        self.backoff.wait(bell, &cx.watch, Some(member), || flags.arrived(self.epoch))?;
        if !cfg!(feature = "unchecked") && flags.fingerprint(self.epoch) != cx.fingerprint {
            return Err(Stop::Mismatch(cx.sequence));
        }
        Ok(())
    }

    /// One whole round: publish, then wait for all. The caller reads the peers' buffers before the next round.
    #[inline]
    pub(crate) fn round(&mut self, cx: &Context<'_>, words: &[u64]) -> Result<(), Stop> {
        self.publish(cx, words);
        for peer in self.peers() {
            if let Err(stop) = self.await_peer(cx, peer) {
                return Err(self.prefer_mismatch(cx, stop));
            }
        }
        self.wake_sleepers();
        Ok(())
    }

    /// After a stop: if ranks made different calls, waits a moment for the others, so that all see it and the error can show
    /// all calls. A mismatch matters more than a late rank.
    #[cold]
    fn prefer_mismatch(&self, cx: &Context<'_>, stop: Stop) -> Stop {
        self.wake_sleepers();
        let differs = |&peer: &usize| {
            let flags = &self.control(peer).flags;
            flags.arrived(self.epoch) && flags.fingerprint(self.epoch) != cx.fingerprint
        };
        if !self.peers().any(|peer| differs(&peer)) {
            return stop;
        }
        let mut cx = cx.clone();
        cx.watch.timeout = cx.watch.timeout.min(LATE_RANK_WAIT);
        for peer in self.peers() {
            let _ = self.await_peer(&cx, peer);
        }
        Stop::Mismatch(cx.sequence)
    }

    /// Wakes peers that sleep. All ranks wait for the last to arrive, so it is early enough to check for sleepers after
    /// waiting. By then the fence costs little, since the flag has left this core long ago.
    #[inline]
    fn wake_sleepers(&self) {
        Bell::order();
        for peer in self.peers() {
            wake(&self.control(peer).flags.bell);
        }
        self.control(self.me).flags.fetch_next(self.epoch);
    }

    /// The words a rank published beside the flag of this round.
    #[inline]
    pub(super) fn words<const N: usize>(&self, rank: usize) -> [u64; N] {
        let mut words = [0; N];
        self.control(rank).flags.read_words(self.epoch, &mut words);
        words
    }

    /// Local ranks that have not published the round this rank is in.
    pub(crate) fn missing(&self) -> Vec<usize> {
        self.peers().filter(|&peer| !self.control(peer).flags.arrived(self.epoch)).collect()
    }

    /// How many elements of a staging buffer each rank has when it is cut into cells.
    pub(super) fn cell_capacity<T>(&self) -> usize {
        STAGE / self.ranks() / 64 * 64 / size_of::<T>()
    }

    /// The symmetric buffer, if the message is large enough for it to matter and all ranks passed the same one.
    ///
    /// A rank with a private buffer announces nothing: it continues with its first data round, and learns there if a peer did.
    pub(super) fn agree_on_heap(
        &mut self,
        cx: &Context<'_>,
        bytes: usize,
        heap: Option<Symmetric>,
    ) -> Result<Option<Symmetric>, Stop> {
        self.first = bytes >= DIRECT_MIN && heap.is_none();
        let Some(heap) = heap.filter(|_| bytes >= DIRECT_MIN) else { return Ok(None) };
        self.round(cx, &heap.words())?;
        let same = self.peers().all(|peer| self.words(peer) == heap.words());
        Ok(same.then_some(heap))
    }

    /// A round in which staged data is passed on.
    #[inline]
    pub(super) fn data_round(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        self.round(cx, &[0, 0])?;
        if std::mem::take(&mut self.first) && self.peers().any(|peer| self.words::<2>(peer) != [0, 0]) {
            return Err(Stop::Mixed);
        }
        Ok(())
    }

    /// Runs `body`, which stages data; runs it again from the beginning if it turns out that a peer announced a symmetric buffer.
    pub(super) fn staged(&mut self, mut body: impl FnMut(&mut Self) -> Result<(), Stop>) -> Result<(), Stop> {
        match body(self) {
            Err(Stop::Mixed) => body(self),
            other => other,
        }
    }

    /// This rank's buffer for the next round, before it is published.
    ///
    /// # Safety
    /// One borrow per buffer and range at a time, which ends before the next `publish`; every peer must have been awaited in
    /// the current round.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn fill<T: Element>(&self, area: Area, offset: usize, len: usize) -> &mut [T] {
        // SAFETY: passed on to the caller; parity and `line`'s argument keep peers away from this buffer now.
        unsafe { std::slice::from_raw_parts_mut(self.place(self.me, area, self.epoch + 1, offset, len), len) }
    }

    /// What `rank` filled for the current round. The borrow ends before this rank publishes again, which takes `&mut`.
    ///
    /// # Safety
    /// `rank` must have been awaited in the current round.
    #[inline]
    pub(super) unsafe fn filled<T: Element>(&self, rank: usize, area: Area, range: Range<usize>) -> &[T] {
        let start = self.place(rank, area, self.epoch, range.start, range.len());
        // SAFETY: passed on to the caller; the owner overwrites the buffer only after this rank's next publish.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// Passes what `rank` filled to `read`, block by block, and takes over the cache lines of each block after it.
    ///
    /// # Safety
    /// As for [`take_over`](Self::take_over).
    pub(super) unsafe fn consume<T: Element>(
        &self,
        rank: usize,
        area: Area,
        range: Range<usize>,
        mut read: impl FnMut(Range<usize>, &[T]),
    ) {
        for block in blocks::<T>(range.len()) {
            let place = range.start + block.start..range.start + block.end;
            // SAFETY: passed on to the caller.
            unsafe {
                read(block, self.filled(rank, area, place.clone()));
                self.take_over::<T>(rank, area, place);
            }
        }
    }

    /// Takes over the cache lines of what was read, by writing to each. To be called when this rank is done with them.
    ///
    /// Their owner will fill them again. If its core and ours both hold a line for reading, that costs the owner several times a
    /// plain transfer; a line that only we hold, modified, returns at once.
    ///
    /// # Safety
    /// As for [`filled`](Self::filled); also, no other rank, the owner included, may read the range in this round.
    pub(super) unsafe fn take_over<T: Element>(&self, rank: usize, area: Area, range: Range<usize>) {
        const LINE: usize = 64;
        let start = self.place::<T>(rank, area, self.epoch, range.start, range.len()).cast::<u8>();
        for offset in (0..range.len() * size_of::<T>()).step_by(LINE) {
            // SAFETY: inside the range, which nobody else uses until this rank publishes again.
            unsafe { start.add(offset).write_volatile(0) };
        }
    }

    fn place<T>(&self, rank: usize, area: Area, epoch: u64, offset: usize, len: usize) -> *mut T {
        let (offset, len) = (offset * size_of::<T>(), len * size_of::<T>());
        assert!(offset + len <= STAGE, "{offset}+{len} bytes do not fit a staging buffer");
        self.segment.at(self.layout.place(rank, area, epoch) + offset, len).cast().as_ptr()
    }

    /// What the ranks of this node publish about themselves.
    pub(crate) fn board(&self) -> super::board::Board {
        super::board::Board::new(self.segment.clone(), self.layout, &self.members, self.me)
    }

    /// The parts of this node that point-to-point messages use.
    pub(crate) fn mail(&self) -> super::mail::Mail {
        super::mail::Mail::new(self.segment.clone(), self.layout, self.me, self.ranks(), self.backoff)
    }
}

/// The blocks of `len` elements that are used more than once in turn: small enough that the nearest cache still holds a block
/// for its second use.
pub(super) fn blocks<T>(len: usize) -> impl Iterator<Item = Range<usize>> {
    const BLOCK: usize = 8 << 10;
    chunks(len, BLOCK / size_of::<T>())
}
