//! Reaches the control store: hosts it if this node should, and otherwise waits for it.
//!
//! ```text
//!   endpoint, key ─▶ the store's possible addresses ─────────▶ host it at the first free one ─┐
//!                    (one, or those derived from a Slurm step)  find it at one of them ───────┴▶ Reached
//! ```
//! Agents of one machine that meet on loopback and have no key share one that the host creates ([`user_key`]). Between
//! machines, a key has to be given.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use drumline_rendezvous::user_key::{self, Joined, KeyFile, MeetingPlace};
use drumline_rendezvous::{
    Hello, InitError, JobKey, Role, ServerOptions, Store, StoreError, TcpStore, TcpStoreServer,
    derived_ports, slurm_job,
};
use rustix::process::Signal;

use super::control::Address;
use super::signals::asks_to_stop;
use super::waiting::LONG_WAIT;
use super::{AgentEvent, EventChannel, Interruptible};
use crate::LaunchError;
use crate::plan::{LaunchPlan, Rendezvous, split_endpoint};

/// The key in the control store that holds the job's name.
const JOB: &str = "drumline/job";
/// How long to wait until a host's name resolves: the names of a cluster's new machines take a while. Not longer, as
/// the name may be wrong.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(60);

/// A control store that this node is connected to.
#[derive(Debug)]
pub(crate) struct Reached {
    /// The server, if this node hosts the store.
    pub(super) server: Option<TcpStoreServer>,
    pub(super) store: TcpStore,
    pub(super) address: Address,
    /// The store's host, as the user gave it.
    pub(super) host: String,
    /// The shared key file for other agents of this machine, if this node wrote it.
    pub(super) key_file: Option<KeyFile>,
}

/// Reaches the control store. A stop signal interrupts it, and a long wait is announced.
pub(super) fn reach(
    plan: &LaunchPlan,
    key: Option<JobKey>,
    channel: EventChannel<'_>,
    say: &dyn Fn(&str),
) -> Result<Interruptible<Reached>, LaunchError> {
    let (host, port) = endpoint(plan)?;
    let sender = channel.sender.clone();
    let thread_plan = plan.clone();
    let thread_host = host.clone();
    let connect = move || {
        let reached = host_or_connect(&thread_plan, thread_host, port, key);
        drop(sender.send(AgentEvent::Reached(Box::new(reached))));
    };
    std::thread::Builder::new()
        .name("drumline-connect".to_string())
        .spawn(connect)
        .map_err(LaunchError::system("start a thread of the agent"))?;
    let mut patience = LONG_WAIT;
    loop {
        match channel.inbox.recv_timeout(patience) {
            Ok(AgentEvent::Reached(reached)) => return reached.map(Box::new).map(Interruptible::Done),
            // This signal is for the workers, and there are none yet.
            Ok(AgentEvent::Signal(signal)) if !asks_to_stop(plan, signal) => {}
            Ok(AgentEvent::Signal(signal)) => return Ok(Interruptible::Stopped(signal)),
            Ok(AgentEvent::LeaderGone) => return Ok(Interruptible::Stopped(Signal::HUP)),
            Err(RecvTimeoutError::Timeout) if patience == LONG_WAIT => {
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

/// Where the control store may be, and its key.
struct StoreTarget {
    host: String,
    /// The ports on which the store may listen, in the order in which they are tried.
    ports: Vec<u16>,
    key: JobKey,
    /// The addresses for which agents of this machine share a key of their user; empty if a key was given.
    by_user_key: Vec<SocketAddr>,
    /// The job from whose name the ports are derived, if they are.
    job: Option<String>,
}

impl StoreTarget {
    fn new(plan: &LaunchPlan, host: String, port: u16, key: Option<JobKey>) -> Self {
        let mut ports = vec![port];
        let by_user_key = if key.is_none() { loopback_addresses(&host, port) } else { Vec::new() };
        let mut key = match key {
            Some(key) => key,
            // Each agent draws one; the host's counts.
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

    fn meeting_place(&self) -> MeetingPlace<'_> {
        MeetingPlace { addrs: &self.by_user_key, job: self.job.as_deref() }
    }

    fn endpoints(&self, host: &str) -> Vec<String> {
        self.ports.iter().map(|port| host_and_port(host, *port)).collect()
    }

    /// Connects to the store on another agent's host.
    fn join(self, deadline: Instant) -> Result<Reached, LaunchError> {
        let endpoint = host_and_port(&self.host, self.ports[0]);
        let hello = Hello::new(Role::Store);
        let (store, address) = if self.by_user_key.is_empty() {
            let store = TcpStore::connect_first(&self.endpoints(&self.host), &self.key, hello, deadline);
            let store = store.map_err(unreachable(&endpoint))?;
            let endpoint = host_and_port(&self.host, store.server_addr().port());
            (store, Address { endpoint, key: self.key })
        } else {
            let joined = user_key::join(&hello, self.meeting_place(), deadline);
            let Joined { store, key } = joined.map_err(|error| match error {
                InitError::Store(source) => LaunchError::Reach { endpoint, source },
                other => LaunchError::UserKey(other),
            })?;
            let endpoint = store.server_addr().to_string();
            (store, Address { endpoint, key })
        };
        Ok(Reached { server: None, store, address, host: self.host, key_file: None })
    }

    /// Connects to the store that this agent hosts.
    fn host(self, server: TcpStoreServer, deadline: Instant) -> Result<Reached, LaunchError> {
        let key_file = if self.by_user_key.is_empty() {
            None
        } else {
            let published = KeyFile::publish(self.meeting_place(), server.local_addr(), &self.key);
            Some(published.map_err(LaunchError::UserKey)?)
        };
        let address = Address { endpoint: own_address(&server), key: self.key };
        let store = address.connect(deadline).map_err(unreachable(&address.endpoint))?;
        Ok(Reached { server: Some(server), store, address, host: self.host, key_file })
    }
}

fn unreachable(endpoint: &str) -> impl FnOnce(StoreError) -> LaunchError {
    move |source| LaunchError::Reach { endpoint: endpoint.to_string(), source }
}

fn host_or_connect(
    plan: &LaunchPlan,
    host: String,
    port: u16,
    key: Option<JobKey>,
) -> Result<Reached, LaunchError> {
    let deadline = Instant::now() + plan.join_timeout;
    wait_for_name(&host, deadline.min(Instant::now() + RESOLVE_TIMEOUT));
    let target = StoreTarget::new(plan, host, port, key);
    let reached = match host_if_ours(plan, &target)? {
        Some(server) => target.host(server, deadline)?,
        None => target.join(deadline)?,
    };
    let Reached { store, address, .. } = &reached;
    if reached.server.is_some() {
        store.set(JOB, plan.run_id.as_bytes()).map_err(unreachable(&address.endpoint))?;
    } else {
        let job = store.get(JOB, Instant::now() + plan.contact.read_timeout);
        agree_on_job(&job.map_err(unreachable(&address.endpoint))?, plan)?;
    }
    Ok(reached)
}

/// Waits until a host's name resolves. If it never does, the following connection attempt returns the error.
fn wait_for_name(host: &str, deadline: Instant) {
    while (host, 0).to_socket_addrs().is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Hosts the control store if this node should.
fn host_if_ours(plan: &LaunchPlan, target: &StoreTarget) -> Result<Option<TcpStoreServer>, LaunchError> {
    let is_host = match &plan.rendezvous {
        Rendezvous::Dynamic { conf, .. } => conf.is_host,
        _ => Some(plan.node_rank == 0),
    };
    if is_host == Some(false) {
        return Ok(None);
    }
    let addrs = target.endpoints(&listen_host(&target.host));
    match TcpStoreServer::bind_first(&addrs, &target.key, ServerOptions::default()) {
        Ok(server) => Ok(Some(server)),
        // Another agent of this machine hosts it already, or the address belongs to another machine.
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

/// The address on which to listen for `host`. A machine's own name often resolves to loopback on that machine, where
/// the others could not reach it. Then the result is the wildcard address.
fn listen_host(host: &str) -> String {
    let is_named = host.parse::<IpAddr>().is_err() && host != "localhost";
    let mut found = (host, 0).to_socket_addrs().into_iter().flatten().peekable();
    if is_named && found.peek().is_some() && found.all(|addr| addr.ip().is_loopback()) {
        return Ipv4Addr::UNSPECIFIED.to_string();
    }
    host.to_string()
}

/// The loopback addresses of a host; none if other machines may be meant.
fn loopback_addresses(host: &str, port: u16) -> Vec<SocketAddr> {
    let host = listen_host(host);
    let found: Vec<_> = (host.as_str(), port).to_socket_addrs().into_iter().flatten().collect();
    if found.iter().all(|addr| addr.ip().is_loopback()) { found } else { Vec::new() }
}

/// The address at which this process reaches its own server.
fn own_address(server: &TcpStoreServer) -> String {
    let addr = server.local_addr();
    let ip = if addr.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { addr.ip() };
    host_and_port(&ip.to_string(), addr.port())
}

pub(super) fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Two jobs that use the same address by mistake must not become one.
fn agree_on_job(job: &[u8], plan: &LaunchPlan) -> Result<(), LaunchError> {
    if job == plan.run_id.as_bytes() {
        return Ok(());
    }
    let theirs = String::from_utf8_lossy(job).into_owned();
    Err(LaunchError::OtherJob { ours: plan.run_id.clone(), theirs })
}
