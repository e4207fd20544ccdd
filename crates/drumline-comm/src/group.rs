//! The process group: ranks that make the same calls together.
//!
//! ```text
//!   all_reduce(..) ─▶ Call ─▶ run: number it, note it, take the lock ─▶ tiers ─▶ node (shared memory) and team (links)
//!                                        └─ on failure: find out who and why, tell the others, give the group up
//! ```
//! Not here: the calls themselves (`collectives`, `coalesced`, `p2p`, `objects`, `elsewhere`), how groups come to be (`form`).

mod async_calls;
mod coalesced;
mod collectives;
mod elsewhere;
mod failure;
mod form;
mod name;
mod objects;
mod p2p;
mod tiers;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use async_calls::{Scope, Work};
pub use elsewhere::{Announced, Standing};
pub use name::GroupName;
#[cfg(fuzzing)]
pub(crate) use p2p::fuzzing;
pub use p2p::{Letter, P2p, Source};

use drumline_rendezvous::fault::LinkFault;

use crate::call::{Call, Trace, UnderWay};
use crate::element::DType;
use crate::error::CommError;
use crate::mesh::MeshShape;
use crate::monitor::Fate;
use crate::process::{Process, Transport};
use crate::reduce::ReduceOp;
use crate::shm::{Context, Passing, Stop, Watch};
use async_calls::Queue;
use elsewhere::Attachments;
use form::Arrivals;
use p2p::PostOffice;
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
    /// This handle was given to a started call, which need not wait for started calls.
    started: bool,
}

#[derive(Debug)]
struct Inner {
    /// Dropped first: what others keep here may still use the group's parts.
    attachments: Attachments,
    process: Arc<Process>,
    fate: Arc<Fate>,
    /// This process's rank in the group.
    rank: usize,
    topology: Topology,
    engine: Mutex<Engine>,
    post: Mutex<PostOffice>,
    passing: Option<Passing>,
    queue: Queue,
    /// Dropped after all that claims links.
    _arrivals: Arrivals,
}

impl Drop for Inner {
    /// Ranks that still want something of this one learn that they want it in vain. Where the group was given up they
    /// hear of the cause, and of a panic in another way.
    fn drop(&mut self) {
        // With its last group the process leaves the job, which is told to all anyway.
        let is_last = self.process.num_groups.fetch_sub(1, Ordering::Relaxed) == 1;
        if self.fate.given_up.load(Ordering::Acquire) || std::thread::panicking() {
            return;
        }
        if let Some(board) = self.fate.board.get() {
            board.leave();
        }
        if self.topology.nodes.len() > 1 && !is_last {
            self.process.monitor.let_go(&self.fate);
        }
    }
}

/// What a call has to itself while it runs.
#[derive(Debug)]
struct Engine {
    sequence: u64,
    tiers: Tiers,
}

impl ProcessGroup {
    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// This process among those of its node, from 0, as whoever started them counts: the number of its GPU.
    pub fn local_rank(&self) -> usize {
        self.inner.process.member.local_rank
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> usize {
        self.inner.fate.members.len()
    }

    /// The group's name: `world`, `world/3`, …
    pub fn name(&self) -> &str {
        &self.inner.fate.group
    }

    /// The members, as ranks of the whole job, in the order of their ranks in this group.
    pub fn members(&self) -> &[usize] {
        &self.inner.fate.members
    }

    /// Errors name the ranks with their places from now on.
    pub(crate) fn name_places(&self, shape: MeshShape) {
        self.inner.fate.group.arrange(self.members(), shape);
    }

    /// How many nodes the members are on.
    pub fn num_nodes(&self) -> usize {
        self.inner.topology.nodes.len()
    }

    /// `shm`, `tcp` or `shm+tcp`: the ways this group's data takes.
    pub fn transport(&self) -> &'static str {
        let nodes = &self.inner.topology.nodes;
        match nodes.len() {
            1 => "shm",
            _ if nodes.iter().all(|node| node.len() == 1) => "tcp",
            _ => "shm+tcp",
        }
    }

    /// A fault on purpose (`drumline run --fault`): breaks or slows this process's links to another rank of the job. A broken
    /// connection is made again, and no data is lost.
    ///
    /// Ranks that share memory have no link, and a rank that is not in the job has none either: then nothing happens, and
    /// stderr says so.
    pub fn inject(&self, fault: LinkFault) {
        let (LinkFault::Drop(peer) | LinkFault::Delay { peer, .. }) = fault;
        let (process, own) = (&self.inner.process, self.inner.process.member.rank);
        let why = match process.who.len() {
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

    /// As `run`, with a deadline of its own.
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
        if self.inner.fate.given_up.load(Ordering::Relaxed)
            && let Some(cause) = self.inner.fate.cause()
        {
            return Err(cause);
        }
        engine.sequence += 1;
        let sequence = engine.sequence;
        let mut fingerprint = 0;
        if !cfg!(feature = "unchecked") {
            fingerprint = call.fingerprint(sequence);
            if engine.tiers.note(&call, sequence, &self.inner.fate) {
                self.inner.process.monitor.answer(&self.inner.fate);
            }
        }
        let cx = Context { fingerprint, sequence, watch: Watch { timeout, ..self.watch() } };
        let outcome = body(&mut engine.tiers, &cx);
        let outcome = outcome.map_err(|stop| self.failed(&engine.tiers, &cx, &call, stop));
        self.inner.fate.ended.store(sequence, Ordering::Relaxed);
        outcome
    }

    fn watch(&self) -> Watch<'_> {
        let fate = &self.inner.fate;
        let (board, timeout) = (fate.board.get(), self.inner.process.options.timeout);
        Watch { given_up: &fate.given_up, left: &fate.left, board, timeout }
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

    /// The last call this rank made, as others would see it; `None` if there are no others.
    pub fn last_call(&self) -> Option<Trace> {
        match self.inner.fate.board.get() {
            Some(board) => board.last_call(self.rank()),
            None if self.num_nodes() > 1 => Some(self.inner.fate.own_last_call()),
            None => None,
        }
    }
}

impl ProcessGroup {
    /// The collectives that this rank is in right now, in this group and in all others that it has in the job: started ones and
    /// those of other threads, too. Whoever sees the same one twice knows that it lasts. Messages are not told, nor calls that
    /// need no other rank.
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
    pub fn calls_under_way(&self) -> Vec<UnderWay> {
        self.inner.process.monitor.calls_under_way()
    }
}

/// An error if elements of this type cannot be reduced so.
#[track_caller]
fn check_reduction(op: ReduceOp, dtype: DType) -> Result<(), CommError> {
    match op.check(dtype) {
        Ok(()) => Ok(()),
        Err(what) => Err(CommError::invalid(what)),
    }
}
