//! The way to the control store: hosted if that falls to this node, waited for if not.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use drumline_rendezvous::{JobKey, ServerOptions, Store, StoreError, TcpStore, TcpStoreServer};
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
}

/// What came of it.
pub(super) enum Reaching {
    Reached(Box<Reached>),
    Stopped(Signal),
}

/// Reaches the control store. Signals are heeded meanwhile, and what takes long is said.
pub(super) fn reach(
    plan: &LaunchPlan,
    key: JobKey,
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

fn hosted_or_met(
    plan: &LaunchPlan,
    (host, port): (String, u16),
    key: JobKey,
) -> Result<Reached, LaunchError> {
    let deadline = Instant::now() + plan.join_timeout;
    wait_for_name(&host, deadline.min(Instant::now() + NAMED));
    let server = host_if_ours(plan, &host, port, &key)?;
    let endpoint = server.as_ref().map_or_else(|| joined(&host, port), own_address);
    let address = Address { endpoint, key };
    let cannot = |source| LaunchError::Reach { endpoint: joined(&host, port), source };
    let store = address.connect(deadline).map_err(cannot)?;
    match &server {
        Some(_) => store.set(JOB, plan.run_id.as_bytes()).map_err(cannot)?,
        None => {
            agree_on_job(&store.get(JOB, Instant::now() + plan.contact.read_timeout).map_err(cannot)?, plan)?
        }
    }
    Ok(Reached { server, store, address, host })
}

/// Waits until a host's name means something; if it never does, whoever uses it says so.
fn wait_for_name(host: &str, deadline: Instant) {
    while (host, 0).to_socket_addrs().is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(500));
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
