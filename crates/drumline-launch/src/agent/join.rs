//! How an agent joins its job: which node hosts the control store, and at which address this node is reached.
//!
//! ```text
//!   one node ─▶ the coordinator runs in this process, without a socket
//!   static ───▶ node 0 hosts the store at the given address ───┐
//!   dynamic ──▶ the node that has that address hosts it ───────┴▶ the others connect
//! ```

use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::time::Instant;

use drumline_rendezvous::user_key::KeyFile;
use drumline_rendezvous::{JobKey, Store, TcpStore, TcpStoreServer, port_holder};

use super::control::{AgentHandle, Control, RemoteCoordinator};
use super::liveness;
use super::reach::{Reached, host_and_port, reach};
use super::{AgentEvent, EventChannel, Interruptible, policy};
use crate::LaunchError;
use crate::membership::{AgentCard, AgentId, MeetingPoint};
use crate::plan::{Contact, LaunchPlan, Rendezvous};
use crate::ports::ReservedPort;
use crate::random::random_number;

/// The key in the control store under which its host publishes its liveness address.
const LIFE: &str = "drumline/life";

/// What an agent holds once it has joined its job.
pub(super) struct JoinedJob {
    pub(super) card: AgentCard,
    pub(super) control: Control,
    pub(super) key: JobKey,
    /// The address on which the workers' store listens, if this node hosts it.
    pub(super) listen: IpAddr,
    /// Whether the job has one node only.
    pub(super) is_single_node: bool,
    pub(super) _ports: [ReservedPort; 2],
    /// The liveness port, open until this process ends: so the other nodes see that it runs.
    pub(super) _life: Option<TcpListener>,
    /// The shared key file for other agents of this machine, if this agent wrote it.
    pub(super) _key_file: Option<KeyFile>,
}

/// Joins the job: finds or starts its coordinator. A stop signal interrupts it.
pub(super) fn join(
    plan: &LaunchPlan,
    key: Option<JobKey>,
    channel: EventChannel<'_>,
    say: &dyn Fn(&str),
) -> Result<Interruptible<JoinedJob>, LaunchError> {
    if plan.nodes.max == 1 {
        return join_single_node(plan, channel.sender).map(Box::new).map(Interruptible::Done);
    }
    let key = match key {
        Some(key) => Some(key),
        None => Some(JobKey::from_env()?).filter(JobKey::is_secret),
    };
    match reach(plan, key, channel, say)? {
        Interruptible::Done(reached) => {
            join_nodes(plan, *reached, channel.sender).map(Box::new).map(Interruptible::Done)
        }
        Interruptible::Stopped(signal) => Ok(Interruptible::Stopped(signal)),
    }
}

/// Joins a job of several nodes, whose control store this node has reached.
fn join_nodes(
    plan: &LaunchPlan,
    reached: Reached,
    events: &Sender<AgentEvent>,
) -> Result<JoinedJob, LaunchError> {
    let Reached { server, store, address, host, key_file } = reached;
    let listen = listen_ip(plan, server.as_ref(), &store)?;
    let own_addr = match &plan.local_addr {
        Some(addr) => addr.clone(),
        None if server.is_some() && !is_loopback(&host) => host,
        None => store.local_ip().to_string(),
    };
    let ports = [reserve(0)?, reserve(0)?];
    let life = liveness::listen_at(listen).map_err(LaunchError::system("listen for the other nodes"))?;
    let life_port = life.local_addr().map_err(LaunchError::system("listen for the other nodes"))?.port();
    let mut card = card(plan, own_addr.clone(), [&ports[0], &ports[1]], &own_addr);
    card.life = host_and_port(&own_addr, life_port);
    let own = AgentHandle { id: card.id, events: events.clone() };
    let key = address.key.clone();
    let control = match server {
        Some(server) => {
            store.set(LIFE, card.life.as_bytes()).map_err(LaunchError::Store)?;
            Control::local(own, policy::of(plan), plan.monitor_interval, Some((server, address)))?
        }
        None => {
            let Contact { read_timeout, heartbeat_timeout, host_timeout, .. } = plan.contact;
            // Waiting longer for one answer would leave no second attempt before the lease ends.
            let timeout = heartbeat_timeout.min(host_timeout / 4);
            // Without this address, the host's end is noticed only by its silence.
            let life = store.get(LIFE, Instant::now() + read_timeout).ok();
            let life = life.and_then(|address| String::from_utf8(address).ok());
            Control::remote(own, RemoteCoordinator { address, life, timeout })?
        }
    };
    Ok(JoinedJob {
        card,
        control,
        key,
        listen,
        is_single_node: false,
        _ports: ports,
        _life: Some(life),
        _key_file: key_file,
    })
}

/// Joins a job of one node: its coordinator runs in this process, and its workers' store listens on loopback.
fn join_single_node(plan: &LaunchPlan, events: &Sender<AgentEvent>) -> Result<JoinedJob, LaunchError> {
    let (addr, port) = match &plan.rendezvous {
        Rendezvous::Static { addr, port } => (addr.clone(), *port),
        _ => (Ipv4Addr::LOCALHOST.to_string(), 0),
    };
    let ports = [reserve(port)?, reserve(0)?];
    let listen = IpAddr::from(Ipv4Addr::LOCALHOST);
    let card = card(plan, addr, [&ports[0], &ports[1]], &listen.to_string());
    let own = AgentHandle { id: card.id, events: events.clone() };
    let control = Control::local(own, policy::single_node(plan), plan.monitor_interval, None)?;
    Ok(JoinedJob {
        card,
        control,
        key: JobKey::random(),
        listen,
        is_single_node: true,
        _ports: ports,
        _life: None,
        _key_file: None,
    })
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
        nodes: (plan.nodes.min, plan.nodes.max),
        host_timeout: plan.contact.host_timeout,
        life: String::new(),
        meeting_point: MeetingPoint { master_addr, master_port, store: host_and_port(store, store_port) },
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The address on which the workers' store listens, if this node hosts it.
fn listen_ip(
    plan: &LaunchPlan,
    server: Option<&TcpStoreServer>,
    store: &TcpStore,
) -> Result<IpAddr, LaunchError> {
    if let Some(addr) = &plan.local_addr {
        let found =
            (addr.as_str(), 0).to_socket_addrs().map_err(LaunchError::system("resolve --local-addr"))?;
        return Ok(found.map(|addr| addr.ip()).next().unwrap_or(store.local_ip()));
    }
    Ok(server.map_or(store.local_ip(), |server| server.local_addr().ip()))
}
