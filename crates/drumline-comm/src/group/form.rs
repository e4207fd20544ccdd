//! How groups are formed: the whole job first, then groups of some of its ranks.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drumline_rendezvous::{InitOptions, Member};

use super::async_calls::Queue;
use super::external::Attachments;
use super::p2p::Router;
use super::tiers::{Tiers, Topology};
use super::{Engine, GroupName, Inner, ProcessGroup};
use crate::call::{Call, Op};
use crate::element::Element;
use crate::error::{CommError, ProcessState};
use crate::monitor::GroupState;
use crate::process::{GroupOptions, Process, Transport};
use crate::reduce::ReduceOp;
use crate::shm::{
    Context, CoreShare, DescriptorListener, Descriptors, FirstBytes, Heap, HeapBuffer, Layout, Node, Region,
    Segment, SharedBuffer, Stop, allocate, create, create_within_memory, part, region_len,
};
use crate::tcp::Fabric;

/// How long a rank with its own core tries to send and receive before it sleeps: longer than it takes to wake up, and than a
/// peer is silent while it makes the records of a burst.
const SPIN: Duration = Duration::from_micros(200);

impl ProcessGroup {
    /// Joins the job that the environment describes: what a launcher, Slurm or MPI has set, or RANK, WORLD_SIZE,
    /// MASTER_ADDR and MASTER_PORT set by hand. A process with none of these is a job of one rank.
    pub fn from_env() -> Result<Self, CommError> {
        let options = GroupOptions::from_env()?;
        let member =
            drumline_rendezvous::from_env().map_err(|error| CommError::Init { cause: error.to_string() })?;
        Self::new(member, options)
    }

    /// Joins the job found under `method`: `env://`, `tcp://host:port` or `file:///path`.
    pub fn init(method: &str, rank: usize, world_size: usize) -> Result<Self, CommError> {
        let options =
            InitOptions { rank: Some(rank), world_size: Some(world_size), ..InitOptions::default() };
        let member = drumline_rendezvous::init(method, options)
            .map_err(|error| CommError::Init { cause: error.to_string() })?;
        Self::new(member, GroupOptions::from_env()?)
    }

    /// The group of all ranks of the job that `member` has joined.
    pub fn new(member: Member, options: GroupOptions) -> Result<Self, CommError> {
        let members: Vec<_> = (0..member.world_size).collect();
        form(Process::join(member, options)?, &"world".into(), &members)
    }

    /// A new group of the given ranks of this group, in that order. All ranks of this group call it with the same list;
    /// ranks that are not on it get `None`.
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>, CommError> {
        for (index, &rank) in ranks.iter().enumerate() {
            self.check_rank(rank, "rank")?;
            if ranks[..index].contains(&rank) {
                return Err(CommError::invalid(format!("rank {rank} is twice in the list {ranks:?}")));
            }
        }
        if ranks.is_empty() {
            return Err(CommError::invalid("a group has at least one rank, the list is empty"));
        }
        self.run(Call::new(Op::NewGroup).extra(ranks.iter().copied()), |tiers, cx| tiers.barrier(cx))?;
        let child = self.next_child();
        ranks.contains(&self.rank()).then(|| self.form_child(&child, ranks)).transpose()
    }

    /// Splits the group: ranks with the same color form a group, ordered by key and then by rank. A rank without a color
    /// gets `None`.
    #[track_caller]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, CommError> {
        let mine = [color.map_or(-1, i64::from), key];
        let mut all = vec![0i64; 2 * self.size()];
        let counts = vec![2; self.size()];
        self.run(Call::new(Op::Split), |tiers, cx| tiers.gather_all(cx, &mine, &mut all, &counts))?;
        let child = self.next_child();
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<(i64, usize)> = all
            .chunks(2)
            .enumerate()
            .filter(|(_, pair)| pair[0] == i64::from(color))
            .map(|(rank, pair)| (pair[1], rank))
            .collect();
        members.sort_unstable();
        let ranks: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        self.form_child(&format!("{child}.{color}"), &ranks).map(Some)
    }

    /// A buffer of zeros in the symmetric heap, of the same length on all ranks. Collectives on it need no copy, which is
    /// several times faster for large data. Gradient buckets belong here.
    #[track_caller]
    pub fn heap_alloc<T: Element>(&self, len: usize) -> Result<HeapBuffer<T>, CommError> {
        let region = Arc::new(self.new_region::<T>(Call::new(Op::HeapAlloc), len, Slices::OfEachRank)?);
        self.engine().tiers.heap.add(&region);
        Ok(HeapBuffer::new(region, len))
    }

    /// Memory of which the ranks of each node have one copy together, of the same length on all ranks. Each rank's `write`
    /// writes the first values that it has. Bytes that no rank writes are zero.
    ///
    /// ```
    /// use drumline_comm::LocalGroup;
    ///
    /// LocalGroup::run(2, |group| {
    ///     let first = 5f32.to_ne_bytes();
    ///     let shared = group.shared_alloc::<f32>(3, &|memory| memory.write_at(8, &first))?;
    ///     // SAFETY: each rank writes its own element, and reads after all have written.
    ///     let all = unsafe {
    ///         shared.as_ptr().add(group.rank()).write(group.rank() as f32 + 1.0);
    ///         group.barrier()?;
    ///         std::slice::from_raw_parts(shared.as_ptr(), shared.len())
    ///     };
    ///     assert_eq!(all, [1.0, 2.0, 5.0]);
    ///     group.barrier()
    /// })?;
    /// # Ok::<(), drumline_comm::CommError>(())
    /// ```
    #[track_caller]
    pub fn shared_alloc<T: Element>(
        &self,
        len: usize,
        write: &dyn Fn(&FirstBytes<'_>) -> std::io::Result<()>,
    ) -> Result<SharedBuffer<T>, CommError> {
        let region = self.new_region::<T>(Call::new(Op::SharedAlloc), len, Slices::OfEachNode(write))?;
        Ok(SharedBuffer::new(region, len))
    }

    #[track_caller]
    fn new_region<T: Element>(
        &self,
        call: Call,
        len: usize,
        slices: Slices<'_>,
    ) -> Result<Region, CommError> {
        let call = call.of(T::DTYPE, len);
        // The total length of all ranks' slices must not overflow.
        let bytes =
            len.checked_mul(size_of::<T>()).filter(|&bytes| bytes < isize::MAX as usize / 2 / self.size());
        let bytes =
            bytes.ok_or_else(|| CommError::invalid(format!("a buffer of {len} {} is too long", T::DTYPE)))?;
        let (region, all_have_it) = self.run(call, |tiers, cx| {
            tiers.barrier(cx)?;
            tiers.children += 1;
            let memory = self.share_memory(tiers, bytes, slices);
            if let (Err(error), Some(node)) = (&memory, &tiers.node)
                && error.kind() == std::io::ErrorKind::TimedOut
            {
                // The next round would wait for the same rank again, for as long.
                return Err(Stop::Silent(vec![node.members()[0]]));
            }
            let region = if on_all(tiers, cx, memory.is_ok())? {
                memory.and_then(|memory| memory.begun(tiers.children, bytes, slices))
            } else {
                memory.and_then(|_| Err(std::io::Error::other("another rank could not allocate its memory")))
            };
            let all_have_it = on_all(tiers, cx, region.is_ok())?;
            region.iter().for_each(|region| region.segment().map_pages());
            Ok((region, all_have_it))
        })?;
        let what = "making a buffer in shared memory";
        let failed = |cause: String| CommError::System { group: self.inner.state.group.clone(), what, cause };
        let region = region.map_err(|error| failed(error.to_string()))?;
        if !all_have_it {
            return Err(failed("another rank could not allocate its memory".into()));
        }
        Ok(region)
    }

    /// Gives the ranks of this node one memory, of which each allocates a part.
    fn share_memory(&self, tiers: &Tiers, bytes: usize, slices: Slices<'_>) -> std::io::Result<Memory> {
        let (rank, num_ranks) = tiers.node.as_ref().map_or((0, 1), |node| (node.me(), node.ranks()));
        let (me, ranks) = match slices {
            Slices::OfEachRank => (rank, num_ranks),
            Slices::OfEachNode(_) => (0, 1),
        };
        let len = region_len(bytes, ranks);
        let make = || create_within_memory(len);
        let deadline = Instant::now() + self.inner.process.options.timeout;
        let fd = match &self.inner.descriptors {
            Some(descriptors) => descriptors.share(make, deadline),
            None => make(),
        };
        let (fd, part) = (fd?, part(len, rank, num_ranks));
        allocate(&fd, &part)?;
        Ok(Memory { fd, me, ranks, part })
    }

    fn next_child(&self) -> String {
        let tiers = &mut self.engine().tiers;
        tiers.children += 1;
        format!("{}/{}", self.name(), tiers.children)
    }

    pub(super) fn form_child(&self, name: &str, ranks: &[usize]) -> Result<Self, CommError> {
        let members: Vec<_> = ranks.iter().map(|&rank| self.members()[rank]).collect();
        form(self.inner.process.clone(), &self.inner.state.group.child(name.into()), &members)
    }
}

/// The memory of a region, and the slice that is this rank's.
struct Memory {
    fd: OwnedFd,
    me: usize,
    ranks: usize,
    /// The bytes that this rank allocates.
    part: Range<usize>,
}

impl Memory {
    fn begun(self, id: u64, bytes: usize, slices: Slices<'_>) -> std::io::Result<Region> {
        let region = Region::map(&self.fd, id, bytes, self.me, self.ranks)?;
        match slices {
            Slices::OfEachRank => region.segment().clear(&self.part),
            Slices::OfEachNode(write) => write(&FirstBytes::new(&self.fd, bytes))?,
        }
        Ok(region)
    }
}

/// Whether all ranks have it.
fn on_all(tiers: &mut Tiers, cx: &Context<'_>, has_it: bool) -> Result<bool, Stop> {
    let mut all_have_it = [has_it];
    tiers.all_reduce(cx, &mut all_have_it, ReduceOp::Min)?;
    Ok(all_have_it[0])
}

/// Who has a slice of a region.
#[derive(Clone, Copy)]
enum Slices<'a> {
    /// Each rank, of zeros.
    OfEachRank,
    /// The ranks of a node together, of what they write.
    OfEachNode(&'a dyn Fn(&FirstBytes<'_>) -> std::io::Result<()>),
}

/// Forms the group `name` of these ranks of the job. This process is one of them.
fn form(process: Arc<Process>, name: &GroupName, members: &[usize]) -> Result<ProcessGroup, CommError> {
    let rank = members.iter().position(|&member| member == process.member.rank).ok_or_else(|| {
        CommError::invalid(format!(
            "rank {} is not in the group {members:?} it should join",
            process.member.rank
        ))
    })?;
    let arrivals = Arrivals { process: process.clone(), group: name.to_string() };
    let state = Arc::new(GroupState::new(name.clone(), members.to_vec()));
    process.monitor.watch(&state);
    let topology = topology(&process, members, rank)?;
    if topology.nodes.len() > 1 {
        // The hub must listen before any rank connects, whatever this rank does by then.
        let listening = process.hub();
        listening.map_err(|error| CommError::System {
            group: name.clone(),
            what: "listening for links",
            cause: error.to_string(),
        })?;
    }
    let core_share = process.core_share();
    let local = topology.nodes[topology.node].clone();
    let (node, descriptors) = share_memory(&process, &state, &local, topology.place, core_share)?;
    let spin = if core_share == CoreShare::Own { SPIN } else { Duration::ZERO };
    let fabric = Fabric::new(state.clone(), process.clone(), rank, spin);
    let post = Router::new(&process, &state, rank, &local, node.as_ref());
    if let Some(node) = &node {
        let _ = state.board.set(node.board());
    }
    process.num_groups.fetch_add(1, Ordering::Relaxed);
    let tiers = Tiers { node, fabric, heap: Heap::default(), topology: topology.clone(), children: 0 };
    let inner = Inner {
        attachments: Attachments::default(),
        process,
        state,
        rank,
        topology,
        engine: Mutex::new(Engine { sequence: 0, counts: Default::default(), tiers }),
        post: Mutex::new(post),
        descriptors,
        queue: Queue::default(),
        _arrivals: arrivals,
    };
    Ok(ProcessGroup { inner: Arc::new(inner), started: false })
}

/// The incoming links of a group. When the group ends, or fails to form, unclaimed ones are closed.
#[derive(Debug)]
pub(super) struct Arrivals {
    process: Arc<Process>,
    group: String,
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.process.forget_links(&self.group);
    }
}

fn topology(process: &Process, members: &[usize], rank: usize) -> Result<Topology, CommError> {
    let transport = process.options.transport;
    let same = |a: usize, b: usize| match transport {
        Transport::Tcp => a == b,
        _ => process.same_node(members[a], members[b]),
    };
    let topology = Topology::new(members.len(), rank, same);
    if transport == Transport::Shm && topology.nodes.len() > 1 {
        let (a, b) = (topology.nodes[0][0], topology.nodes[1][0]);
        return Err(CommError::invalid(format!(
            "transport shm was set, but ranks {} ({}) and {} ({}) do not share memory; try DRUMLINE_TRANSPORT=auto",
            members[a], process.ranks[members[a]].host, members[b], process.ranks[members[b]].host
        )));
    }
    Ok(topology)
}

/// The memory this rank shares with the group's ranks on its node, if there are others.
fn share_memory(
    process: &Process,
    state: &GroupState,
    local: &[usize],
    place: usize,
    core_share: CoreShare,
) -> Result<(Option<Node>, Option<Descriptors>), CommError> {
    if local.len() == 1 {
        return Ok((None, None));
    }
    let deadline = Instant::now() + process.options.timeout.min(process.member.timeout);
    let failed = |cause: String| {
        let cause = format!("{cause}{}", unresponsive_ranks(process, state, local));
        let error = CommError::System { group: state.group.clone(), what: "sharing memory", cause };
        state.cause_soon().unwrap_or(error)
    };
    let all_here = || match state.missing_member(local) {
        Some(absence) => Err(std::io::Error::other(absence)),
        None => Ok(()),
    };
    let key = format!("drumline/listener/{}/{}", state.group, state.members[local[0]]);
    let descriptors = if place == 0 {
        let listener = DescriptorListener::open().map_err(|error| failed(error.to_string()))?;
        process.store().set(&key, listener.invitation()).map_err(|error| failed(error.to_string()))?;
        let ranks: Vec<usize> = local.iter().map(|&index| state.members[index]).collect();
        let descriptors = listener.accept(&ranks, deadline, all_here);
        let _ = process.store().delete(&key);
        descriptors
    } else {
        let name = process.await_key(&key, deadline, all_here).map_err(|error| failed(error.to_string()))?;
        Descriptors::connect(&name, place, deadline)
    };
    let descriptors = descriptors.map_err(|error| failed(error.to_string()))?;
    let len = Layout::new(local.len()).len();
    let fd = descriptors.share(|| create(len), deadline).map_err(|error| failed(error.to_string()))?;
    let segment = Segment::map(&fd, len).map_err(|error| failed(error.to_string()))?;
    let node = Node::new(Arc::new(segment), local.to_vec(), place, core_share);
    Ok((Some(node), Some(descriptors)))
}

/// The ranks that make no progress, of those that this one depends on: the ranks of the node, and the store's host. A text
/// for the end of an error.
fn unresponsive_ranks(process: &Process, state: &GroupState, local: &[usize]) -> String {
    let here: Vec<usize> = local.iter().map(|&index| state.members[index]).collect();
    let needed = |rank: &usize| here.contains(rank) || process.ranks[*rank].hosts_store;
    let texts = (0..process.ranks.len()).filter(needed).filter_map(|rank| {
        let state = process.state_of(rank).filter(|&state| state != ProcessState::Alive)?;
        let info = &process.ranks[rank];
        Some(format!("; rank {rank}: ({}, pid {}, {state})", info.host, info.pid))
    });
    texts.collect()
}
