//! Messages from one rank to another: send, receive, and several of both at once.
//!
//! Messages between two ranks with the same tag arrive in the order in which they were sent. A message that arrives before
//! its receive is kept. Not here: how bytes move (`router`).

#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod router;
mod slot;
mod streams;
#[cfg(test)]
mod tests;
#[cfg(any(test, fuzzing))]
mod trickle;
mod waits;

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::async_calls::Scope;
use super::{Inner, ProcessGroup};
use crate::call::{Call, Op};
use crate::element::{DType, Element};
use crate::error::CommError;
use crate::shm::{Stop, bytes};
pub(super) use router::Router;
use slot::{Halt, Slot};

/// Which rank's message to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The message of this rank.
    Rank(usize),
    /// The first message that arrives.
    Any,
}

/// One message to send or receive, for [`ProcessGroup::batch`].
#[derive(Debug)]
pub struct P2p<'a> {
    tag: u64,
    dtype: DType,
    direction: Direction<'a>,
}

#[derive(Debug)]
enum Direction<'a> {
    Send { to: usize, bytes: &'a [u8] },
    Receive { from: Source, bytes: &'a mut [u8] },
}

impl<'a> P2p<'a> {
    /// A message to rank `to`.
    pub fn send<T: Element>(data: &'a [T], to: usize, tag: u64) -> Self {
        Self { tag, dtype: T::DTYPE, direction: Direction::Send { to, bytes: bytes::of(data) } }
    }

    /// A message from `from`, of exactly this length and type.
    pub fn recv<T: Element>(data: &'a mut [T], from: Source, tag: u64) -> Self {
        Self { tag, dtype: T::DTYPE, direction: Direction::Receive { from, bytes: bytes::of_mut(data) } }
    }

    fn elements(&self) -> usize {
        let bytes = match &self.direction {
            Direction::Send { bytes, .. } => bytes.len(),
            Direction::Receive { bytes, .. } => bytes.len(),
        };
        bytes / self.dtype.size()
    }

    fn call(&self, call: Call) -> Call {
        let (op, peer) = match &self.direction {
            Direction::Send { to, .. } => (Op::Send, Some(*to)),
            Direction::Receive { from: Source::Rank(rank), .. } => (Op::Recv, Some(*rank)),
            Direction::Receive { from: Source::Any, .. } => (Op::Recv, None),
        };
        Call { op, root: peer, extra: self.tag, ..call }.of(self.dtype, self.elements())
    }
}

/// Point-to-point messages. Only the ranks that send or receive call these.
impl ProcessGroup {
    /// Sends `data` to rank `to`. Returns when the data may be overwritten: a short message usually before it is received, a
    /// long one when most of it is.
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u64) -> Result<(), CommError> {
        self.exchange(Call::new(Op::Send), vec![P2p::send(data, to, tag)]).map(drop)
    }

    /// Receives a message of exactly this length and type; returns the rank that sent it.
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: Source, tag: u64) -> Result<usize, CommError> {
        self.exchange(Call::new(Op::Recv), vec![P2p::recv(data, from, tag)]).map(|ranks| ranks[0])
    }

    /// Sends and receives several messages at once, in any order; returns the other rank of each.
    ///
    /// ```
    /// use drumline_comm::{LocalGroup, P2p, Source};
    ///
    /// LocalGroup::run(3, |group| {
    ///     let (right, left) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
    ///     let (mine, mut theirs) = ([group.rank() as u32], [0]);
    ///     group.batch(vec![P2p::send(&mine, right, 0), P2p::recv(&mut theirs, Source::Rank(left), 0)])?;
    ///     assert_eq!(theirs, [left as u32]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    #[track_caller]
    pub fn batch(&self, messages: Vec<P2p<'_>>) -> Result<Vec<usize>, CommError> {
        self.exchange(Call::new(Op::Batch), messages)
    }

    #[track_caller]
    fn exchange(&self, call: Call, messages: Vec<P2p<'_>>) -> Result<Vec<usize>, CommError> {
        for message in &messages {
            self.check_message(message)?;
        }
        self.check_alive()?;
        let mut post = self.inner.post();
        post.check_free_for(None)?;
        let call = match &messages[..] {
            [message] => message.call(call),
            _ => Call { count: messages.len(), ..call },
        };
        self.note_message(&mut post, &call);
        let mut slots: Vec<Slot<'_>> = messages.into_iter().map(Slot::from).collect();
        let outcome =
            post.drive(&mut slots, &self.watch(), |slots| slots.iter().all(|slot| slot.done.is_some()));
        outcome.map_err(|halt| self.mail_failed(&post, call, &slots, halt))?;
        Ok(slots.iter().filter_map(|slot| slot.done).collect())
    }

    /// Records the call where other ranks can read it.
    fn note_message(&self, post: &mut Router, call: &Call) {
        post.num_calls += 1;
        if cfg!(feature = "unchecked") {
            return;
        }
        if let Some(board) = self.inner.state.board.get() {
            board.note_message(call, post.num_calls, &mut post.known_texts);
        }
        if self.num_nodes() > 1 {
            self.inner.state.note_message(*call, post.num_calls);
        }
    }

    /// The group's error if it was given up: its streams may have stopped inside a message.
    fn check_alive(&self) -> Result<(), CommError> {
        self.inner.state.cause().map_or(Ok(()), Err)
    }

    #[track_caller]
    fn check_message(&self, message: &P2p<'_>) -> Result<(), CommError> {
        match message.direction {
            Direction::Send { to: rank, .. } | Direction::Receive { from: Source::Rank(rank), .. } => {
                self.check_rank(rank, "rank")
            }
            Direction::Receive { from: Source::Any, .. } => Ok(()),
        }
    }

    #[cold]
    fn mail_failed(&self, post: &Router, call: Call, slots: &[Slot<'_>], halt: Halt) -> CommError {
        let waiting = slots.iter().find(|slot| slot.done.is_none());
        let call = waiting.map_or(call, |slot| slot.message.call(call));
        let cx = crate::shm::Context { fingerprint: 0, sequence: post.num_calls, watch: self.watch() };
        match halt {
            Halt::Stop(Stop::TimedOut) => self.silent(&cx, &call, &self.awaited(slots)),
            Halt::Stop(stop) => self.stopped(&cx, &call, stop, Vec::new()),
            Halt::BadMessage { from, what } => {
                let error = CommError::Message {
                    group: self.inner.state.group.clone(),
                    rank: self.members()[from],
                    call: call.trace(post.num_calls),
                    got: what,
                };
                self.call_off(error)
            }
        }
    }

    /// The ranks that open messages wait for: all, if one may come from any rank.
    fn awaited(&self, slots: &[Slot<'_>]) -> Vec<usize> {
        let open = slots.iter().filter(|slot| slot.done.is_none());
        let mut ranks: Vec<usize> = open
            .flat_map(|slot| match slot.message.direction {
                Direction::Send { to: rank, .. } | Direction::Receive { from: Source::Rank(rank), .. } => {
                    rank..rank + 1
                }
                Direction::Receive { from: Source::Any, .. } => 0..self.size(),
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        // This rank is listed only if no other rank could have sent the message.
        if ranks.len() > 1 {
            ranks.retain(|&rank| rank != self.rank());
        }
        ranks
    }
}

impl Inner {
    fn post(&self) -> MutexGuard<'_, Router> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The messages of a scope, in the order in which they were started.
#[derive(Debug, Default)]
pub(super) struct ScopeMessages<'scope> {
    slots: Mutex<Vec<Slot<'scope>>>,
}

impl ScopeMessages<'_> {
    /// Identifies the scope: its address does not change as long as it lives.
    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// A message that was started in a scope.
#[derive(Debug, Clone, Copy)]
pub struct MessageHandle(usize);

impl<'scope> Scope<'scope, '_> {
    /// Starts to send `data` to rank `to`. The message moves whenever the scope's messages are waited for or polled.
    #[track_caller]
    pub fn isend<T: Element>(
        &self,
        data: &'scope [T],
        to: usize,
        tag: u64,
    ) -> Result<MessageHandle, CommError> {
        self.begin(P2p::send(data, to, tag))
    }

    /// Starts to receive a message of exactly this length and type.
    #[track_caller]
    pub fn irecv<T: Element>(
        &self,
        data: &'scope mut [T],
        from: Source,
        tag: u64,
    ) -> Result<MessageHandle, CommError> {
        self.begin(P2p::recv(data, from, tag))
    }

    #[track_caller]
    fn begin(&self, message: P2p<'scope>) -> Result<MessageHandle, CommError> {
        self.group().check_message(&message)?;
        let mut slots = self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Locked until the message has started, so that no other scope finds the group free meanwhile.
        let mut post = self.group().inner.post();
        post.check_free_for(Some(self.messages().owner()))?;
        self.group().note_message(&mut post, &message.call(Call::new(Op::Batch)));
        slots.push(message.into());
        let letter = MessageHandle(slots.len() - 1);
        self.push_on(&mut post, &mut slots, |_| true)?;
        Ok(letter)
    }

    /// Whether the message has been sent or received. Also moves all messages of the scope.
    #[track_caller]
    pub fn is_delivered(&self, letter: MessageHandle) -> Result<bool, CommError> {
        let mut slots = self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner);
        self.push_on(&mut self.group().inner.post(), &mut slots, |_| true)?;
        Ok(slots[letter.0].done.is_some())
    }

    /// Waits until the message has been sent or received; returns the other rank.
    #[track_caller]
    pub fn wait_for(&self, letter: MessageHandle) -> Result<usize, CommError> {
        let mut slots = self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut post = self.group().inner.post();
        self.group().note_message(&mut post, &slots[letter.0].message.call(Call::new(Op::Batch)));
        self.push_on(&mut post, &mut slots, |slots| slots[letter.0].done.is_some())?;
        slots[letter.0].done.ok_or_else(|| CommError::invalid("the message did not end"))
    }

    /// Waits until all messages of the scope have been sent or received.
    #[track_caller]
    pub fn wait_for_all(&self) -> Result<(), CommError> {
        let mut slots = self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner);
        let count = slots.iter().filter(|slot| slot.done.is_none()).count();
        let mut post = self.group().inner.post();
        self.group().note_message(&mut post, &Call { count, ..Call::new(Op::Batch) });
        self.push_on(&mut post, &mut slots, |slots| slots.iter().all(|slot| slot.done.is_some()))
    }

    #[track_caller]
    fn push_on(
        &self,
        post: &mut Router,
        slots: &mut [Slot<'scope>],
        enough: impl Fn(&[Slot<'_>]) -> bool,
    ) -> Result<(), CommError> {
        let group = self.group();
        let call = Call::new(Op::Batch);
        group.check_alive()?;
        let outcome = post.drive(slots, &group.watch(), enough);
        let open = slots.iter().any(|slot| slot.done.is_none());
        post.claim(self.messages().owner(), open);
        outcome.map_err(|halt| group.mail_failed(post, call, slots, halt))
    }

    /// At the end of the scope: waits for all messages, unless the program has failed.
    pub(super) fn settle(&self, has_failed: bool) -> Result<(), CommError> {
        if self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Ok(());
        }
        let outcome = if has_failed { Ok(()) } else { self.wait_for_all() };
        let slots = self.messages().slots.lock().unwrap_or_else(PoisonError::into_inner);
        let half_way = slots.iter().any(|slot| slot.done.is_none() && (slot.moved > 0 || slot.taken));
        self.group().inner.post().claim(self.messages().owner(), false);
        if half_way && outcome.is_ok() {
            let group = self.group();
            let cause =
                "a scope ended in the middle of a message, so the start of the next one cannot be found"
                    .into();
            let by = group.members()[group.rank()];
            group.call_off(CommError::CalledOff {
                group: group.name().into(),
                by,
                cause,
                recoverable: false,
            });
        }
        outcome
    }
}
