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

pub(super) use super::coordinate::ToCoordinator;
use super::coordinate::{Desk, Post};
use super::line::Speaker;
use super::lives::Lives;
use super::silence::Silences;
use super::{Happening, clock};
use crate::LaunchError;
use crate::membership::{AgentId, Coordinator, Policy, Report};
use crate::random::random_number;

pub(super) const REPORTS: &str = "drumline/reports";
/// A log is begun anew when its reader has read this much of it.
const LONGEST_LOG: u64 = 1 << 16;
/// How long a log is waited for at a time.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time to connect to our own store.
const CONNECT: Duration = Duration::from_secs(10);

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
}

/// An agent's way to its coordinator.
#[derive(Debug)]
pub(super) struct Control {
    to: Sender<ToCoordinator>,
    /// The thread that speaks to a coordinator elsewhere.
    speaker: Option<JoinHandle<()>>,
    /// Watches the process that hosts the coordinator, if that is another one.
    _store_life: Option<Lives>,
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

/// A coordinator in another process.
pub(super) struct Elsewhere {
    pub(super) address: Address,
    /// Where its process listens for as long as it lives.
    pub(super) life: Option<String>,
    /// How long the answer to a report may take before it is sent again over fresh connections.
    pub(super) timeout: Duration,
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
        let soon = Instant::now() + CONNECT;
        let connect = |(_, address): &(TcpStoreServer, Address)| {
            Ok::<_, StoreError>((address.connect(soon)?, address.connect(soon)?))
        };
        let (store, ear) = server.as_ref().map(connect).transpose().map_err(LaunchError::Store)?.unzip();
        if let Some(ear) = ear {
            let to = to.clone();
            spawn("drumline-reports", move || {
                let tell = |report| to.send(ToCoordinator::Report(Box::new(report))).is_ok();
                read_log(&ear, REPORTS, || true, tell);
            })?;
        }
        let watch = |_: &_| {
            let deaths = to.clone();
            Lives::watch(move |agent| drop(deaths.send(ToCoordinator::Died(agent))))
        };
        let lives = server.as_ref().map(watch).transpose()?;
        let silences = Silences::new(&policy);
        let coordinator = Coordinator::new(random_number(), policy, clock::now());
        let (said, done) = mpsc::channel();
        let post = Post { own: (own.id, own.events), store };
        let desk = Desk { coordinator, post, lives, silences, look };
        spawn("drumline-coordinator", move || desk.coordinate(&inbox, &said))?;
        let _server = server.map(|(server, _)| server);
        Ok(Self { to, speaker: None, _store_life: None, hosted: Some(Hosted { done, _server }) })
    }

    /// The coordinator is elsewhere.
    pub(super) fn there(own: Own, elsewhere: Elsewhere) -> Result<Self, LaunchError> {
        let Elsewhere { address, life, timeout } = elsewhere;
        let (to, outbox) = mpsc::channel();
        let deaths = own.events.clone();
        let mut store_life = Lives::watch(move |_| drop(deaths.send(Happening::StoreDied)))?;
        store_life.set(life.into_iter().map(|life| (AgentId::default(), life)).collect());
        let speaker = Speaker { id: own.id, address, events: own.events, timeout };
        let speaker = spawn("drumline-speaker", move || speaker.speak(&outbox))?;
        Ok(Self { to, speaker: Some(speaker), _store_life: Some(store_life), hosted: None })
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

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, LaunchError> {
    let started = std::thread::Builder::new().name(name.to_string()).spawn(body);
    started.map_err(LaunchError::system("start a thread of the agent"))
}

/// Hands on each line of a log until nobody wants any more, or the store is gone.
pub(super) fn read_log<T: DeserializeOwned>(
    store: &TcpStore,
    key: &str,
    is_wanted: impl Fn() -> bool,
    mut tell: impl FnMut(T) -> bool,
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
            let is_told = match serde_json::from_slice(line) {
                Ok(message) => tell(message),
                Err(error) => {
                    tracing::warn!(%error, key, "a message of another version was dropped");
                    true
                }
            };
            if !is_told {
                return;
            }
        }
        // Whoever reads in our place begins at the front, and deletes by itself.
        if read > LONGEST_LOG && is_wanted() && store.delete(key).is_ok() {
            read = 0;
        }
    }
}
