//! The connection between an agent and the coordinator: a channel within one process, two logs in the control store
//! between nodes.
//!
//! Each report and each order carries the complete state and is repeated, so a lost line costs one heartbeat. That is
//! why the reader of a log may simply delete it when it has grown.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::{Hello, JobKey, Role, Store, StoreError, TcpStore, TcpStoreServer};
use rustix::process::Signal;
use serde::de::DeserializeOwned;

pub(super) use super::coordinate::ToCoordinator;
use super::coordinate::{CoordinatorLoop, OrderSender};
use super::coordinator_link::ReportSender;
use super::liveness::LivenessMonitor;
use super::silence::SilenceNotices;
use super::{AgentEvent, clock};
use crate::LaunchError;
use crate::membership::{AgentId, Coordinator, Policy, Report};
use crate::random::random_number;

pub(super) const REPORTS: &str = "drumline/reports";
/// The reader deletes a log once it has read more bytes than this.
const LONGEST_LOG: u64 = 1 << 16;
/// How long one read waits for new lines of a log.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for connecting to our own store.
const CONNECT: Duration = Duration::from_secs(10);

pub(super) fn orders_of(agent: AgentId) -> String {
    format!("drumline/orders/{:032x}", agent.0)
}

/// The address and key of the control store.
#[derive(Debug, Clone)]
pub(super) struct Address {
    pub(super) endpoint: String,
    pub(super) key: JobKey,
}

impl Address {
    pub(super) fn connect(&self, deadline: Instant) -> Result<TcpStore, StoreError> {
        TcpStore::connect(&self.endpoint, &self.key, Hello::new(Role::Store), deadline)
    }
}

/// An agent's connection to its coordinator.
#[derive(Debug)]
pub(super) struct Control {
    to: Sender<ToCoordinator>,
    /// The thread that sends reports to a coordinator in another process.
    sender: Option<JoinHandle<()>>,
    /// Watches the process that hosts the coordinator, if that is not this one.
    _store_monitor: Option<LivenessMonitor>,
    hosted: Option<Hosted>,
}

/// A coordinator in this process.
#[derive(Debug)]
struct Hosted {
    done: Receiver<()>,
    _server: Option<TcpStoreServer>,
}

/// An agent's identity, and the channel on which it receives orders.
#[derive(Clone)]
pub(super) struct AgentHandle {
    pub(super) id: AgentId,
    pub(super) events: Sender<AgentEvent>,
}

/// A coordinator in another process.
pub(super) struct RemoteCoordinator {
    pub(super) address: Address,
    /// The address on which its process listens until it exits.
    pub(super) life: Option<String>,
    /// How long to wait for the answer to a report before it is sent again over new connections.
    pub(super) timeout: Duration,
}

impl Control {
    /// Runs the coordinator in this process. With a `server`, agents of other nodes reach it there.
    pub(super) fn local(
        own: AgentHandle,
        policy: Policy,
        poll_interval: Duration,
        server: Option<(TcpStoreServer, Address)>,
    ) -> Result<Self, LaunchError> {
        let (to, inbox) = mpsc::channel();
        let deadline = Instant::now() + CONNECT;
        let connect = |(_, address): &(TcpStoreServer, Address)| {
            Ok::<_, StoreError>((address.connect(deadline)?, address.connect(deadline)?))
        };
        let (store, reports) = server.as_ref().map(connect).transpose().map_err(LaunchError::Store)?.unzip();
        if let Some(reports) = reports {
            let to = to.clone();
            spawn("drumline-reports", move || {
                let deliver = |report| to.send(ToCoordinator::Report(Box::new(report))).is_ok();
                read_log(&reports, REPORTS, || true, deliver);
            })?;
        }
        let watch = |_: &_| {
            let deaths = to.clone();
            LivenessMonitor::start(move |agent| drop(deaths.send(ToCoordinator::Died(agent))))
        };
        let monitor = server.as_ref().map(watch).transpose()?;
        let silences = SilenceNotices::new(&policy);
        let coordinator = Coordinator::new(random_number(), policy, clock::now());
        let (done_sender, done) = mpsc::channel();
        let orders = OrderSender { own, store };
        let coordinator_loop = CoordinatorLoop { coordinator, orders, monitor, silences, poll_interval };
        spawn("drumline-coordinator", move || coordinator_loop.run(&inbox, &done_sender))?;
        let _server = server.map(|(server, _)| server);
        Ok(Self { to, sender: None, _store_monitor: None, hosted: Some(Hosted { done, _server }) })
    }

    /// Connects to a coordinator in another process.
    pub(super) fn remote(own: AgentHandle, coordinator: RemoteCoordinator) -> Result<Self, LaunchError> {
        let RemoteCoordinator { address, life, timeout } = coordinator;
        let (to, outbox) = mpsc::channel();
        let deaths = own.events.clone();
        let mut monitor = LivenessMonitor::start(move |_| drop(deaths.send(AgentEvent::StoreDied)))?;
        monitor.set(life.into_iter().map(|life| (AgentId::default(), life)).collect());
        let sender = ReportSender { own, address, timeout };
        let sender = spawn("drumline-sender", move || sender.run(&outbox))?;
        Ok(Self { to, sender: Some(sender), _store_monitor: Some(monitor), hosted: None })
    }

    pub(super) fn report(&self, report: Report) {
        let _ = self.to.send(ToCoordinator::Report(Box::new(report)));
    }

    /// Ends the job if the coordinator runs here, because this agent was asked to leave. Elsewhere the agent's report
    /// says that it leaves.
    pub(super) fn leave(&self, signal: Signal) {
        if self.is_host() {
            let _ = self.to.send(ToCoordinator::HostLeaves(signal));
        }
    }

    pub(super) fn is_host(&self) -> bool {
        self.hosted.is_some()
    }

    /// Whether the coordinator in this process has informed all agents that the job is over.
    pub(super) fn is_done(&self) -> bool {
        self.hosted.as_ref().is_some_and(|hosted| hosted.done.try_recv().is_ok())
    }

    /// Waits, at most `timeout`, until the last report is sent.
    pub(super) fn finish(self, timeout: Duration) {
        drop(self.to);
        let until = Instant::now() + timeout;
        while self.sender.as_ref().is_some_and(|sender| !sender.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, LaunchError> {
    let started = std::thread::Builder::new().name(name.to_string()).spawn(body);
    started.map_err(LaunchError::system("start a thread of the agent"))
}

/// Passes each line of a log to `deliver` until that returns false, the log is no longer wanted, or the store is gone.
pub(super) fn read_log<T: DeserializeOwned>(
    store: &TcpStore,
    key: &str,
    is_wanted: impl Fn() -> bool,
    mut deliver: impl FnMut(T) -> bool,
) {
    let mut read = 0;
    while is_wanted() {
        let lines = match store.tail(key, read, Instant::now() + PATIENCE) {
            Ok(lines) => lines,
            Err(error) if error.is_timeout() => continue,
            Err(_) => return,
        };
        read += lines.len() as u64;
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let is_delivered = match serde_json::from_slice(line) {
                Ok(message) => deliver(message),
                Err(error) => {
                    tracing::warn!(%error, key, "dropped a message that this version cannot read");
                    true
                }
            };
            if !is_delivered {
                return;
            }
        }
        // A reader that replaces this one starts at the beginning and deletes the log itself.
        if read > LONGEST_LOG && is_wanted() && store.delete(key).is_ok() {
            read = 0;
        }
    }
}
