//! The rendezvous: from an address and a place in the job to a [`Member`] with a store.
//!
//! ```text
//!  method, options, environment ─▶ Place (pure: `place`) ─▶ host the store if we should ─▶ connect ─▶ Member
//! ```
//! `env://` takes everything from variables, `tcp://host:port` names the store, `file:///path` names a file on a disk
//! that all ranks share, into which rank 0 writes the address of its store. On one machine, ranks that were given no
//! key share one that rank 0 creates ([`user_key`](crate::user_key)). Not here: what the members then do.

mod error;
mod meeting_file;
mod method;
mod place;

pub use error::InitError;
pub use meeting_file::MeetingFileError;
pub use method::MethodError;

use crate::JobKey;
use crate::events;
use crate::handshake::{Hello, Role, this_host};
use crate::resolve::resolve;
use crate::server::{ServerOptions, TcpStoreServer};
use crate::store::Store;
use crate::store::error::StoreError;
use crate::store::tcp::TcpStore;
use crate::user_key::{self, Joined, KeyFile, MeetingPlace};
use meeting_file::MeetingFile;
use method::Method;
use place::Place;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the host of the store waits for the others to leave before it ends: through the store they learn of each
/// other's death.
const LINGER: Duration = Duration::from_secs(30);
/// The same after a failure: time for the last messages to reach the others, who have nothing more to wait for.
const LINGER_ABANDONED: Duration = Duration::from_millis(300);

/// The shortest time limit for the store's first answer, however late the connection was made.
const PROMPT: Duration = Duration::from_secs(1);

/// Settings that override the environment.
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// The rank of this process.
    pub rank: Option<usize>,
    /// Number of processes.
    pub world_size: Option<usize>,
    /// Time limit of the rendezvous; `None` takes `DRUMLINE_TIMEOUT`, default 300 seconds.
    pub timeout: Option<Duration>,
    /// The job key; `None` takes `DRUMLINE_JOB_KEY_FILE`, or on one machine a key that rank 0 creates.
    pub key: Option<JobKey>,
}

/// One process of a job, after the rendezvous. Dropping it says goodbye.
#[derive(Debug)]
#[non_exhaustive]
pub struct Member {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// The rank of this process on its node; the rank itself if unknown (right on one node).
    pub local_rank: usize,
    /// Number of processes on this node, if known.
    pub local_world_size: Option<usize>,
    /// The number of the round.
    pub round: u32,
    /// Which meeting of the round this is, from 1; see [`events`] for what belongs to one meeting only.
    pub incarnation: u64,
    /// The name of this machine.
    pub host: String,
    /// The job's secret.
    pub key: JobKey,
    /// The store that all ranks share.
    pub store: Arc<dyn Store>,
    /// The address from which this process reached the store; it listens there and nowhere else.
    pub listen_ip: IpAddr,
    /// Default time limit of a call.
    pub timeout: Duration,
    client: Option<Arc<TcpStore>>,
    hosted: Option<TcpStoreServer>,
    meeting_file: Option<MeetingFile>,
    key_file: Option<KeyFile>,
    abandoned: AtomicBool,
}

/// Joins the other ranks by `method`: `env://`, `tcp://host:port` or `file:///path`, the last two optionally with
/// `?rank=R&world_size=W`.
///
/// ```
/// use drumline_rendezvous::{InitOptions, init};
/// let options = InitOptions { rank: Some(0), world_size: Some(1), ..Default::default() };
/// let member = init("env://", options)?;
/// member.store.set("colour", b"red")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn init(method: &str, options: InitOptions) -> Result<Member, InitError> {
    let began = Instant::now();
    let method = Method::parse(method)?;
    let env = |name: &str| std::env::var(name).ok();
    let place = Place::find(&env, &method, &options)?;
    let key = match options.key {
        Some(key) => Some(key),
        None => Some(JobKey::from_env()?).filter(JobKey::is_secret),
    };
    let deadline = began + place.time_to_meet;
    match method {
        Method::File { path, .. } => meet_by_file(&path, place, deadline),
        _ => meet(place, key, deadline),
    }
}

/// [`init`] with `env://`: uses torchrun's variables, or those of Slurm or MPI without a launcher. Without any of them,
/// this process is a job by itself.
pub fn from_env() -> Result<Member, InitError> {
    init("env://", InitOptions::default())
}

/// The number of ranks of the job in which [`from_env`] would make this process a rank, without joining it; 1 without a
/// job.
pub fn world_size_from_env() -> Result<usize, InitError> {
    let env = |name: &str| std::env::var(name).ok();
    Ok(Place::find(&env, &Method::parse("env://")?, &InitOptions::default())?.world_size)
}

fn meet(place: Place, key: Option<JobKey>, deadline: Instant) -> Result<Member, InitError> {
    let Some(master) = place.master.clone() else { return Err(place::no_master()) };
    let addrs = master.addrs();
    let given = master.given;
    let with_origin = |error| match error {
        InitError::Store(source @ StoreError::Unresolved { .. }) => InitError::Host { given, source },
        other => other,
    };
    let member = match key {
        Some(key) => {
            let key = master.derived_for.map_or_else(|| key.clone(), |job| key.for_job(&job));
            meet_at(&addrs, place, key, deadline)
        }
        None => meet_without_key(&addrs, place, deadline),
    };
    member.map_err(with_origin)
}

/// Joins at the first usable address: rank 0 skips those that are in use, and the others skip those whose server does
/// not prove the job key.
fn meet_at(addrs: &[String], place: Place, key: JobKey, deadline: Instant) -> Result<Member, InitError> {
    if !place.is_host() {
        let client = TcpStore::connect_first(addrs, &key, place.hello(), deadline)?;
        let client = client.prompt_within(place.timeout);
        return place.member(key, client, Hosting::default(), deadline);
    }
    let server = place.host_first(addrs, &key, deadline)?;
    let client = place.connect(&server.local_addr().to_string(), &key, deadline)?;
    place.member(key, client, Hosting { server: Some(server), ..Hosting::default() }, deadline)
}

/// On one machine, rank 0 creates a key for all. Between machines there is none, and the error says so.
fn meet_without_key(given: &[String], place: Place, deadline: Instant) -> Result<Member, InitError> {
    let addrs = resolve(&given[0], deadline)?;
    let is_one_machine =
        addrs.iter().all(|addr| addr.ip().is_loopback()) || place.local_world_size == Some(place.world_size);
    if !is_one_machine || place.agent_hosts {
        return meet_at(&given[..1], place, JobKey::open(), deadline);
    }
    let job = place.master.as_ref().and_then(|master| master.derived_for.clone());
    let place_of_key = MeetingPlace { addrs: &addrs, job: job.as_deref() };
    if !place.is_host() {
        let Joined { store, key } = user_key::join(&place.hello(), place_of_key, deadline)?;
        let store = store.prompt_within(place.timeout);
        return place.member(key, store, Hosting::default(), deadline);
    }
    let key = JobKey::random();
    let server = place.host_somewhere(&addrs, &key)?;
    let listens = server.local_addr();
    let is_alone = place.world_size == 1;
    let key_file = if is_alone { None } else { Some(KeyFile::publish(place_of_key, listens, &key)?) };
    let client = place.connect(&listens.to_string(), &key, deadline)?;
    place.member(key, client, Hosting { server: Some(server), key_file, ..Hosting::default() }, deadline)
}

/// What the host of the store keeps for the others.
#[derive(Debug, Default)]
struct Hosting {
    server: Option<TcpStoreServer>,
    file: Option<MeetingFile>,
    key_file: Option<KeyFile>,
}

/// Joins through a file. It holds a secret for this meeting, so any address may be used.
fn meet_by_file(path: &std::path::Path, place: Place, deadline: Instant) -> Result<Member, InitError> {
    if place.rank == 0 {
        let key = JobKey::random();
        let server = meeting_file::own_addresses().iter().find_map(|ip| place.host((*ip, 0), &key).ok());
        let server = server.map_or_else(|| place.host("127.0.0.1:0", &key), Ok)?;
        let file = MeetingFile::publish(path, server.local_addr(), &key)?;
        let client = place.connect(&server.local_addr().to_string(), &key, deadline)?;
        return place.member(
            key,
            client,
            Hosting { server: Some(server), file: Some(file), key_file: None },
            deadline,
        );
    }
    let found = meeting_file::find(path, deadline)?;
    let client = place.connect(&found.addr.to_string(), &found.key, deadline);
    let client = client.map_err(|error| found.explain(error))?;
    place.member(found.key, client, Hosting::default(), deadline)
}

impl Place {
    fn host(&self, addr: impl std::net::ToSocketAddrs, key: &JobKey) -> Result<TcpStoreServer, InitError> {
        let options = ServerOptions { world_size: Some(self.world_size), round: self.round };
        Ok(TcpStoreServer::bind(addr, key, options)?)
    }

    /// Listens on the first of these addresses (`host:port`) that is free.
    fn host_first(
        &self,
        addrs: &[String],
        key: &JobKey,
        deadline: Instant,
    ) -> Result<TcpStoreServer, InitError> {
        resolve(&addrs[0], deadline)?;
        let options = ServerOptions { world_size: Some(self.world_size), round: self.round };
        TcpStoreServer::bind_first(addrs, key, options).map_err(|source| match addrs {
            [_, _, ..] if source.is_port_taken() => InitError::PortsTaken { addrs: addrs.join(", "), source },
            _ => source.into(),
        })
    }

    /// Listens on one of these addresses. If the port was derived and is in use, listens on any other: the key file
    /// says which one.
    fn host_somewhere(&self, addrs: &[SocketAddr], key: &JobKey) -> Result<TcpStoreServer, InitError> {
        match self.host(addrs, key) {
            Err(InitError::Store(error))
                if error.is_port_taken()
                    && self.master.as_ref().is_some_and(|master| master.derived_for.is_some()) =>
            {
                let any: Vec<_> = addrs.iter().map(|addr| SocketAddr::new(addr.ip(), 0)).collect();
                self.host(&any[..], key)
            }
            other => other,
        }
    }

    fn connect(&self, addr: &str, key: &JobKey, deadline: Instant) -> Result<TcpStore, InitError> {
        Ok(TcpStore::connect(addr, key, self.hello(), deadline)?.prompt_within(self.timeout))
    }

    fn hello(&self) -> Hello {
        Hello::new(Role::Store).member(self.rank, self.world_size).round(self.round)
    }

    fn member(
        self,
        key: JobKey,
        client: TcpStore,
        hosting: Hosting,
        deadline: Instant,
    ) -> Result<Member, InitError> {
        let client = Arc::new(client);
        let prompt = Instant::now() + PROMPT;
        let incarnation = events::incarnation_of(&*client, self.rank, deadline.max(prompt))?;
        Ok(Member {
            rank: self.rank,
            world_size: self.world_size,
            local_rank: self.local_rank,
            local_world_size: self.local_world_size,
            round: self.round,
            incarnation,
            host: this_host(),
            key,
            store: client.clone(),
            listen_ip: client.local_ip(),
            timeout: self.timeout,
            client: Some(client),
            hosted: hosting.server,
            meeting_file: hosting.file,
            key_file: hosting.key_file,
            abandoned: AtomicBool::new(false),
        })
    }
}

impl Member {
    /// A member of a job whose ranks are threads of this process and share `store`.
    pub fn in_process(
        rank: usize,
        world_size: usize,
        store: Arc<dyn Store>,
        key: JobKey,
        timeout: Duration,
    ) -> Member {
        // There is no server that counts meetings. A store that fails reports it at the first call.
        let incarnation = store.add(&events::incarnation_key(rank), 1).unwrap_or(1).unsigned_abs();
        Member {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: Some(world_size),
            round: 0,
            incarnation,
            host: this_host(),
            key,
            store,
            listen_ip: std::net::Ipv4Addr::LOCALHOST.into(),
            timeout,
            client: None,
            hosted: None,
            meeting_file: None,
            key_file: None,
            abandoned: AtomicBool::new(false),
        }
    }
}

impl Member {
    /// Whether this process hosts the store, which then ends with it.
    pub fn hosts_store(&self) -> bool {
        self.hosted.is_some()
    }

    /// Marks the job as failed and reported: dropping this member then waits for no other.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Member {
    /// A rank that panics says no goodbye, so that the others notice it; its store then ends with it.
    fn drop(&mut self) {
        self.meeting_file.take();
        self.key_file.take();
        if std::thread::panicking() {
            return;
        }
        if let Some(client) = &self.client {
            client.bye();
        }
        if let Some(server) = self.hosted.take() {
            let abandoned = self.abandoned.load(Ordering::Relaxed);
            server.linger(if abandoned { LINGER_ABANDONED } else { LINGER });
        }
    }
}
