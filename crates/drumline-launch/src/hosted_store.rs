//! The store that the launcher hosts for its job, and the reports of workers' exits that it posts there.

use std::net::Ipv4Addr;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{
    Hello, JobKey, Role, ServerOptions, StoreError, TcpStore, TcpStoreServer, worker_env,
};

use crate::LaunchError;
use crate::environment::Meeting;
use crate::key_memory::KeyMemory;
use crate::ports::ReservedPort;
use crate::supervise::OnExit;
use crate::worker::Ended;

/// A store on loopback with its own key, and a reserved port for services of rank 0.
#[derive(Debug)]
pub(crate) struct HostedStore {
    server: TcpStoreServer,
    master: ReservedPort,
    key: JobKey,
    pub(crate) key_memory: KeyMemory,
}

impl HostedStore {
    pub(crate) fn start(world_size: usize) -> Result<Self, LaunchError> {
        let key = JobKey::random();
        let key_memory = KeyMemory::new(&key)?;
        let options = ServerOptions { world_size: Some(world_size), ..ServerOptions::default() };
        let server =
            TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), &key, options).map_err(LaunchError::Store)?;
        let master = ReservedPort::reserve(0).map_err(LaunchError::system("find a free port"))?;
        Ok(Self { server, master, key, key_memory })
    }

    /// Where the workers find each other.
    pub(crate) fn meeting(&self) -> Meeting {
        Meeting {
            master_addr: Ipv4Addr::LOCALHOST.to_string(),
            master_port: self.master.port(),
            store: Some(self.server.local_addr().to_string()),
            ..Meeting::default()
        }
    }

    /// Posts each worker's exit to the store, where its peers see it.
    pub(crate) fn reporter(&self) -> OnExit {
        let round = ServerOptions::default().round;
        let address = self.server.local_addr().to_string();
        reporter(address, self.key.clone(), round, worker_env::DEFAULT_HOST_TIMEOUT)
    }
}

/// Posts each worker's exit to the store at `address`, which belongs to `round` and refuses others. A separate thread
/// does that: the store may be on another node, and the launcher must not wait for it. It waits for a silent store as
/// long as for a silent host, and tries again at the next exit.
pub(crate) fn reporter(address: String, key: JobKey, round: u32, host_timeout: Duration) -> OnExit {
    let (ends, ended) = mpsc::channel::<Ended>();
    let connect = move || {
        let hello = Hello::new(Role::Store).round(round);
        TcpStore::connect(&address, &key, hello, Instant::now() + host_timeout)
    };
    let post = move || post_all(&ended, connect);
    // Without the thread, the others still notice an end, but not its reason.
    let _ = std::thread::Builder::new().name("drumline-exits".to_string()).spawn(post);
    Box::new(move |ended, _| {
        // The receiver is gone if the thread could not be started.
        let _ = ends.send(*ended);
    })
}

/// Posts exits until there are no more. An exit that could not be posted is tried again with the next one.
fn post_all(ended: &Receiver<Ended>, connect: impl Fn() -> Result<TcpStore, StoreError>) {
    let host = Hello::new(Role::Store).host;
    let mut store = None;
    let mut unposted = Vec::new();
    while let Ok(next) = ended.recv() {
        unposted.push(next);
        unposted.extend(ended.try_iter());
        if store.is_none() {
            store = connect().inspect_err(log_failure).ok();
        }
        if let Some(store) = &store {
            let is_left = |ended: &Ended| {
                events::post(store, &exit_event(ended, host.clone())).inspect_err(log_failure).is_err()
            };
            unposted.retain(is_left);
        }
    }
}

fn log_failure(error: &StoreError) {
    tracing::debug!(%error, "cannot report an exit to the other ranks");
}

fn exit_event(ended: &Ended, host: String) -> Event {
    let Ended { rank, pid, code, signal, .. } = *ended;
    Event::Exit { rank, host, pid, code, signal }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exit;
    use drumline_rendezvous::free_port;

    const LONG: Duration = Duration::from_secs(30);

    fn end_of(rank: usize) -> Ended {
        Ended { rank, pid: 7, code: None, signal: Some(9), core_dumped: false, at: Instant::now() }
    }

    /// A store of round 3, at this port or any.
    fn serve(key: &JobKey, port: u16) -> TcpStoreServer {
        let options = ServerOptions { world_size: Some(2), round: 3 };
        TcpStoreServer::bind((Ipv4Addr::LOCALHOST, port), key, options).unwrap()
    }

    /// The events that a rank of round 3 sees.
    fn follow(address: &str, key: &JobKey, patience: Duration) -> Vec<Event> {
        let hello = Hello::new(Role::Store).round(3);
        let store = TcpStore::connect(address, key, hello, Instant::now() + LONG).unwrap();
        events::follow(&store).next_batch(Instant::now() + patience).unwrap()
    }

    /// The events that ranks of round 3 see after an exit was reported for `round`.
    fn seen(round: u32) -> Vec<Event> {
        let key = JobKey::random();
        let server = serve(&key, 0);
        let address = server.local_addr().to_string();
        reporter(address.clone(), key.clone(), round, LONG)(&end_of(1), Exit::Signal(9));
        follow(&address, &key, if round == 3 { LONG } else { Duration::from_millis(300) })
    }

    #[test]
    fn ranks_of_the_same_round_see_an_exit() {
        let events = seen(3);
        let is_exit = |event: &Event| matches!(event, Event::Exit { rank: 1, pid: 7, signal: Some(9), .. });
        assert!(events.len() == 1 && is_exit(&events[0]), "{events:?}");
        assert_eq!(seen(0), [], "control: a reporter of another round is refused");
    }

    #[test]
    fn an_exit_that_could_not_be_reported_is_reported_with_the_next() {
        let (key, port) = (JobKey::random(), free_port().unwrap());
        let address = format!("{}:{port}", Ipv4Addr::LOCALHOST);
        let patience = Duration::from_millis(200);
        let mut report = reporter(address.clone(), key.clone(), 3, patience);
        report(&end_of(0), Exit::Signal(9));
        // The store is unreachable for longer than the host timeout.
        std::thread::sleep(4 * patience);
        let _server = serve(&key, port);
        assert_eq!(follow(&address, &key, patience), [], "control: the report was given up");
        report(&end_of(1), Exit::Signal(9));
        let until = Instant::now() + LONG;
        let mut events = Vec::new();
        while events.len() < 2 && Instant::now() < until {
            events = follow(&address, &key, LONG);
        }
        let ranks: Vec<_> =
            events.iter().map(|event| matches!(event, Event::Exit { rank, .. } if *rank < 2)).collect();
        assert_eq!(ranks, [true, true], "{events:?}");
    }
}
