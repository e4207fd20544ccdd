//! The store that the launcher hosts for its job, and the news of workers' ends that it posts there.

use std::net::Ipv4Addr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, TcpStore, TcpStoreServer, worker_env};

use crate::LaunchError;
use crate::environment::Meeting;
use crate::key_memory::KeyMemory;
use crate::ports::ReservedPort;
use crate::supervise::OnExit;
use crate::worker::Ended;

/// Time to connect to the store: where it is on a silent host, as long as that is waited for by default.
const PROMPT: Duration = worker_env::DEFAULT_HOST_TIMEOUT;

/// A store on loopback with a key of its own, and beside it a port for what rank 0 may host.
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

    /// Where the workers meet.
    pub(crate) fn meeting(&self) -> Meeting {
        Meeting {
            master_addr: Ipv4Addr::LOCALHOST.to_string(),
            master_port: self.master.port(),
            store: Some(self.server.local_addr().to_string()),
            ..Meeting::default()
        }
    }

    /// Posts each worker's end where its peers hear of it.
    pub(crate) fn reporter(&self) -> OnExit {
        reporter(self.server.local_addr().to_string(), self.key.clone(), ServerOptions::default().round)
    }
}

/// Posts each worker's end in the store at `address`, which is that of `round` and refuses others, from a thread of its
/// own: the store may be on another node, and nobody waits for it here.
pub(crate) fn reporter(address: String, key: JobKey, round: u32) -> OnExit {
    let (ends, ended) = mpsc::channel::<Ended>();
    let post = move || {
        let hello = Hello::new(Role::Store).round(round);
        let host = hello.host.clone();
        let Ok(first) = ended.recv() else { return };
        let store = match TcpStore::connect(&address, &key, hello, Instant::now() + PROMPT) {
            Ok(store) => store,
            Err(error) => return tracing::debug!(%error, "cannot tell the other ranks of an exit"),
        };
        for ended in std::iter::once(first).chain(ended) {
            if let Err(error) = events::post(&store, &exit_event(&ended, host.clone())) {
                tracing::debug!(rank = ended.rank, %error, "cannot tell the other ranks of an exit");
            }
        }
    };
    // Without the thread the others still learn of a death, if not how it came about.
    let _ = std::thread::Builder::new().name("drumline-exits".to_string()).spawn(post);
    Box::new(move |ended, _| {
        // Nobody listens if the thread could not be started.
        let _ = ends.send(*ended);
    })
}

fn exit_event(ended: &Ended, host: String) -> Event {
    let Ended { rank, pid, code, signal, .. } = *ended;
    Event::Exit { rank, host, pid, code, signal }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Exit;

    /// What the ranks of round 3 hear of an end that was reported for `round`.
    fn heard(round: u32) -> Vec<Event> {
        let key = JobKey::random();
        let options = ServerOptions { world_size: Some(2), round: 3 };
        let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), &key, options).unwrap();
        let address = server.local_addr().to_string();
        let ended =
            Ended { rank: 1, pid: 7, code: None, signal: Some(9), core_dumped: false, at: Instant::now() };
        reporter(address.clone(), key.clone(), round)(&ended, Exit::Signal(9));
        let hello = Hello::new(Role::Store).round(3);
        let store = TcpStore::connect(&address, &key, hello, Instant::now() + PROMPT).unwrap();
        let patience = if round == 3 { PROMPT } else { Duration::from_millis(300) };
        events::follow(&store).next_batch(Instant::now() + patience).unwrap()
    }

    #[test]
    fn the_ranks_of_a_later_round_hear_of_an_end() {
        let heard_of = heard(3);
        let is_told = |event: &Event| matches!(event, Event::Exit { rank: 1, pid: 7, signal: Some(9), .. });
        assert!(heard_of.len() == 1 && is_told(&heard_of[0]), "{heard_of:?}");
        assert_eq!(heard(0), [], "the control: who is of another round is refused");
    }
}
