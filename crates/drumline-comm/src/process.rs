//! This process as a member of the job: who the others are, its one listener and its one monitor, shared by all groups.

use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use drumline_rendezvous::{Hello, Member, PrefixStore, Role, Store, StoreError, worker_env};
use serde::{Deserialize, Serialize};

use crate::cores::Cores;
use crate::error::CommError;
use crate::monitor::{Monitor, Neighbour};
use crate::shm::Pace;
use crate::tcp::{Hub, LinkFaults, LinkRules, LinkSecurity, Mender, SharedLinks};

/// How often a wait for the store looks up to see who is gone.
const LOOK: Duration = Duration::from_millis(100);

/// Which ways data may take.
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

impl std::str::FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            _ => Err(format!("no transport `{text}`; try auto, shm or tcp")),
        }
    }
}

/// How a group behaves. The default is what the environment says, or else what suits most programs.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// Which ways data may take; must be the same on all ranks.
    pub transport: Transport,
    /// How long a call waits for a rank that makes no progress.
    pub timeout: Duration,
    /// How long a host that has gone silent is waited for before the links to it count as broken for good. It holds for the
    /// group's links only: the store, through which ranks meet and learn of deaths, takes `DRUMLINE_HOST_TIMEOUT`.
    pub host_timeout: Duration,
    /// How links protect what they carry, must be the same on all ranks; `None`: see [`LinkSecurity`].
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
    /// What `DRUMLINE_TRANSPORT`, `DRUMLINE_TIMEOUT`, `DRUMLINE_HOST_TIMEOUT` and `DRUMLINE_LINK_SECURITY` say, the default
    /// where they are not set.
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
fn from_env<T>(name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, CommError> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    parse(&text).map(Some).map_err(|error| CommError::invalid(format!("{name}: {error}")))
}

fn positive_duration(text: &str) -> Result<Duration, String> {
    let duration = worker_env::parse_duration(text).filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| format!("`{text}` is no duration; try 300s, 500ms or 5m"))
}

/// What a rank tells the others of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Who {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Equal for ranks that can share memory.
    node: String,
    /// Equal for ranks whose data does not leave the machine on its way between them.
    network: String,
    /// Equal for ranks that see each other's processes.
    processes: String,
    /// The cores it may run on.
    cores: Cores,
    transport: Transport,
    /// The store ends with this rank.
    pub(crate) hosts_store: bool,
}

impl Who {
    fn this(transport: Transport, member: &Member) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let boot = read("/proc/sys/kernel/random/boot_id");
        // Ranks in different network namespaces or of different users cannot pass descriptors to each other.
        let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let user = rustix::process::geteuid().as_raw();
        let (host, pid, hosts_store) = (member.host.clone(), std::process::id(), member.hosts_store());
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

/// The member and what all its groups share. Dropping it says goodbye: the monitor first, the member last.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) monitor: Monitor,
    /// The listener for links, and who keeps them whole.
    links: OnceLock<Mender>,
    links_start: Mutex<()>,
    pub(crate) who: Vec<Who>,
    pub(crate) options: GroupOptions,
    /// Faults on purpose.
    pub(crate) link_faults: LinkFaults,
    /// Groups of this process that are in use.
    pub(crate) num_groups: AtomicUsize,
    /// The part of the store that belongs to this meeting.
    store: MeetingStore,
    pub(crate) member: Member,
}

type MeetingStore = PrefixStore<Arc<dyn Store>>;

/// What ranks leave in the store for each other is of one meeting: they may meet there again.
fn store(member: &Member) -> MeetingStore {
    PrefixStore::new(&format!("meeting/{}", member.incarnation), member.store.clone())
}

impl Process {
    /// Meets the other ranks: everyone tells rank 0 who it is, rank 0 tells everyone.
    pub(crate) fn join(member: Member, options: GroupOptions) -> Result<Arc<Self>, CommError> {
        let deadline = Instant::now() + member.timeout;
        let init = |error: String| CommError::Init { cause: error };
        let monitor = Monitor::start(&member).map_err(|error| init(error.to_string()))?;
        let who = exchange(&member, options.transport, &monitor, deadline)
            .map_err(|error| init(error.to_string()))?;
        if let Some(rank) = who.iter().position(|who| who.transport != options.transport) {
            return Err(init(format!(
                "rank {} has transport {}, rank {rank} has {}; try setting {} alike on all ranks",
                member.rank,
                options.transport,
                who[rank].transport,
                worker_env::DRUMLINE_TRANSPORT
            )));
        }
        if let Some(rank) = who.iter().position(|who| who.hosts_store) {
            monitor.store_ends_with(rank, who[rank].host.clone(), who[rank].pid);
        }
        monitor.watch_processes(neighbours(&who, member.rank)).map_err(|error| init(error.to_string()))?;
        let (links, links_start) = (OnceLock::new(), Mutex::new(()));
        let store = store(&member);
        let (num_groups, link_faults) = (AtomicUsize::new(0), LinkFaults::default());
        Ok(Arc::new(Self {
            monitor,
            links,
            links_start,
            who,
            options,
            link_faults,
            num_groups,
            store,
            member,
        }))
    }

    /// Whether two ranks of the job share memory.
    pub(crate) fn same_node(&self, a: usize, b: usize) -> bool {
        self.who[a].node == self.who[b].node
    }

    /// Whether the ranks of this node have a core each: the same answer on all of them, however they are bound.
    pub(crate) fn pace(&self) -> Pace {
        let here: Vec<&Who> =
            self.who.iter().filter(|who| who.node == self.who[self.member.rank].node).collect();
        let cores = Cores::union(here.iter().map(|who| &who.cores));
        if here.len() <= cores.len() { Pace::Roomy } else { Pace::Crowded }
    }

    /// How the data between this rank and another is protected. Both ranks come to the same answer.
    fn link_security(&self, rank: usize) -> LinkSecurity {
        let default = if self.is_here(rank) { LinkSecurity::None } else { LinkSecurity::BETWEEN_HOSTS };
        self.options.link_security.unwrap_or(default)
    }

    /// Whether the data between this rank and another does not leave the machine.
    fn is_here(&self, rank: usize) -> bool {
        self.who[rank].network == self.who[self.member.rank].network
    }

    fn link_rules(&self) -> LinkRules {
        LinkRules {
            security: (0..self.who.len()).map(|rank| self.link_security(rank)).collect(),
            is_here: (0..self.who.len()).map(|rank| self.is_here(rank)).collect(),
            meeting: self.member.incarnation,
            patience: self.options.host_timeout,
        }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &self.store
    }

    /// The listener for links, opened and announced when first needed.
    pub(crate) fn hub(&self) -> Result<&Hub, String> {
        self.links().map(Mender::hub)
    }

    /// Has these links made again that break while no call uses them.
    pub(crate) fn look_after(&self, links: &SharedLinks) -> Result<(), String> {
        self.links().map(|mender| mender.add(links))
    }

    fn links(&self) -> Result<&Mender, String> {
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
            .map_err(|error| format!("cannot listen on {}: {error}", member.listen_ip))?;
        let address = hub.address().to_string();
        let mender = Mender::start(hub).map_err(|error| format!("cannot start a thread: {error}"))?;
        tracing::debug!(rank = member.rank, address, "listening for links");
        self.store().set(&hub_key(member.rank), address.as_bytes()).map_err(|error| error.to_string())?;
        Ok(self.links.get_or_init(|| mender))
    }

    /// A group is over, or never came to be: links that came in for it are closed.
    pub(crate) fn forget_links(&self, group: &str) {
        if let Some(links) = self.links.get() {
            links.hub().forget(group);
        }
    }

    /// Waits for a key of the store as long as `go_on` does not object.
    pub(crate) fn await_key(
        &self,
        key: &str,
        deadline: Instant,
        go_on: impl Fn() -> std::io::Result<()>,
    ) -> std::io::Result<Vec<u8>> {
        loop {
            match self.store().get(key, deadline.min(Instant::now() + LOOK)) {
                Err(StoreError::Timeout { .. }) if Instant::now() < deadline => go_on()?,
                other => return other.map_err(std::io::Error::other),
            }
        }
    }

    /// Where a rank listens; waits until it does.
    pub(crate) fn hub_address(&self, rank: usize, deadline: Instant) -> Result<SocketAddr, String> {
        // The wait is cut short so that the caller can look at deaths in between.
        let deadline = deadline.min(Instant::now() + LOOK);
        let bytes = self.store().get(&hub_key(rank), deadline).map_err(|error| error.to_string())?;
        String::from_utf8_lossy(&bytes).parse().map_err(|_| format!("rank {rank} listens at no address"))
    }

    /// What the process of a rank of this node does, in one word.
    pub(crate) fn state_of(&self, rank: usize) -> Option<String> {
        if !self.same_node(rank, self.member.rank) {
            return None;
        }
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", self.who[rank].pid)) else {
            return Some("no longer exists".into());
        };
        let state = stat.rsplit(") ").next()?.chars().next()?;
        Some(match state {
            'T' | 't' => "stopped; try SIGCONT".into(),
            'Z' | 'X' => "dead".into(),
            'D' => "waiting for a disk".into(),
            _ => "alive".to_string(),
        })
    }
}

/// The ranks whose processes this one can see; ranks that are threads of one process end together.
fn neighbours(who: &[Who], me: usize) -> Vec<Neighbour> {
    let is_near = |other: &Who| other.processes == who[me].processes && other.pid != who[me].pid;
    let neighbour = |(rank, who): (usize, &Who)| Neighbour {
        rank,
        host: who.host.clone(),
        pid: who.pid,
        hosts_store: who.hosts_store,
    };
    who.iter().enumerate().filter(|(_, who)| is_near(who)).map(neighbour).collect()
}

fn hub_key(rank: usize) -> String {
    format!("drumline/hub/{rank}")
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Under which everyone finds who all are, and, with its rank, each says who it is.
const WHO: &str = "drumline/who";

/// Waits for the values of these keys, but no longer than all ranks are there.
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

/// Who has not come, in words.
fn absent(member: &Member) -> String {
    let here = store(member).list(&format!("{WHO}/")).unwrap_or_default();
    let is_here = |rank: usize| rank == 0 || rank == member.rank || here.contains(&format!("{WHO}/{rank}"));
    let missing: Vec<usize> = (0..member.world_size).filter(|&rank| !is_here(rank)).collect();
    let (word, missing) = match &missing[..] {
        [] => ("rank", vec![0]),
        [_] => ("rank", missing),
        _ => ("ranks", missing),
    };
    let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
    format!(
        "{word} {} of {} did not come within {:?}; try looking whether they were started, with the same MASTER_ADDR, \
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
) -> Result<Vec<Who>, Failure> {
    let store = store(member);
    let mine = serde_json::to_vec(&Who::this(transport, member))?;
    if member.rank == 0 {
        let keys: Vec<String> = (1..member.world_size).map(|rank| format!("{WHO}/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut who: Vec<Who> = vec![serde_json::from_slice(&mine)?];
        if !keys.is_empty() {
            for bytes in await_keys(member, &keys, monitor, deadline)? {
                who.push(serde_json::from_slice(&bytes)?);
            }
        }
        store.set(WHO, &serde_json::to_vec(&who)?)?;
        for key in keys {
            store.delete(key)?;
        }
        return Ok(who);
    }
    store.set(&format!("{WHO}/{}", member.rank), &mine)?;
    let who = await_keys(member, &[WHO], monitor, deadline)?;
    Ok(serde_json::from_slice(&who[0])?)
}
