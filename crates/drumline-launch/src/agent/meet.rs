//! How an agent comes to its coordinator: who hosts the control store, and under which address this node is reached.
//!
//! ```text
//!   one node ─▶ a coordinator in this process, and no socket
//!   static ───▶ node 0 hosts at the given address ──┐
//!   dynamic ──▶ whoever has that address hosts ─────┴▶ the others connect
//! ```

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use drumline_rendezvous::{JobKey, ServerOptions, Store, StoreError, TcpStore, TcpStoreServer, port_holder};
use rustix::process::Signal;

use super::control::{Address, Control, Own};
use super::signals::asks_to_stop;
use super::{Happening, policy};
use crate::LaunchError;
use crate::membership::{AgentCard, AgentId, Door};
use crate::plan::{LaunchPlan, Rendezvous, split_endpoint};
use crate::ports::ReservedPort;
use crate::random::random_number;

/// The name of the job that meets in a control store.
const JOB: &str = "drumline/job";
/// How long a control store that is there may take to say whose it is.
const PROMPT: Duration = Duration::from_secs(10);

/// A node that has met the others, or has nobody to meet.
pub(super) struct Met {
    pub(super) card: AgentCard,
    pub(super) control: Control,
    pub(super) key: JobKey,
    /// Where this node's workers' store listens, if it falls to this node.
    pub(super) listen: IpAddr,
    /// Whether other nodes may take part.
    pub(super) alone: bool,
    pub(super) _ports: [ReservedPort; 2],
}

/// What came of it.
pub(super) enum Meeting {
    Met(Box<Met>),
    Stopped(Signal),
}

/// Meets the coordinator. Signals are heeded meanwhile.
pub(super) fn meet(
    plan: &LaunchPlan,
    key: Option<JobKey>,
    (events, happenings): (&Sender<Happening>, &Receiver<Happening>),
) -> Result<Meeting, LaunchError> {
    let (host, port) = match &plan.rendezvous {
        _ if plan.nodes.max == 1 => return alone(plan, events).map(Box::new).map(Meeting::Met),
        Rendezvous::Standalone => (Ipv4Addr::LOCALHOST.to_string(), 0),
        Rendezvous::Static { addr, port } => (addr.clone(), *port),
        Rendezvous::Dynamic { endpoint, .. } => split_endpoint(endpoint, None)?,
    };
    let key = match key {
        Some(key) => key,
        None => JobKey::from_env()?,
    };
    let server = host_if_ours(plan, &host, port, &key)?;
    let endpoint = server.as_ref().map_or_else(|| joined(&host, port), own_address);
    let address = Address { endpoint, key };
    let store = match connect(plan, &address, (events, happenings))? {
        Connected::Store(store) => *store,
        Connected::Stopped(signal) => return Ok(Meeting::Stopped(signal)),
    };
    agree_on_job(&store, &plan.run_id, server.is_some())?;
    let listen = listen_ip(plan, server.as_ref(), &store)?;
    let seen_as = match &plan.local_addr {
        Some(addr) => addr.clone(),
        None if server.is_some() && !is_loopback(&host) => host,
        None => store.local_ip().to_string(),
    };
    let ports = [reserve(0)?, reserve(0)?];
    let card = card(plan, seen_as.clone(), [&ports[0], &ports[1]], &seen_as);
    let own = Own { id: card.id, events: events.clone() };
    let control = match server {
        Some(server) => {
            Control::here(own, policy::of(plan), plan.monitor_interval, Some((server, address.clone())))?
        }
        None => Control::there(own, address.clone())?,
    };
    let met = Met { card, control, key: address.key, listen, alone: false, _ports: ports };
    Ok(Meeting::Met(Box::new(met)))
}

/// A job of one node: its coordinator is in this process, and its workers' store on loopback.
fn alone(plan: &LaunchPlan, events: &Sender<Happening>) -> Result<Met, LaunchError> {
    let (addr, port) = match &plan.rendezvous {
        Rendezvous::Static { addr, port } => (addr.clone(), *port),
        _ => (Ipv4Addr::LOCALHOST.to_string(), 0),
    };
    let ports = [reserve(port)?, reserve(0)?];
    let listen = IpAddr::from(Ipv4Addr::LOCALHOST);
    let card = card(plan, addr, [&ports[0], &ports[1]], &listen.to_string());
    let own = Own { id: card.id, events: events.clone() };
    let control = Control::here(own, policy::alone(plan), plan.monitor_interval, None)?;
    Ok(Met { card, control, key: JobKey::random(), listen, alone: true, _ports: ports })
}

fn reserve(port: u16) -> Result<ReservedPort, LaunchError> {
    ReservedPort::reserve(port).map_err(|source| {
        let holder = port_holder(port).map_or_else(String::new, |holder| format!(": {holder}"));
        LaunchError::Port { port, holder, source }
    })
}

fn card(plan: &LaunchPlan, master_addr: String, ports: [&ReservedPort; 2], store: &str) -> AgentCard {
    let [master_port, store_port] = ports.map(ReservedPort::port);
    let is_static = matches!(plan.rendezvous, Rendezvous::Static { .. });
    AgentCard {
        id: AgentId(random_number()),
        host: super::this_host(),
        slots: plan.nproc,
        node_rank: is_static.then_some(plan.node_rank),
        door: Door { master_addr, master_port, store: joined(store, store_port) },
    }
}

/// Hosts the control store if that falls to this node.
fn host_if_ours(
    plan: &LaunchPlan,
    host: &str,
    port: u16,
    key: &JobKey,
) -> Result<Option<TcpStoreServer>, LaunchError> {
    let is_host = match &plan.rendezvous {
        Rendezvous::Dynamic { conf, .. } => conf.is_host,
        _ => Some(plan.node_rank == 0),
    };
    if is_host == Some(false) {
        return Ok(None);
    }
    match TcpStoreServer::bind(listen_address(host, port), key, ServerOptions::default()) {
        Ok(server) => Ok(Some(server)),
        // Another agent of this machine was first, or the address is another machine's.
        Err(StoreError::Bind { source, .. }) if is_host.is_none() && is_elsewhere(source.kind()) => Ok(None),
        Err(error) => Err(LaunchError::Store(error)),
    }
}

fn is_elsewhere(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable)
}

/// Where to listen for `host`. A machine's own name often means loopback on that machine itself, where the others would
/// not reach it: then it is all addresses.
fn listen_address(host: &str, port: u16) -> String {
    let named = host.parse::<IpAddr>().is_err() && host != "localhost";
    let mut found = (host, port).to_socket_addrs().into_iter().flatten().peekable();
    if named && found.peek().is_some() && found.all(|addr| addr.ip().is_loopback()) {
        return joined(&Ipv4Addr::UNSPECIFIED.to_string(), port);
    }
    joined(host, port)
}

/// How this process reaches its own server.
fn own_address(server: &TcpStoreServer) -> String {
    let addr = server.local_addr();
    let ip = if addr.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { addr.ip() };
    joined(&ip.to_string(), addr.port())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The address on which the workers' store listens if it falls to this node.
fn listen_ip(
    plan: &LaunchPlan,
    server: Option<&TcpStoreServer>,
    store: &TcpStore,
) -> Result<IpAddr, LaunchError> {
    if let Some(addr) = &plan.local_addr {
        let found = (addr.as_str(), 0).to_socket_addrs().map_err(LaunchError::system("find --local-addr"))?;
        return Ok(found.map(|addr| addr.ip()).next().unwrap_or(store.local_ip()));
    }
    Ok(server.map_or(store.local_ip(), |server| server.local_addr().ip()))
}

enum Connected {
    Store(Box<TcpStore>),
    Stopped(Signal),
}

fn connect(
    plan: &LaunchPlan,
    address: &Address,
    (events, happenings): (&Sender<Happening>, &Receiver<Happening>),
) -> Result<Connected, LaunchError> {
    let (theirs, address) = (events.clone(), address.clone());
    let deadline = Instant::now() + plan.join_timeout;
    let connecting = move || drop(theirs.send(Happening::Connected(Box::new(address.connect(deadline)))));
    std::thread::Builder::new()
        .name("drumline-connect".to_string())
        .spawn(connecting)
        .map_err(LaunchError::system("start a thread of the agent"))?;
    loop {
        match happenings.recv() {
            Ok(Happening::Connected(store)) => {
                return store.map(Box::new).map(Connected::Store).map_err(LaunchError::Store);
            }
            // A request to the workers, of whom there are none.
            Ok(Happening::Signal(signal)) if !asks_to_stop(plan, signal) => {}
            Ok(Happening::Signal(signal)) => return Ok(Connected::Stopped(signal)),
            Ok(Happening::LeaderGone) => return Ok(Connected::Stopped(Signal::HUP)),
            _ => {}
        }
    }
}

/// Two jobs that were told the same address must not become one.
fn agree_on_job(store: &TcpStore, run_id: &str, is_host: bool) -> Result<(), LaunchError> {
    if is_host {
        return store.set(JOB, run_id.as_bytes()).map_err(LaunchError::Store);
    }
    let job = store.get(JOB, Instant::now() + PROMPT).map_err(LaunchError::Store)?;
    if job == run_id.as_bytes() {
        return Ok(());
    }
    let theirs = String::from_utf8_lossy(&job).into_owned();
    Err(LaunchError::OtherJob { ours: run_id.to_string(), theirs })
}
