//! Tests of the rendezvous through its public API: real sockets, real files, real processes.

#![allow(clippy::unwrap_used)]

#[path = "it/complaints.rs"]
mod complaints;
#[path = "it/derived_port.rs"]
mod derived_port;
#[path = "it/file.rs"]
mod file;
#[path = "it/liveness.rs"]
mod liveness;
#[path = "it/meeting.rs"]
mod meeting;
#[path = "it/model.rs"]
mod model;
#[path = "it/outages.rs"]
mod outages;
#[path = "it/process.rs"]
mod process;
#[path = "it/refusals.rs"]
mod refusals;
#[path = "it/relay.rs"]
mod relay;
#[path = "it/scale.rs"]
mod scale;
#[path = "it/unproven.rs"]
mod unproven;
#[path = "it/user_key.rs"]
mod user_key;
#[path = "it/waits.rs"]
mod waits;

use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, TcpStore, TcpStoreServer};
use std::time::{Duration, Instant};

/// A deadline this many milliseconds from now.
fn after(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

/// Waits, for a bounded time, until the two are equal.
#[track_caller]
fn eventually<T: PartialEq + std::fmt::Debug>(pair: impl Fn() -> (T, T)) {
    let deadline = after(5000);
    let (mut left, mut right) = pair();
    while left != right {
        assert!(Instant::now() < deadline, "{left:?} did not become {right:?}");
        std::thread::sleep(Duration::from_millis(2));
        (left, right) = pair();
    }
}

/// A server on loopback with a secret key.
struct Job {
    key: JobKey,
    server: TcpStoreServer,
}

impl Job {
    fn start() -> Job {
        Self::with(ServerOptions::default())
    }

    fn with(options: ServerOptions) -> Job {
        let key = JobKey::random();
        let server = TcpStoreServer::bind("127.0.0.1:0", &key, options).unwrap();
        Job { key, server }
    }

    fn addr(&self) -> String {
        self.server.local_addr().to_string()
    }

    /// A client that is not a member.
    fn guest(&self) -> TcpStore {
        TcpStore::connect(&self.addr(), &self.key, Hello::new(Role::Store), after(5000)).unwrap()
    }

    fn member(&self, rank: usize, world_size: usize) -> TcpStore {
        let hello = Hello::new(Role::Store).member(rank, world_size);
        TcpStore::connect(&self.addr(), &self.key, hello, after(5000)).unwrap()
    }
}
