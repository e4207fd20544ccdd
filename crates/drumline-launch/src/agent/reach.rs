//! The way to the control store: hosted if that falls to this node, waited for if not.
//!
//! ```text
//!   endpoint, key ─▶ the addresses at which the store may be ─▶ host it at the first free one ─┐
//!                    (one, or those derived from a Slurm step)  find it at one of them ────────┴▶ Reached
//! ```
//! Agents of one machine that meet by loopback and were given no key share one that the host makes
//! ([`user_key`]); between machines a key has to be given.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use drumline_rendezvous::user_key::{self, Asked, Joined, KeyFile};
use drumline_rendezvous::{
    Hello, InitError, JobKey, Role, ServerOptions, Store, StoreError, TcpStore, TcpStoreServer,
    derived_ports, slurm_job,
};
use rustix::process::Signal;

use super::Happening;
use super::control::Address;
use super::signals::asks_to_stop;
use super::waiting::LONG_WAIT;
use crate::LaunchError;
use crate::plan::{LaunchPlan, Rendezvous, split_endpoint};

/// The name of the job that meets in a control store.
const JOB: &str = "drumline/job";
/// How long a host's name may take to become known, as those of a cluster's fresh machines do; no longer, as it may be
/// wrong.
const NAMED: Duration = Duration::from_secs(60);

/// A control store that answers.
#[derive(Debug)]
pub(crate) struct Reached {
    /// Here, if this node hosts it.
    pub(super) server: Option<TcpStoreServer>,
    pub(super) store: TcpStore,
    pub(super) address: Address,
    /// Its host, as it was given.
    pub(super) host: String,
    /// The key for the others of this machine, if this node made it.
    pub(super) key_file: Option<KeyFile>,
}

/// What came of it.
pub(super) enum Reaching {
    Reached(Box<Reached>),
    Stopped(Signal),
}

/// Reaches the control store. Signals are heeded meanwhile, and what takes long is said.
pub(super) fn reach(
    plan: &LaunchPlan,
    key: Option<JobKey>,
    (events, happenings): (&Sender<Happening>, &Receiver<Happening>),
    say: &dyn Fn(&str),
) -> Result<Reaching, LaunchError> {
    let endpoint = endpoint(plan)?;
    let (theirs, owned) = (events.clone(), (plan.clone(), endpoint.clone()));
    let reaching = move || {
        let reached = hosted_or_met(&owned.0, owned.1, key);
        drop(theirs.send(Happening::Reached(Box::new(reached))));
    };
    std::thread::Builder::new()
        .name("drumline-connect".to_string())
        .spawn(reaching)
        .map_err(LaunchError::system("start a thread of the agent"))?;
    let mut patience = LONG_WAIT;
    loop {
        match happenings.recv_timeout(patience) {
            Ok(Happening::Reached(reached)) => return reached.map(Box::new).map(Reaching::Reached),
            // A request to the workers, of whom there are none.
            Ok(Happening::Signal(signal)) if !asks_to_stop(plan, signal) => {}
            Ok(Happening::Signal(signal)) => return Ok(Reaching::Stopped(signal)),
            Ok(Happening::LeaderGone) => return Ok(Reaching::Stopped(Signal::HUP)),
            Err(RecvTimeoutError::Timeout) if patience == LONG_WAIT => {
                let (host, port) = &endpoint;
                say(&format!(
                    "waiting for the first node at {host} port {port}, for up to {:?}",
                    plan.join_timeout
                ));
                patience = Duration::MAX;
            }
            _ => {}
        }
    }
}

fn endpoint(plan: &LaunchPlan) -> Result<(String, u16), LaunchError> {
    Ok(match &plan.rendezvous {
        Rendezvous::Standalone => (Ipv4Addr::LOCALHOST.to_string(), 0),
        Rendezvous::Static { addr, port } => (addr.clone(), *port),
        Rendezvous::Dynamic { endpoint, .. } => split_endpoint(endpoint, None)?,
    })
}

/// Where the nodes meet, and by which secret.
struct Meeting {
    host: String,
    /// The ports at which the store may be, in the order in which they are tried.
    ports: Vec<u16>,
    key: JobKey,
    /// The addresses for which agents of this machine share a key of their user's; none where a key was given.
    by_user_key: Vec<SocketAddr>,
    /// The job from which the ports follow, where they do.
    job: Option<String>,
}

impl Meeting {
    fn new(plan: &LaunchPlan, host: String, port: u16, key: Option<JobKey>) -> Self {
        let mut ports = vec![port];
        let by_user_key = if key.is_none() { loopback_addresses(&host, port) } else { Vec::new() };
        let mut key = match key {
            Some(key) => key,
            // Drawn by each; that of the host counts.
            None if !by_user_key.is_empty() => JobKey::random(),
            None => JobKey::open(),
        };
        let job = plan.slurm_step.as_deref().map(slurm_job);
        if let (Some(job), true) = (&job, by_user_key.is_empty()) {
            ports = derived_ports(port).to_vec();
            key = key.for_job(job);
        }
        Self { host, ports, key, by_user_key, job }
    }

    fn asked(&self) -> Asked<'_> {
        Asked { addrs: &self.by_user_key, job: self.job.as_deref() }
    }

    fn endpoints(&self, host: &str) -> Vec<String> {
        self.ports.iter().map(|port| joined(host, *port)).collect()
    }

    /// The store as one who does not host it reaches it.
    fn join(self, deadline: Instant) -> Result<Reached, LaunchError> {
        let endpoint = joined(&self.host, self.ports[0]);
        let hello = Hello::new(Role::Store);
        let (store, address) = if self.by_user_key.is_empty() {
            let store = TcpStore::connect_first(&self.endpoints(&self.host), &self.key, hello, deadline);
            let store = store.map_err(cannot(&endpoint))?;
            let endpoint = joined(&self.host, store.server_addr().port());
            (store, Address { endpoint, key: self.key })
        } else {
            let joined = user_key::join(&hello, self.asked(), deadline);
            let Joined { store, key } = joined.map_err(|error| match error {
                InitError::Store(source) => LaunchError::Reach { endpoint, source },
                other => LaunchError::UserKey(other),
            })?;
            let endpoint = store.server_addr().to_string();
            (store, Address { endpoint, key })
        };
        Ok(Reached { server: None, store, address, host: self.host, key_file: None })
    }

    /// The store as its host reaches it.
    fn host(self, server: TcpStoreServer, deadline: Instant) -> Result<Reached, LaunchError> {
        let key_file = if self.by_user_key.is_empty() {
            None
        } else {
            let published = KeyFile::publish(self.asked(), server.local_addr(), &self.key);
            Some(published.map_err(LaunchError::UserKey)?)
        };
        let address = Address { endpoint: own_address(&server), key: self.key };
        let store = address.connect(deadline).map_err(cannot(&address.endpoint))?;
        Ok(Reached { server: Some(server), store, address, host: self.host, key_file })
    }
}

fn cannot(endpoint: &str) -> impl FnOnce(StoreError) -> LaunchError {
    move |source| LaunchError::Reach { endpoint: endpoint.to_string(), source }
}

fn hosted_or_met(
    plan: &LaunchPlan,
    (host, port): (String, u16),
    key: Option<JobKey>,
) -> Result<Reached, LaunchError> {
    let deadline = Instant::now() + plan.join_timeout;
    wait_for_name(&host, deadline.min(Instant::now() + NAMED));
    let meeting = Meeting::new(plan, host, port, key);
    let reached = match host_if_ours(plan, &meeting)? {
        Some(server) => meeting.host(server, deadline)?,
        None => meeting.join(deadline)?,
    };
    let Reached { store, address, .. } = &reached;
    if reached.server.is_some() {
        store.set(JOB, plan.run_id.as_bytes()).map_err(cannot(&address.endpoint))?;
    } else {
        let job = store.get(JOB, Instant::now() + plan.contact.read_timeout);
        agree_on_job(&job.map_err(cannot(&address.endpoint))?, plan)?;
    }
    Ok(reached)
}

/// Waits until a host's name means something; if it never does, whoever uses it says so.
fn wait_for_name(host: &str, deadline: Instant) {
    while (host, 0).to_socket_addrs().is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Hosts the control store if that falls to this node.
fn host_if_ours(plan: &LaunchPlan, meeting: &Meeting) -> Result<Option<TcpStoreServer>, LaunchError> {
    let is_host = match &plan.rendezvous {
        Rendezvous::Dynamic { conf, .. } => conf.is_host,
        _ => Some(plan.node_rank == 0),
    };
    if is_host == Some(false) {
        return Ok(None);
    }
    let addrs = meeting.endpoints(&listen_host(&meeting.host));
    match TcpStoreServer::bind_first(&addrs, &meeting.key, ServerOptions::default()) {
        Ok(server) => Ok(Some(server)),
        // Another agent of this machine was first, or the address is another machine's.
        Err(StoreError::Bind { source, .. }) if is_host.is_none() && is_elsewhere(source.kind()) => Ok(None),
        Err(source) if source.is_port_taken() && addrs.len() > 1 => {
            Err(LaunchError::PortsTaken { addrs: addrs.join(", "), source })
        }
        Err(error) => Err(LaunchError::Store(error)),
    }
}

fn is_elsewhere(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable)
}

/// Where to listen for `host`. A machine's own name often means loopback on that machine itself, where the others would
/// not reach it: then it is all addresses.
fn listen_host(host: &str) -> String {
    let is_named = host.parse::<IpAddr>().is_err() && host != "localhost";
    let mut found = (host, 0).to_socket_addrs().into_iter().flatten().peekable();
    if is_named && found.peek().is_some() && found.all(|addr| addr.ip().is_loopback()) {
        return Ipv4Addr::UNSPECIFIED.to_string();
    }
    host.to_string()
}

/// The addresses of a host at which only this machine meets; none if others may be meant.
fn loopback_addresses(host: &str, port: u16) -> Vec<SocketAddr> {
    let host = listen_host(host);
    let found: Vec<_> = (host.as_str(), port).to_socket_addrs().into_iter().flatten().collect();
    if found.iter().all(|addr| addr.ip().is_loopback()) { found } else { Vec::new() }
}

/// How this process reaches its own server.
fn own_address(server: &TcpStoreServer) -> String {
    let addr = server.local_addr();
    let ip = if addr.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { addr.ip() };
    joined(&ip.to_string(), addr.port())
}

pub(super) fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Two jobs that were told the same address must not become one.
fn agree_on_job(job: &[u8], plan: &LaunchPlan) -> Result<(), LaunchError> {
    if job == plan.run_id.as_bytes() {
        return Ok(());
    }
    let theirs = String::from_utf8_lossy(job).into_owned();
    Err(LaunchError::OtherJob { ours: plan.run_id.clone(), theirs })
}
