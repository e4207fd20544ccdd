//! The meeting: from an address and a place in the job to a [`Member`] with a store.
//!
//! ```text
//!  method, options, environment ─▶ Place (pure: `place`) ─▶ host the store if it falls to us ─▶ connect ─▶ Member
//! ```
//! `env://` takes everything from variables, `tcp://host:port` names the store, `file:///path` names a file on a disk
//! that all ranks share, in which rank 0 writes where its store is. Not here: what the members then do.

mod error;
mod meeting_file;
mod method;
mod place;

pub use error::InitError;

use crate::JobKey;
use crate::handshake::{Hello, Role, this_host};
use crate::server::{ServerOptions, TcpStoreServer};
use crate::store::Store;
use crate::store::tcp::TcpStore;
use meeting_file::MeetingFile;
use method::Method;
use place::Place;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the host of the store waits for others to leave before it ends.
const LINGER: Duration = Duration::from_secs(5);

/// What is known beforehand; what is not given is taken from the environment.
#[derive(Debug, Clone)]
pub struct InitOptions {
    /// This process among all.
    pub rank: Option<usize>,
    /// Number of processes.
    pub world_size: Option<usize>,
    /// Time to meet.
    pub timeout: Duration,
    /// The job key.
    pub key: Option<JobKey>,
}

impl Default for InitOptions {
    fn default() -> Self {
        InitOptions { rank: None, world_size: None, timeout: Duration::from_secs(300), key: None }
    }
}

/// One process of a job that has met the others. Dropping it says goodbye.
#[derive(Debug)]
#[non_exhaustive]
pub struct Member {
    /// This process among all, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// This process among those of its node; the rank itself where nobody said (right on one node).
    pub local_rank: usize,
    /// Number of processes on this node, if known.
    pub local_world_size: Option<usize>,
    /// The round.
    pub round: u32,
    /// This machine.
    pub host: String,
    /// The job's secret, or the open key.
    pub key: JobKey,
    /// The store through which all meet.
    pub store: Arc<dyn Store>,
    /// The address from which this process reached the store; it listens there and nowhere else.
    pub listen_ip: IpAddr,
    /// Default deadline of a call.
    pub timeout: Duration,
    client: Option<Arc<TcpStore>>,
    hosted: Option<TcpStoreServer>,
    meeting_file: Option<MeetingFile>,
}

/// Meets the other ranks as `method` says: `env://`, `tcp://host:port` or `file:///path`, the last two with
/// `?rank=R&world_size=W` if wanted.
///
/// ```
/// use drumline_rendezvous::{InitOptions, init};
/// let options = InitOptions { rank: Some(0), world_size: Some(1), ..Default::default() };
/// let member = init("env://", options)?;
/// member.store.set("colour", b"red")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn init(method: &str, options: InitOptions) -> Result<Member, InitError> {
    let deadline = Instant::now() + options.timeout;
    let method = Method::parse(method)?;
    let key = match &options.key {
        Some(key) => key.clone(),
        None => JobKey::from_env()?,
    };
    let env = |name: &str| std::env::var(name).ok();
    let place = Place::find(&env, &method, &options)?;
    match method {
        Method::File { path, .. } => meet_by_file(&path, place, deadline),
        _ => meet(place, key, deadline),
    }
}

/// [`init`] with `env://`: torchrun's variables, or those of Slurm or MPI without a launcher.
pub fn from_env() -> Result<Member, InitError> {
    init("env://", InitOptions::default())
}

fn meet(place: Place, key: JobKey, deadline: Instant) -> Result<Member, InitError> {
    let Some((host, port)) = place.master.clone() else { return Err(place::no_master()) };
    let hosted = if place.is_host() { Some(place.host((host.as_str(), port), &key)?) } else { None };
    let addr = match &hosted {
        Some(server) => server.local_addr().to_string(),
        None if host.contains(':') => format!("[{host}]:{port}"),
        None => format!("{host}:{port}"),
    };
    let client = place.connect(&addr, &key, deadline)?;
    Ok(place.member(key, client, hosted, None))
}

/// The file holds a secret made for this meeting, so any address will do.
fn meet_by_file(path: &std::path::Path, place: Place, deadline: Instant) -> Result<Member, InitError> {
    if place.rank == 0 {
        let key = JobKey::random();
        let server = meeting_file::own_addresses().iter().find_map(|ip| place.host((*ip, 0), &key).ok());
        let server = server.map_or_else(|| place.host("127.0.0.1:0", &key), Ok)?;
        let file = MeetingFile::publish(path, server.local_addr(), &key)?;
        let client = place.connect(&server.local_addr().to_string(), &key, deadline)?;
        return Ok(place.member(key, client, Some(server), Some(file)));
    }
    let found = meeting_file::find(path, deadline)?;
    let client = place.connect(&found.addr.to_string(), &found.key, deadline);
    let client = client.map_err(|error| found.judge(error))?;
    Ok(place.member(found.key, client, None, None))
}

impl Place {
    fn host(&self, addr: impl std::net::ToSocketAddrs, key: &JobKey) -> Result<TcpStoreServer, InitError> {
        let options = ServerOptions { world_size: Some(self.world_size), round: self.round };
        Ok(TcpStoreServer::bind(addr, key, options)?)
    }

    fn connect(&self, addr: &str, key: &JobKey, deadline: Instant) -> Result<TcpStore, InitError> {
        let hello = Hello::new(Role::Store).member(self.rank, self.world_size).round(self.round);
        Ok(TcpStore::connect(addr, key, hello, deadline)?)
    }

    fn member(
        self,
        key: JobKey,
        client: TcpStore,
        hosted: Option<TcpStoreServer>,
        meeting_file: Option<MeetingFile>,
    ) -> Member {
        let client = Arc::new(client);
        Member {
            rank: self.rank,
            world_size: self.world_size,
            local_rank: self.local_rank,
            local_world_size: self.local_world_size,
            round: self.round,
            host: this_host(),
            key,
            store: client.clone(),
            listen_ip: client.local_ip(),
            timeout: self.timeout,
            client: Some(client),
            hosted,
            meeting_file,
        }
    }
}

impl Member {
    /// A member of a job whose ranks are threads of this process and meet in `store`.
    pub fn in_process(
        rank: usize,
        world_size: usize,
        store: Arc<dyn Store>,
        key: JobKey,
        timeout: Duration,
    ) -> Member {
        Member {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: Some(world_size),
            round: 0,
            host: this_host(),
            key,
            store,
            listen_ip: std::net::Ipv4Addr::LOCALHOST.into(),
            timeout,
            client: None,
            hosted: None,
            meeting_file: None,
        }
    }
}

impl Member {
    /// Whether this process hosts the store, which then ends with it.
    pub fn hosts_store(&self) -> bool {
        self.hosted.is_some()
    }
}

impl Drop for Member {
    /// A rank that panics says no goodbye, so that the others learn of it; its store then ends with it.
    fn drop(&mut self) {
        self.meeting_file.take();
        if std::thread::panicking() {
            return;
        }
        if let Some(client) = &self.client {
            client.bye();
        }
        if let Some(server) = self.hosted.take() {
            server.linger(LINGER);
        }
    }
}
