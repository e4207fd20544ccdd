//! What the server remembers of each client, so that a request which comes again is carried out once.
//!
//! A client that gets no reply sends its request again, over a new connection and with the same number. It may be that
//! the request was lost, or only the reply. So the replies to requests that change the store are kept until the client
//! says, with a later call, that it has them. A client without a connection is remembered for as long as it may come
//! back. No sockets and no clock here: tokens stand for connections, and the time comes in.

use crate::client_note::ClientNumber;
use crate::store::request::Reply;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Replies that one client may leave unacknowledged; it has as many calls under way as it has threads.
const MAX_KEPT: usize = 4096;

#[derive(Debug)]
pub(super) struct Clients {
    known: HashMap<ClientNumber, Client>,
    /// Those whose last connection has ended, in that order; some may have come back since.
    alone: VecDeque<(Instant, ClientNumber)>,
    /// How long a client without a connection is remembered.
    memory: Duration,
}

#[derive(Debug, Default)]
struct Client {
    links: BTreeSet<usize>,
    /// Requests before this one have their replies.
    oldest: u64,
    kept: BTreeMap<u64, Reply>,
    alone_since: Option<Instant>,
}

/// What to do with a request that changes the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is new: carry it out.
    New,
    /// It was carried out before, with this reply.
    Again(Reply),
    /// Its client has given it up, or has its reply.
    Late,
    /// The client does not say which replies it has.
    TooMany,
}

impl Clients {
    pub(super) fn new(memory: Duration) -> Clients {
        Clients { known: HashMap::new(), alone: VecDeque::new(), memory }
    }

    /// One more connection of a client.
    pub(super) fn joined(&mut self, number: ClientNumber, token: usize) {
        let client = self.known.entry(number).or_default();
        client.links.insert(token);
        client.alone_since = None;
    }

    /// A connection has ended; the number of those that are left.
    pub(super) fn parted(&mut self, number: ClientNumber, token: usize, now: Instant) -> usize {
        let Some(client) = self.known.get_mut(&number) else { return 0 };
        if client.links.remove(&token) && client.links.is_empty() {
            client.alone_since = Some(now);
            self.alone.push_back((now, number));
        }
        client.links.len()
    }

    /// The connections of a client.
    pub(super) fn links(&self, number: ClientNumber) -> Vec<usize> {
        self.known.get(&number).map(|client| client.links.iter().copied().collect()).unwrap_or_default()
    }

    /// What to do with request `id` of a client that still waits for the replies to `oldest` and later ones.
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

    /// Request `id` was carried out.
    pub(super) fn keep(&mut self, number: ClientNumber, id: u64, reply: Reply) {
        self.known.entry(number).or_default().kept.insert(id, reply);
    }

    /// When somebody can be forgotten next.
    pub(super) fn next_turn(&self) -> Option<Instant> {
        self.alone.front().map(|(since, _)| *since + self.memory)
    }

    /// Forgets those who have not come back.
    pub(super) fn turn(&mut self, now: Instant) {
        while let Some((since, number)) = self.alone.front().copied()
            && since + self.memory <= now
        {
            self.alone.pop_front();
            if self.known.get(&number).is_some_and(|client| client.alone_since == Some(since)) {
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
        clients.joined(one, 7);
        assert_eq!(clients.judge(one, 1, 1), Verdict::New);
        clients.keep(one, 1, Reply::Number(5));
        for _ in 0..2 {
            assert_eq!(clients.judge(one, 1, 1), Verdict::Again(Reply::Number(5)));
        }
        assert_eq!(clients.judge(one, 2, 1), Verdict::New);
        clients.keep(one, 2, Reply::Done);
        assert_eq!(clients.judge(one, 3, 3), Verdict::New, "the client has the replies to 1 and 2");
        assert_eq!(clients.known[&one].kept.len(), 0);
        assert_eq!(clients.judge(one, 2, 2), Verdict::Late, "a copy that was held up on the way");
        assert_eq!(clients.judge(ClientNumber::random(), 2, 2), Verdict::New, "control: another client's");
    }

    #[test]
    fn a_client_is_remembered_while_it_may_come_back() {
        let (mut clients, one, began) = (Clients::new(MEMORY), ClientNumber::random(), Instant::now());
        clients.joined(one, 7);
        clients.joined(one, 8);
        assert_eq!(clients.parted(one, 7, began), 1);
        clients.keep(one, 1, Reply::Done);
        assert_eq!((clients.parted(one, 8, began), clients.next_turn()), (0, Some(began + MEMORY)));
        clients.joined(one, 9);
        clients.turn(began + MEMORY);
        assert_eq!(clients.judge(one, 1, 1), Verdict::Again(Reply::Done), "it came back");
        clients.parted(one, 9, began + MEMORY);
        clients.turn(began + MEMORY * 2);
        assert!(clients.known.is_empty() && clients.alone.is_empty());
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
