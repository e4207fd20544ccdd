//! This process as a member of the job: the other ranks, and the listener and the monitor that all its groups share.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use drumline_rendezvous::{Hello, Member, PrefixStore, Role, Store, StoreError, worker_env};
use serde::{Deserialize, Serialize};

use crate::cores::Cores;
use crate::error::{CommError, ProcessState};
use crate::monitor::{Monitor, Neighbour};
use crate::shm::CoreShare;
use crate::tcp::{Hub, LinkFaults, LinkRules, LinkSecurity, Reconnector, SharedLinks};

/// How often a wait for the store checks whether a rank has ended.
const LOOK: Duration = Duration::from_millis(100);

/// How data may travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Shared memory inside a node, TCP between nodes.
    #[default]
    Auto,
    /// Shared memory only; an error if the ranks are on several nodes.
    Shm,
    /// TCP only, also inside a node.
    Tcp,
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        })
    }
}

/// A name that is no transport.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no transport `{0}`; try auto, shm or tcp")]
pub struct UnknownTransport(String);

impl std::str::FromStr for Transport {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        match text {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            _ => Err(UnknownTransport(text.into())),
        }
    }
}

/// How a group behaves. The defaults suit most programs; [`from_env`](Self::from_env) reads the environment.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// How data may travel; must be the same on all ranks.
    pub transport: Transport,
    /// How long a call waits for a rank that makes no progress.
    pub timeout: Duration,
    /// How long a silent host is waited for before its links count as lost. This is for the group's links only: the store,
    /// through which ranks meet and learn of deaths, uses `DRUMLINE_HOST_TIMEOUT`.
    pub host_timeout: Duration,
    /// How links protect their data; must be the same on all ranks. `None`: the default, see [`LinkSecurity`].
    pub link_security: Option<LinkSecurity>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            transport: Transport::Auto,
            timeout: Duration::from_secs(300),
            host_timeout: worker_env::DEFAULT_HOST_TIMEOUT,
            link_security: None,
        }
    }
}

impl GroupOptions {
    /// Reads `DRUMLINE_TRANSPORT`, `DRUMLINE_TIMEOUT`, `DRUMLINE_HOST_TIMEOUT` and `DRUMLINE_LINK_SECURITY`. Those that are
    /// not set have their defaults.
    pub fn from_env() -> Result<Self, CommError> {
        let mut options = Self::default();
        if let Some(transport) = from_env(worker_env::DRUMLINE_TRANSPORT, str::parse)? {
            options.transport = transport;
        }
        if let Some(timeout) = from_env(worker_env::DRUMLINE_TIMEOUT, positive_duration)? {
            options.timeout = timeout;
        }
        if let Some(timeout) = from_env(worker_env::DRUMLINE_HOST_TIMEOUT, positive_duration)? {
            options.host_timeout = timeout;
        }
        options.link_security = from_env(worker_env::DRUMLINE_LINK_SECURITY, str::parse)?;
        Ok(options)
    }
}

/// The value of a variable, if it is set.
fn from_env<T, E: std::fmt::Display>(
    name: &str,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, CommError> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    parse(&text).map(Some).map_err(|error| CommError::invalid(format!("{name}: {error}")))
}

/// A text that is no duration, or one of 0.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no duration; try 300s, 500ms or 5m")]
struct BadDuration(String);

fn positive_duration(text: &str) -> Result<Duration, BadDuration> {
    let duration = worker_env::parse_duration(text).filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| BadDuration(text.into()))
}

/// What a rank tells the other ranks about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Equal for ranks that can share memory.
    node: String,
    /// Equal for ranks that reach each other without leaving the machine.
    network: String,
    /// Equal for ranks that see each other's processes.
    processes: String,
    /// The cores that it may run on.
    cores: Cores,
    transport: Transport,
    /// Whether the store ends with this rank.
    pub(crate) hosts_store: bool,
}

impl RankInfo {
    fn this(transport: Transport, member: &Member) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let boot = read("/proc/sys/kernel/random/boot_id");
        // Ranks in different network namespaces or of different users cannot pass descriptors to each other.
        let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let user = rustix::process::geteuid().as_raw();
        let host = member.host.clone();
        let pid = std::process::id();
        let hosts_store = member.hosts_store();
        Self {
            cores: Cores::of_this_thread(),
            processes: format!("{boot}/{}", processes.display()),
            network: format!("{boot}/{}", network.display()),
            node: format!("{host}/{boot}/{}/{user}", network.display()),
            host,
            pid,
            transport,
            hosts_store,
        }
    }
}

/// The member, and what all its groups share. When it is dropped the process leaves the job: the monitor first, the member
/// last.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) monitor: Monitor,
    /// The listener for links, and the thread that reconnects them.
    links: OnceLock<Reconnector>,
    links_start: Mutex<()>,
    pub(crate) ranks: Vec<RankInfo>,
    pub(crate) options: GroupOptions,
    /// Faults that were injected.
    pub(crate) link_faults: LinkFaults,
    /// The number of groups of this process that are in use.
    pub(crate) num_groups: AtomicUsize,
    /// The part of the store that belongs to this meeting.
    store: MeetingStore,
    pub(crate) member: Member,
}

type MeetingStore = PrefixStore<Arc<dyn Store>>;

/// Ranks may meet several times in one store, so each meeting has its own part of it.
fn store(member: &Member) -> MeetingStore {
    PrefixStore::new(&format!("meeting/{}", member.incarnation), member.store.clone())
}

impl Process {
    /// Meets the other ranks: every rank describes itself to rank 0, which sends the list to all.
    pub(crate) fn join(member: Member, options: GroupOptions) -> Result<Arc<Self>, CommError> {
        let deadline = Instant::now() + member.timeout;
        let init = |error: String| CommError::Init { cause: error };
        let monitor = Monitor::start(&member).map_err(|error| init(error.to_string()))?;
        let ranks = exchange(&member, options.transport, &monitor, deadline)
            .map_err(|error| init(error.to_string()))?;
        if let Some(rank) = ranks.iter().position(|info| info.transport != options.transport) {
            return Err(init(format!(
                "rank {} has transport {}, rank {rank} has {}; try setting {} to the same value on all ranks",
                member.rank,
                options.transport,
                ranks[rank].transport,
                worker_env::DRUMLINE_TRANSPORT
            )));
        }
        if let Some(rank) = ranks.iter().position(|info| info.hosts_store) {
            monitor.store_ends_with(rank, ranks[rank].host.clone(), ranks[rank].pid);
        }
        monitor.watch_processes(neighbours(&ranks, member.rank)).map_err(|error| init(error.to_string()))?;
        let store = store(&member);
        Ok(Arc::new(Self {
            monitor,
            links: OnceLock::new(),
            links_start: Mutex::new(()),
            ranks,
            options,
            link_faults: LinkFaults::default(),
            num_groups: AtomicUsize::new(0),
            store,
            member,
        }))
    }

    /// Whether two ranks of the job share memory.
    pub(crate) fn same_node(&self, a: usize, b: usize) -> bool {
        self.ranks[a].node == self.ranks[b].node
    }

    /// Whether the ranks of this node have a core each. The answer is the same on all of them, however they are bound.
    pub(crate) fn core_share(&self) -> CoreShare {
        let here: Vec<&RankInfo> =
            self.ranks.iter().filter(|info| info.node == self.ranks[self.member.rank].node).collect();
        let cores = Cores::union(here.iter().map(|info| &info.cores));
        if here.len() <= cores.len() { CoreShare::Own } else { CoreShare::Shared }
    }

    /// How the link between this rank and another is protected. Both ranks get the same answer.
    fn link_security(&self, rank: usize) -> LinkSecurity {
        let default = if self.is_here(rank) { LinkSecurity::None } else { LinkSecurity::BETWEEN_HOSTS };
        self.options.link_security.unwrap_or(default)
    }

    /// Whether the data between this rank and another stays on the machine.
    fn is_here(&self, rank: usize) -> bool {
        self.ranks[rank].network == self.ranks[self.member.rank].network
    }

    fn link_rules(&self) -> LinkRules {
        LinkRules {
            security: (0..self.ranks.len()).map(|rank| self.link_security(rank)).collect(),
            is_here: (0..self.ranks.len()).map(|rank| self.is_here(rank)).collect(),
            meeting: self.member.incarnation,
            host_timeout: self.options.host_timeout,
        }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &self.store
    }

    /// The listener for links. It is opened, and its address put into the store, when it is first needed.
    pub(crate) fn hub(&self) -> Result<&Hub, HubError> {
        self.links().map(Reconnector::hub)
    }

    /// Reconnects these links if they break while no call uses them.
    pub(crate) fn maintain(&self, links: &SharedLinks) -> Result<(), HubError> {
        self.links().map(|reconnector| reconnector.add(links))
    }

    fn links(&self) -> Result<&Reconnector, HubError> {
        if let Some(links) = self.links.get() {
            return Ok(links);
        }
        let _guard = self.links_start.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(links) = self.links.get() {
            return Ok(links);
        }
        let member = &self.member;
        let hello =
            Hello { round: member.round, ..Hello::new(Role::Link).member(member.rank, member.world_size) };
        let hub = Hub::open(member.listen_ip, member.key.clone(), hello, self.link_rules())
            .map_err(|source| HubError::Listen { ip: member.listen_ip, source })?;
        let address = hub.address().to_string();
        let reconnector = Reconnector::start(hub).map_err(HubError::Thread)?;
        tracing::debug!(rank = member.rank, address, "listening for links");
        self.store().set(&hub_key(member.rank), address.as_bytes()).map_err(HubError::Store)?;
        Ok(self.links.get_or_init(|| reconnector))
    }

    /// Closes unclaimed links of a group that has ended, or failed to form.
    pub(crate) fn forget_links(&self, group: &str) {
        if let Some(links) = self.links.get() {
            links.hub().forget(group);
        }
    }

    /// Waits for a key of the store. `check` is called now and then, and its error ends the wait.
    pub(crate) fn await_key(
        &self,
        key: &str,
        deadline: Instant,
        check: impl Fn() -> std::io::Result<()>,
    ) -> std::io::Result<Vec<u8>> {
        loop {
            match self.store().get(key, deadline.min(Instant::now() + LOOK)) {
                Err(StoreError::Timeout { .. }) if Instant::now() < deadline => check()?,
                other => return other.map_err(std::io::Error::other),
            }
        }
    }

    /// The address on which a rank listens for links; waits until it does.
    pub(crate) fn hub_address(&self, rank: usize, deadline: Instant) -> Result<SocketAddr, HubError> {
        // A short wait, so that the caller can check for deaths in between.
        let deadline = deadline.min(Instant::now() + LOOK);
        let bytes = self.store().get(&hub_key(rank), deadline).map_err(HubError::Store)?;
        String::from_utf8_lossy(&bytes).parse().map_err(|_| HubError::Address { rank })
    }

    /// What the process of a rank of this node does; `None` for other nodes.
    pub(crate) fn state_of(&self, rank: usize) -> Option<ProcessState> {
        if !self.same_node(rank, self.member.rank) {
            return None;
        }
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", self.ranks[rank].pid)) else {
            return Some(ProcessState::Ended);
        };
        let state = stat.rsplit(") ").next()?.chars().next()?;
        Some(match state {
            'T' | 't' => ProcessState::Stopped,
            'Z' | 'X' => ProcessState::Dead,
            'D' => ProcessState::WaitingForDisk,
            _ => ProcessState::Alive,
        })
    }
}

/// Why links cannot be made: this process cannot listen for them, or the other rank's address is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    #[error("cannot listen on {ip}: {source}")]
    Listen { ip: IpAddr, source: StoreError },
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
    #[error(transparent)]
    Store(StoreError),
    #[error("rank {rank} listens at no address")]
    Address { rank: usize },
}

/// The ranks whose processes this one can see. Ranks that are threads of one process end together.
fn neighbours(ranks: &[RankInfo], me: usize) -> Vec<Neighbour> {
    let is_near = |other: &RankInfo| other.processes == ranks[me].processes && other.pid != ranks[me].pid;
    let neighbour = |(rank, info): (usize, &RankInfo)| Neighbour {
        rank,
        host: info.host.clone(),
        pid: info.pid,
        hosts_store: info.hosts_store,
    };
    ranks.iter().enumerate().filter(|(_, info)| is_near(info)).map(neighbour).collect()
}

fn hub_key(rank: usize) -> String {
    format!("drumline/hub/{rank}")
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The store's key for the list of all ranks. With `/RANK` after it, the key under which a rank describes itself.
const RANKS_KEY: &str = "drumline/who";

/// Waits for the values of these keys; an error if a rank ends before all have met.
fn await_keys(
    member: &Member,
    keys: &[&str],
    monitor: &Monitor,
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, Failure> {
    loop {
        match store(member).multi_get(keys, deadline.min(Instant::now() + LOOK)) {
            Err(StoreError::Timeout { .. }) if Instant::now() < deadline => {}
            Err(StoreError::Timeout { .. }) => return Err(absent(member).into()),
            other => return Ok(other?),
        }
        if let Some(loss) = monitor.loss() {
            return Err(format!("{loss}, before all ranks had met").into());
        }
    }
}

/// The text that names the ranks that did not come.
fn absent(member: &Member) -> String {
    let here = store(member).list(&format!("{RANKS_KEY}/")).unwrap_or_default();
    let is_here =
        |rank: usize| rank == 0 || rank == member.rank || here.contains(&format!("{RANKS_KEY}/{rank}"));
    let missing: Vec<usize> = (0..member.world_size).filter(|&rank| !is_here(rank)).collect();
    let (noun, missing) = match &missing[..] {
        [] => ("rank", vec![0]),
        [_] => ("rank", missing),
        _ => ("ranks", missing),
    };
    let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
    format!(
        "{noun} {} of {} did not come within {:?}; try looking whether they were started, with the same MASTER_ADDR, \
         MASTER_PORT and WORLD_SIZE",
        missing.join(", "),
        member.world_size,
        member.timeout
    )
}

fn exchange(
    member: &Member,
    transport: Transport,
    monitor: &Monitor,
    deadline: Instant,
) -> Result<Vec<RankInfo>, Failure> {
    let store = store(member);
    let mine = serde_json::to_vec(&RankInfo::this(transport, member))?;
    if member.rank == 0 {
        let keys: Vec<String> = (1..member.world_size).map(|rank| format!("{RANKS_KEY}/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut ranks: Vec<RankInfo> = vec![serde_json::from_slice(&mine)?];
        if !keys.is_empty() {
            for bytes in await_keys(member, &keys, monitor, deadline)? {
                ranks.push(serde_json::from_slice(&bytes)?);
            }
        }
        store.set(RANKS_KEY, &serde_json::to_vec(&ranks)?)?;
        for key in keys {
            store.delete(key)?;
        }
        return Ok(ranks);
    }
    store.set(&format!("{RANKS_KEY}/{}", member.rank), &mine)?;
    let ranks = await_keys(member, &[RANKS_KEY], monitor, deadline)?;
    Ok(serde_json::from_slice(&ranks[0])?)
}
