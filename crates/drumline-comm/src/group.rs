//! The process group: ranks that make the same calls together.
//!
//! ```text
//!   all_reduce(..) ─▶ Call ─▶ run: number it, note it, take the lock ─▶ tiers ─▶ node (shared memory) and team (links)
//!                                        └─ on failure: find out who and why, report it to the others, give the group up
//! ```
//! Not here: the calls themselves (`collectives`, `coalesced`, `p2p`, `objects`, `external`), how groups are formed (`form`).

mod async_calls;
mod coalesced;
mod collectives;
mod counts;
mod external;
mod failure;
mod form;
mod name;
mod objects;
mod p2p;
mod tiers;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use async_calls::{Scope, Work};
pub use counts::CallCount;
pub use external::{ExternalCall, GroupStatus};
pub use name::GroupName;
#[cfg(fuzzing)]
pub(crate) use p2p::fuzzing;
pub use p2p::{MessageHandle, P2p, Source};

use drumline_rendezvous::fault::LinkFault;

use crate::call::{Call, OngoingCall, Op, Trace};
use crate::element::DType;
use crate::error::CommError;
use crate::mesh::MeshShape;
use crate::monitor::GroupState;
use crate::process::{Process, Transport};
use crate::reduce::ReduceOp;
use crate::shm::{Context, Descriptors, Stop, Watch};
use async_calls::Queue;
use counts::Counts;
use external::Attachments;
use form::Arrivals;
use p2p::Router;
use tiers::{Tiers, Topology};

/// Ranks that communicate. Cheap to clone; all clones are the same group.
///
/// All members must make the same calls in the same order. A call that fails for any reason but a bad argument ends the
/// group: all later calls on it return the same error, on every rank.
///
/// ```
/// use drumline_comm::{LocalGroup, ReduceOp};
///
/// LocalGroup::run(4, |group| {
///     let mut x = [group.rank() as f32];
///     group.all_reduce(&mut x, ReduceOp::Avg)?;
///     assert_eq!(x, [1.5]);
///     Ok(())
/// })?;
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
    /// This handle belongs to a started call, which must not wait for other started calls.
    started: bool,
}

#[derive(Debug)]
struct Inner {
    /// Dropped first: what other libraries have attached may still use the other fields.
    attachments: Attachments,
    process: Arc<Process>,
    state: Arc<GroupState>,
    /// This process's rank in the group.
    rank: usize,
    topology: Topology,
    engine: Mutex<Engine>,
    post: Mutex<Router>,
    descriptors: Option<Descriptors>,
    queue: Queue,
    /// Dropped after all that claims links.
    _arrivals: Arrivals,
}

impl Drop for Inner {
    /// Reports to the other ranks that this one has left, so that none waits for it. If the group was given up, they have
    /// the cause; a panic is reported when the process leaves the job.
    fn drop(&mut self) {
        // With its last group the process leaves the job, which is reported to all ranks anyway.
        let is_last = self.process.num_groups.fetch_sub(1, Ordering::Relaxed) == 1;
        if self.state.given_up.load(Ordering::Acquire) || std::thread::panicking() {
            return;
        }
        if let Some(board) = self.state.board.get() {
            board.leave();
        }
        if self.topology.nodes.len() > 1 && !is_last {
            self.process.monitor.leave_group(&self.state);
        }
    }
}

/// What only one call at a time may use.
#[derive(Debug)]
struct Engine {
    sequence: u64,
    counts: Counts,
    tiers: Tiers,
}

impl ProcessGroup {
    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// The index of this process on its node, counted from 0 by the launcher: the number of its GPU.
    pub fn local_rank(&self) -> usize {
        self.inner.process.member.local_rank
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> usize {
        self.inner.state.members.len()
    }

    /// The group's name: `world`, `world/3`, …
    pub fn name(&self) -> &str {
        &self.inner.state.group
    }

    /// The members, as ranks of the whole job, in the order of their ranks in this group.
    pub fn members(&self) -> &[usize] {
        &self.inner.state.members
    }

    /// Makes errors name the ranks with their places in the mesh, from now on.
    pub(crate) fn name_places(&self, shape: MeshShape) {
        self.inner.state.group.arrange(self.members(), shape);
    }

    /// How many nodes the members are on.
    pub fn num_nodes(&self) -> usize {
        self.inner.topology.nodes.len()
    }

    /// The members on this rank's node, as ranks of this group, in order.
    pub fn ranks_on_node(&self) -> &[usize] {
        &self.inner.topology.nodes[self.inner.topology.node]
    }

    /// How this group's data travels: `shm`, `tcp` or `shm+tcp`.
    pub fn transport(&self) -> &'static str {
        let nodes = &self.inner.topology.nodes;
        match nodes.len() {
            1 => "shm",
            _ if nodes.iter().all(|node| node.len() == 1) => "tcp",
            _ => "shm+tcp",
        }
    }

    /// Injects a fault (`drumline run --fault`): breaks or delays this process's links to another rank of the job. A broken
    /// connection is made again, and no data is lost.
    ///
    /// A rank that shares memory with this one has no link, and neither has a rank that is not in the job. Then nothing
    /// happens, and stderr says so.
    pub fn inject(&self, fault: LinkFault) {
        let (LinkFault::Drop(peer) | LinkFault::Delay { peer, .. }) = fault;
        let (process, own) = (&self.inner.process, self.inner.process.member.rank);
        let why = match process.ranks.len() {
            _ if peer == own => "a rank has no link to itself",
            ranks if peer >= ranks => "there is no such rank",
            _ if process.options.transport != Transport::Tcp && process.same_node(own, peer) => {
                "the two ranks share memory; try DRUMLINE_TRANSPORT=tcp"
            }
            _ => return process.link_faults.add(fault),
        };
        eprintln!("drumline: no effect on the link of rank {own} to rank {peer}: {why}");
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.inner.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one collective call: numbers it, notes it where peers can see it, and turns a stop into an error.
    #[inline]
    fn run<R>(
        &self,
        call: Call,
        body: impl FnOnce(&mut Tiers, &Context<'_>) -> Result<R, Stop>,
    ) -> Result<R, CommError> {
        self.run_within(self.inner.process.options.timeout, call, body)
    }

    /// As `run`, with its own deadline.
    #[inline]
    fn run_within<R>(
        &self,
        timeout: std::time::Duration,
        call: Call,
        body: impl FnOnce(&mut Tiers, &Context<'_>) -> Result<R, Stop>,
    ) -> Result<R, CommError> {
        if !self.started {
            self.inner.queue.wait_until_empty();
        }
        let mut engine = self.engine();
        let engine = &mut *engine;
        if self.inner.state.given_up.load(Ordering::Relaxed)
            && let Some(cause) = self.inner.state.cause()
        {
            return Err(cause);
        }
        engine.sequence += 1;
        let sequence = engine.sequence;
        engine.counts.add(&call);
        let mut fingerprint = 0;
        if !cfg!(feature = "unchecked") {
            fingerprint = call.fingerprint(sequence);
            if engine.tiers.note(&call, sequence, &self.inner.state) {
                self.inner.process.monitor.answer(&self.inner.state);
            }
        }
        let cx = Context { fingerprint, sequence, watch: Watch { timeout, ..self.watch() } };
        let outcome = body(&mut engine.tiers, &cx);
        let outcome = outcome.map_err(|stop| self.failed(&engine.tiers, &cx, &call, stop));
        self.inner.state.ended.store(sequence, Ordering::Relaxed);
        outcome
    }

    fn watch(&self) -> Watch<'_> {
        let state = &self.inner.state;
        let (board, timeout) = (state.board.get(), self.inner.process.options.timeout);
        Watch { given_up: &state.given_up, left: &state.left, board, timeout }
    }

    #[track_caller]
    fn check_root(&self, root: usize) -> Result<(), CommError> {
        self.check_rank(root, "root")
    }

    #[track_caller]
    fn check_rank(&self, rank: usize, what: &str) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        Err(CommError::invalid(format!(
            "{what} {rank} is not in group `{}` of {} ranks",
            self.name(),
            self.size()
        )))
    }

    /// How often this rank has called a collective of this group, and with how many bytes. Calls of other libraries, such
    /// as NCCL's, do not count.
    ///
    /// ```
    /// use drumline_comm::{CallCount, LocalGroup, Op, ReduceOp};
    ///
    /// LocalGroup::run(2, |group| {
    ///     (0..3).try_for_each(|_| group.all_reduce(&mut [0f32; 5], ReduceOp::Sum))?;
    ///     assert_eq!(group.call_count(Op::AllReduce), CallCount { calls: 3, bytes: 60 });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    pub fn call_count(&self, op: Op) -> CallCount {
        self.engine().counts.of(op)
    }

    /// The last call that this rank made, as the others see it; `None` if there are no others.
    pub fn last_call(&self) -> Option<Trace> {
        match self.inner.state.board.get() {
            Some(board) => board.last_call(self.rank()),
            None if self.num_nodes() > 1 => Some(self.inner.state.own_last_call()),
            None => None,
        }
    }
}

impl ProcessGroup {
    /// The collectives that this rank has not returned from, in this group and in all its other groups of the job. Started
    /// calls and calls of other threads are included; messages are not, nor are calls that need no other rank. To find a
    /// call that hangs, look twice: one that is there both times has lasted that long.
    ///
    /// ```
    /// use drumline_comm::{LocalGroup, Source};
    ///
    /// LocalGroup::run(2, |group| {
    ///     assert!(group.calls_under_way().is_empty());
    ///     group.scope(|scope| {
    ///         if group.rank() == 1 {
    ///             group.recv(&mut [0u8], Source::Rank(0), 0)?; // the other waits in the barrier meanwhile
    ///         }
    ///         let work = scope.start(|group| group.barrier());
    ///         if group.rank() == 0 {
    ///             while group.calls_under_way().is_empty() {
    ///                 std::thread::yield_now();
    ///             }
    ///             assert!(group.calls_under_way()[0].to_string().starts_with("barrier() #1 of world at "));
    ///             group.send(&[0u8], 1, 0)?;
    ///         }
    ///         work.wait()
    ///     })
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    pub fn calls_under_way(&self) -> Vec<OngoingCall> {
        self.inner.process.monitor.ongoing_calls()
    }
}

/// An error if `op` is not defined for this type.
#[track_caller]
fn check_reduction(op: ReduceOp, dtype: DType) -> Result<(), CommError> {
    // No closure: it would hide the caller from `track_caller`.
    if let Err(undefined) = op.check(dtype) {
        return Err(CommError::invalid(undefined.to_string()));
    }
    Ok(())
}
