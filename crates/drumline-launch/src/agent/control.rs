//! The way between an agent and the coordinator: a channel inside a process, two logs of the control store between nodes.
//!
//! Reports and orders are whole states, said again and again, so that a line that is lost costs a heartbeat. That is why
//! a log that has grown can simply be deleted by its reader.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::{Hello, JobKey, Role, Store, StoreError, TcpStore, TcpStoreServer};
use rustix::process::Signal;
use serde::de::DeserializeOwned;

use super::coordinate::{Post, ToCoordinator, coordinate};
use super::{Happening, clock};
use crate::LaunchError;
use crate::membership::{AgentId, Coordinator, Policy, Report};
use crate::random::random_number;

const REPORTS: &str = "drumline/reports";
/// A log is begun anew when its reader has read this much of it.
const LONGEST_LOG: u64 = 1 << 20;
/// How long a log is waited for at a time.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time to connect anew, at a time.
const RECONNECT: Duration = Duration::from_secs(2);

pub(super) fn orders_of(agent: AgentId) -> String {
    format!("drumline/orders/{:032x}", agent.0)
}

/// How the control store is reached.
#[derive(Debug, Clone)]
pub(super) struct Address {
    pub(super) endpoint: String,
    pub(super) key: JobKey,
}

impl Address {
    pub(super) fn connect(&self, deadline: Instant) -> Result<TcpStore, StoreError> {
        TcpStore::connect(&self.endpoint, &self.key, Hello::new(Role::Store), deadline)
    }

    /// Connects again and again, as long as somebody `wants` it.
    fn reconnect(&self, wants: impl Fn() -> bool) -> Option<TcpStore> {
        while wants() {
            match self.connect(Instant::now() + RECONNECT) {
                Ok(store) => return Some(store),
                Err(error) => tracing::debug!(%error, "no contact with the control store"),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        None
    }
}

/// An agent's way to its coordinator.
#[derive(Debug)]
pub(super) struct Control {
    to: Sender<ToCoordinator>,
    /// The thread that speaks to a coordinator elsewhere.
    speaker: Option<JoinHandle<()>>,
    hosted: Option<Hosted>,
}

/// A coordinator in this process.
#[derive(Debug)]
struct Hosted {
    done: Receiver<()>,
    _server: Option<TcpStoreServer>,
}

/// Who the agent is and where its orders go.
pub(super) struct Own {
    pub(super) id: AgentId,
    pub(super) events: Sender<Happening>,
}

impl Control {
    /// The coordinator is here; with a `server` agents of other nodes reach it there.
    pub(super) fn here(
        own: Own,
        policy: Policy,
        look: Duration,
        server: Option<(TcpStoreServer, Address)>,
    ) -> Result<Self, LaunchError> {
        let (to, inbox) = mpsc::channel();
        let soon = Instant::now() + RECONNECT;
        let connect = |(_, address): &(TcpStoreServer, Address)| {
            Ok::<_, StoreError>((address.connect(soon)?, address.connect(soon)?))
        };
        let (store, ear) = server.as_ref().map(connect).transpose().map_err(LaunchError::Store)?.unzip();
        if let Some(ear) = ear {
            let to = to.clone();
            spawn("drumline-reports", move || {
                read_log(&ear, REPORTS, |report| to.send(ToCoordinator::Report(Box::new(report))).is_ok());
            })?;
        }
        let coordinator = Coordinator::new(random_number(), policy, clock::now());
        let (post, (said, done)) = (Post { own: (own.id, own.events), store }, mpsc::channel());
        spawn("drumline-coordinator", move || coordinate(coordinator, &inbox, &post, look, &said))?;
        let _server = server.map(|(server, _)| server);
        Ok(Self { to, speaker: None, hosted: Some(Hosted { done, _server }) })
    }

    /// The coordinator is elsewhere.
    pub(super) fn there(own: Own, address: Address) -> Result<Self, LaunchError> {
        let (to, outbox) = mpsc::channel();
        let (ear, speech) = (address.clone(), address);
        spawn("drumline-orders", move || {
            let (key, events) = (orders_of(own.id), own.events);
            let tell = |order| events.send(Happening::Order(Box::new(order))).is_ok();
            while let Some(store) = ear.reconnect(|| true) {
                if !read_log(&store, &key, tell) {
                    return;
                }
            }
        })?;
        let speaker = spawn("drumline-reports", move || speak(&speech, &outbox))?;
        Ok(Self { to, speaker: Some(speaker), hosted: None })
    }

    pub(super) fn report(&self, report: Report) {
        let _ = self.to.send(ToCoordinator::Report(Box::new(report)));
    }

    /// The agent beside the coordinator was asked to leave: the job ends. Elsewhere the report says it.
    pub(super) fn leave(&self, signal: Signal) {
        if self.is_host() {
            let _ = self.to.send(ToCoordinator::HostLeaves(signal));
        }
    }

    pub(super) fn is_host(&self) -> bool {
        self.hosted.is_some()
    }

    /// Whether the coordinator here has told all agents that the job is over.
    pub(super) fn is_done(&self) -> bool {
        self.hosted.as_ref().is_some_and(|hosted| hosted.done.try_recv().is_ok())
    }

    /// Waits, at most `patience`, until the last word has gone out.
    pub(super) fn finish(self, patience: Duration) {
        drop(self.to);
        let until = Instant::now() + patience;
        while self.speaker.as_ref().is_some_and(|speaker| !speaker.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, LaunchError> {
    let started = std::thread::Builder::new().name(name.to_string()).spawn(body);
    started.map_err(LaunchError::system("start a thread of the agent"))
}

/// Sends each report; of several that wait only the last, which says it all.
fn speak(address: &Address, outbox: &Receiver<ToCoordinator>) {
    let mut store = None;
    while let Ok(mut report) = outbox.recv() {
        while let Ok(newer) = outbox.try_recv() {
            report = newer;
        }
        let ToCoordinator::Report(report) = report else { continue };
        let Ok(mut line) = serde_json::to_vec(&report) else { continue };
        line.push(b'\n');
        store = store.take().or_else(|| address.connect(Instant::now() + RECONNECT).ok());
        store.take_if(|store: &mut TcpStore| store.append(REPORTS, &line).is_err());
    }
}

/// Hands on each line of a log until nobody wants any more (false) or the store is gone (true).
fn read_log<T: DeserializeOwned>(store: &TcpStore, key: &str, mut tell: impl FnMut(T) -> bool) -> bool {
    let mut read = 0;
    loop {
        let lines = match store.tail(key, read, Instant::now() + PATIENCE) {
            Ok(lines) => lines,
            Err(error) if error.is_timeout() => continue,
            Err(_) => return true,
        };
        read += lines.len() as u64;
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let wanted = match serde_json::from_slice(line) {
                Ok(message) => tell(message),
                Err(error) => {
                    tracing::warn!(%error, key, "a message of another version was dropped");
                    true
                }
            };
            if !wanted {
                return false;
            }
        }
        if read > LONGEST_LOG && store.delete(key).is_ok() {
            read = 0;
        }
    }
}
