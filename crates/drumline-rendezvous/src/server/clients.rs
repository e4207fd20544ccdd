//! What the server remembers about each client, so that a repeated request is carried out once.
//!
//! A client that gets no reply sends its request again, over a new connection and with the same number. Either the
//! request was lost, or only the reply. So the server keeps the replies to requests that change the store, until a
//! later call acknowledges them. A client without a connection is remembered as long as it may come back. No sockets
//! and no clock here: tokens stand for connections, and the time is an argument.

use crate::client_note::ClientNumber;
use crate::store::request::Reply;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How many replies one client may leave unacknowledged; it has as many pending calls as threads.
const MAX_KEPT: usize = 4096;

#[derive(Debug)]
pub(super) struct Clients {
    known: HashMap<ClientNumber, Client>,
    /// The clients whose last connection has ended, in that order; some may have come back.
    disconnected: VecDeque<(Instant, ClientNumber)>,
    /// How long a client without a connection is remembered.
    memory: Duration,
}

#[derive(Debug, Default)]
struct Client {
    links: BTreeSet<usize>,
    /// The client has the replies to all requests before this one.
    oldest: u64,
    kept: BTreeMap<u64, Reply>,
    disconnected_since: Option<Instant>,
}

/// What to do with a request that changes the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is new: carry it out.
    New,
    /// It was carried out before, with this reply.
    Again(Reply),
    /// The client has given it up, or has its reply.
    Late,
    /// The client does not acknowledge its replies.
    TooMany,
}

impl Clients {
    pub(super) fn new(memory: Duration) -> Clients {
        Clients { known: HashMap::new(), disconnected: VecDeque::new(), memory }
    }

    /// Adds a connection of a client.
    pub(super) fn connected(&mut self, number: ClientNumber, token: usize) {
        let client = self.known.entry(number).or_default();
        client.links.insert(token);
        client.disconnected_since = None;
    }

    /// Removes a connection that has ended. Returns the number of those that are left.
    pub(super) fn disconnected(&mut self, number: ClientNumber, token: usize, now: Instant) -> usize {
        let Some(client) = self.known.get_mut(&number) else { return 0 };
        if client.links.remove(&token) && client.links.is_empty() {
            client.disconnected_since = Some(now);
            self.disconnected.push_back((now, number));
        }
        client.links.len()
    }

    /// The connections of a client.
    pub(super) fn links(&self, number: ClientNumber) -> Vec<usize> {
        self.known.get(&number).map(|client| client.links.iter().copied().collect()).unwrap_or_default()
    }

    /// What to do with request `id` of a client that still waits for the replies to `oldest` and later requests.
    pub(super) fn judge(&mut self, number: ClientNumber, id: u64, oldest: u64) -> Verdict {
        let client = self.known.entry(number).or_default();
        if oldest > client.oldest {
            client.oldest = oldest;
            client.kept = client.kept.split_off(&oldest);
        }
        if id < client.oldest {
            return Verdict::Late;
        }
        match client.kept.get(&id) {
            Some(reply) => Verdict::Again(reply.clone()),
            None if client.kept.len() >= MAX_KEPT => Verdict::TooMany,
            None => Verdict::New,
        }
    }

    /// Keeps the reply to request `id`, which was carried out.
    pub(super) fn keep(&mut self, number: ClientNumber, id: u64, reply: Reply) {
        self.known.entry(number).or_default().kept.insert(id, reply);
    }

    /// When the next client can be forgotten.
    pub(super) fn next_turn(&self) -> Option<Instant> {
        self.disconnected.front().map(|(since, _)| *since + self.memory)
    }

    /// Forgets clients that have not come back.
    pub(super) fn turn(&mut self, now: Instant) {
        while let Some((since, number)) = self.disconnected.front().copied()
            && since + self.memory <= now
        {
            self.disconnected.pop_front();
            if self.known.get(&number).is_some_and(|client| client.disconnected_since == Some(since)) {
                self.known.remove(&number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Duration = Duration::from_secs(60);

    #[test]
    fn a_request_is_carried_out_once_until_its_reply_is_acknowledged() {
        let (mut clients, one) = (Clients::new(MEMORY), ClientNumber::random());
        clients.connected(one, 7);
        assert_eq!(clients.judge(one, 1, 1), Verdict::New);
        clients.keep(one, 1, Reply::Number(5));
        for _ in 0..2 {
            assert_eq!(clients.judge(one, 1, 1), Verdict::Again(Reply::Number(5)));
        }
        assert_eq!(clients.judge(one, 2, 1), Verdict::New);
        clients.keep(one, 2, Reply::Done);
        assert_eq!(clients.judge(one, 3, 3), Verdict::New, "the client has the replies to 1 and 2");
        assert_eq!(clients.known[&one].kept.len(), 0);
        assert_eq!(clients.judge(one, 2, 2), Verdict::Late, "a delayed copy");
        assert_eq!(clients.judge(ClientNumber::random(), 2, 2), Verdict::New, "control: another client");
    }

    #[test]
    fn a_client_is_remembered_while_it_may_come_back() {
        let (mut clients, one, began) = (Clients::new(MEMORY), ClientNumber::random(), Instant::now());
        clients.connected(one, 7);
        clients.connected(one, 8);
        assert_eq!(clients.disconnected(one, 7, began), 1);
        clients.keep(one, 1, Reply::Done);
        assert_eq!((clients.disconnected(one, 8, began), clients.next_turn()), (0, Some(began + MEMORY)));
        clients.connected(one, 9);
        clients.turn(began + MEMORY);
        assert_eq!(clients.judge(one, 1, 1), Verdict::Again(Reply::Done), "it came back");
        clients.disconnected(one, 9, began + MEMORY);
        clients.turn(began + MEMORY * 2);
        assert!(clients.known.is_empty() && clients.disconnected.is_empty());
    }

    #[test]
    fn a_client_that_acknowledges_nothing_is_stopped() {
        let (mut clients, one) = (Clients::new(MEMORY), ClientNumber::random());
        for id in 0..MAX_KEPT as u64 {
            assert_eq!(clients.judge(one, id, 0), Verdict::New);
            clients.keep(one, id, Reply::Done);
        }
        assert_eq!(clients.judge(one, MAX_KEPT as u64, 0), Verdict::TooMany);
        assert_eq!(clients.judge(one, MAX_KEPT as u64, 1), Verdict::New);
    }
}
