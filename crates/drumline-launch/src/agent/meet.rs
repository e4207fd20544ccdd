//! How an agent comes to its coordinator: who hosts the control store, and under which address this node is reached.
//!
//! ```text
//!   one node ─▶ a coordinator in this process, and no socket
//!   static ───▶ node 0 hosts at the given address ──┐
//!   dynamic ──▶ whoever has that address hosts ─────┴▶ the others connect
//! ```

use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use drumline_rendezvous::user_key::KeyFile;
use drumline_rendezvous::{JobKey, Store, TcpStore, TcpStoreServer, port_holder};
use rustix::process::Signal;

use super::control::{Control, Elsewhere, Own};
use super::lives;
use super::reach::{Reached, Reaching, joined, reach};
use super::{Happening, policy};
use crate::LaunchError;
use crate::membership::{AgentCard, AgentId, Door};
use crate::plan::{Contact, LaunchPlan, Rendezvous};
use crate::ports::ReservedPort;
use crate::random::random_number;

/// Where the host of the control store listens for as long as its process lives.
const LIFE: &str = "drumline/life";

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
    /// Open for as long as this process lives: that is how others know.
    pub(super) _life: Option<TcpListener>,
    /// The key for other agents of this machine, if this one made it.
    pub(super) _key_file: Option<KeyFile>,
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
    channel: (&Sender<Happening>, &Receiver<Happening>),
    say: &dyn Fn(&str),
) -> Result<Meeting, LaunchError> {
    if plan.nodes.max == 1 {
        return alone(plan, channel.0).map(Box::new).map(Meeting::Met);
    }
    let key = match key {
        Some(key) => Some(key),
        None => Some(JobKey::from_env()?).filter(JobKey::is_secret),
    };
    match reach(plan, key, channel, say)? {
        Reaching::Reached(reached) => together(plan, *reached, channel.0).map(Box::new).map(Meeting::Met),
        Reaching::Stopped(signal) => Ok(Meeting::Stopped(signal)),
    }
}

/// A node among others, whose control store it has reached.
fn together(plan: &LaunchPlan, reached: Reached, events: &Sender<Happening>) -> Result<Met, LaunchError> {
    let Reached { server, store, address, host, key_file } = reached;
    let listen = listen_ip(plan, server.as_ref(), &store)?;
    let seen_as = match &plan.local_addr {
        Some(addr) => addr.clone(),
        None if server.is_some() && !is_loopback(&host) => host,
        None => store.local_ip().to_string(),
    };
    let ports = [reserve(0)?, reserve(0)?];
    let life = lives::listen_at(listen).map_err(LaunchError::system("listen for the other nodes"))?;
    let life_port = life.local_addr().map_err(LaunchError::system("listen for the other nodes"))?.port();
    let mut card = card(plan, seen_as.clone(), [&ports[0], &ports[1]], &seen_as);
    card.life = joined(&seen_as, life_port);
    let own = Own { id: card.id, events: events.clone() };
    let key = address.key.clone();
    let control = match server {
        Some(server) => {
            store.set(LIFE, card.life.as_bytes()).map_err(LaunchError::Store)?;
            Control::here(own, policy::of(plan), plan.monitor_interval, Some((server, address)))?
        }
        None => {
            let Contact { read_timeout, heartbeat_timeout, host_timeout, .. } = plan.contact;
            // An answer that is waited for longer than that would be the last one before the lease is over.
            let timeout = heartbeat_timeout.min(host_timeout / 4);
            // Without it, the host's death is noticed by its silence.
            let life = store.get(LIFE, Instant::now() + read_timeout).ok();
            let life = life.and_then(|address| String::from_utf8(address).ok());
            Control::there(own, Elsewhere { address, life, timeout })?
        }
    };
    Ok(Met {
        card,
        control,
        key,
        listen,
        alone: false,
        _ports: ports,
        _life: Some(life),
        _key_file: key_file,
    })
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
    Ok(Met {
        card,
        control,
        key: JobKey::random(),
        listen,
        alone: true,
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
        door: Door { master_addr, master_port, store: joined(store, store_port) },
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
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
