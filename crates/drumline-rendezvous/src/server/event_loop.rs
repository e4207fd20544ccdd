//! The server's event loop: waits for sockets, reads calls, lets the core answer, sends replies.
//!
//! Sockets report a change once (edge triggered), so links that stop reading early are listed in `again`. A connection
//! keeps the token that it got while pending; an event for a closed one is ignored.

use super::clients::{Clients, Verdict};
use super::grace_periods::{GracePeriods, Missing};
use super::link::{Inflow, Link, MAX_WAITS, Numbered, ToEnd};
use super::members::{Entry, Members};
use super::process::has_ended;
use super::{ServerOptions, Shared};
use crate::client_note::ClientNote;
use crate::core::{Core, Replies};
use crate::events::{Event, LOG, MEMBERS_SHARE, incarnation_key};
use crate::frame::{Call, FrameError};
use crate::handshake::{Cause, Hello, Prover, Refusal, ServerHandshake};
use crate::pending::{Authenticated, HandshakeResult, LISTEN, PendingConnections, WAKE};
use crate::store::request::{Reply, Request};
use crate::worker_env::host_timeout;
use mio::{Events, Poll, Token, Waker};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SCRATCH: usize = 64 * 1024;

/// The connection and the number of a request; connection 0 is the server itself.
type Ticket = (usize, u64);

/// Why the server closes a connection.
#[derive(Debug, thiserror::Error)]
enum CloseReason {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("one connection may have {MAX_WAITS} waits open, this has more")]
    TooManyWaits,
    #[error("one client has too many requests without a reply")]
    TooManyUnanswered,
    #[error("rank {rank} was reported as lost, because its life line broke and was not restored")]
    Lost { rank: u32 },
}

pub(super) struct EventLoop {
    poll: Poll,
    pending: PendingConnections,
    shared: Arc<Shared>,
    members: Members,
    clients: Clients,
    grace_periods: GracePeriods,
    core: Core<Ticket>,
    links: HashMap<usize, Link>,
    /// Links that may have more to read.
    again: Vec<usize>,
    /// Links with replies that were not sent yet.
    unsent: Vec<usize>,
    scratch: Vec<u8>,
}

impl EventLoop {
    pub(super) fn new(
        listener: std::net::TcpListener,
        prover: Prover,
        options: ServerOptions,
        shared: Arc<Shared>,
    ) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let pending = PendingConnections::new(listener, prover, poll.registry().try_clone()?)?;
        Ok(EventLoop {
            poll,
            pending,
            shared,
            members: Members::new(options),
            // A client gives up when the store was silent for the host timeout.
            clients: Clients::new(host_timeout() * 2),
            grace_periods: GracePeriods::default(),
            core: Core::new(),
            links: HashMap::new(),
            again: Vec::new(),
            unsent: Vec::new(),
            scratch: vec![0; SCRATCH],
        })
    }

    pub(super) fn waker(&self) -> io::Result<Waker> {
        Waker::new(self.poll.registry(), WAKE)
    }

    /// Serves until the owner stops it.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout = self.poll_timeout(Instant::now());
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != ErrorKind::Interrupted
            {
                tracing::error!(%error, "the store's event queue failed; the store ends");
                return;
            }
            self.turn(&events);
        }
    }

    fn turn(&mut self, events: &Events) {
        for token in std::mem::take(&mut self.again) {
            self.serve(token, ToEnd::Yes);
        }
        for event in events {
            match event.token() {
                WAKE => {}
                LISTEN => self.pending.listener_changed(),
                Token(token) if event.is_read_closed() => self.serve(token, ToEnd::Yes),
                Token(token) => self.serve(token, ToEnd::No),
            }
        }
        let now = Instant::now();
        self.pending.turn(now);
        self.clients.turn(now);
        for member in self.grace_periods.due(now, has_ended) {
            self.lose(member);
        }
        self.send_unsent();
    }

    /// How long the loop may wait for sockets; `None` means without limit.
    fn poll_timeout(&self, now: Instant) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let turns = [self.pending.next_turn(), self.clients.next_turn(), self.grace_periods.next_turn(now)];
        Some(turns.into_iter().flatten().min()?.saturating_duration_since(now))
    }

    fn serve(&mut self, token: usize, to_end: ToEnd) {
        if self.links.contains_key(&token) {
            return self.serve_link(token, to_end);
        }
        match self.pending.serve(token) {
            Some(HandshakeResult::Authenticated(connection)) => self.admit(*connection),
            Some(HandshakeResult::Refused(refusal)) => self.announce_refusal(None, refusal),
            None => {}
        }
    }

    fn admit(&mut self, authenticated: Authenticated) {
        let Authenticated { token, mut connection, hello, session } = authenticated;
        let (note, entry) = match self.judge(&hello) {
            Ok(judged) => judged,
            Err(refusal) => {
                connection.refuse(&refusal);
                return self.announce_refusal(Some(&hello), refusal);
            }
        };
        // If this fails, the first read reports it, and the link is closed as usual.
        let _ = connection.send(&ServerHandshake::WELCOME);
        if entry == Entry::Resumed {
            self.resume(&hello, note);
        }
        self.record(entry);
        self.clients.connected(note.number, token);
        self.links.insert(token, Link::new(connection.stream, hello, note, &session));
        self.count_others();
        self.serve_link(token, ToEnd::Yes);
    }

    fn judge(&mut self, hello: &Hello) -> Result<(ClientNote, Entry), Refusal> {
        let note = ClientNote::decode(&hello.note).ok_or_else(|| {
            Refusal::new(Cause::Other, "this is a store, and the note is not that of a store's client")
        })?;
        if self.shared.ending.load(Ordering::Relaxed) && self.members.is_new(hello, note) {
            let message =
                format!("the job is ending, {hello} is too late; try starting it with the next job");
            return Err(Refusal::new(Cause::Ending, message));
        }
        Ok((note, self.members.admit(hello, note)?))
    }

    /// The member has a new life line; the previous one, if it has not ended yet, is closed.
    fn resume(&mut self, hello: &Hello, note: ClientNote) {
        tracing::info!(member = %hello, "the life line was restored");
        for token in self.clients.links(note.number) {
            if self.links.get(&token).is_some_and(Link::is_life_line) {
                self.cut(token);
            }
        }
        self.grace_periods.end(Missing { rank: hello.rank.unwrap_or(u32::MAX), number: note.number });
    }

    /// Records the meeting of a new member. If the member was in another one, joining here has ended that.
    fn record(&mut self, entry: Entry) {
        let Entry::LifeLine { rank, incarnation, before } = entry else { return };
        if let Some(before) = before {
            self.append(Event::Left { rank }.to_line_in(before));
        }
        self.apply(Request::Set { key: incarnation_key(rank), value: incarnation.to_string().into() });
    }

    /// Informs the ranks that wait for a refused one.
    fn announce_refusal(&mut self, hello: Option<&Hello>, refusal: Refusal) {
        if let Some((incarnation, event)) = self.members.refused(hello, refusal) {
            self.append(event.to_line_in(incarnation));
        }
    }

    fn serve_link(&mut self, token: usize, to_end: ToEnd) {
        let Some(link) = self.links.get_mut(&token) else { return };
        let inflow = match link.flush() {
            // Calls that were read before come first; the socket reports when it accepts more.
            Ok(_) if link.is_delayed() => Ok(Inflow::Dry),
            Ok(_) => link.read(&mut self.scratch, to_end),
            Err(error) => Err(error),
        };
        if let Err(error) = self.carry_out_all(token) {
            return self.close_because(token, &error);
        }
        match inflow {
            Ok(Inflow::Dry) => {}
            Ok(Inflow::More) => self.again.push(token),
            Ok(Inflow::End) | Err(_) => self.close(token),
        }
    }

    fn carry_out_all(&mut self, token: usize) -> Result<(), CloseReason> {
        while let Some(link) = self.links.get_mut(&token)
            && let Some(numbered) = link.next_call()?
        {
            self.carry_out(token, numbered)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, token: usize, numbered: Numbered) -> Result<(), CloseReason> {
        let Numbered { id, oldest, call } = numbered;
        let Some(link) = self.links.get_mut(&token) else { return Ok(()) };
        let ticket = (token, id);
        let mut replies = Vec::new();
        match call {
            Call::Request(request) if request.changes() => {
                replies = self.change_once(ticket, oldest, request)?;
            }
            Call::Request(request) => {
                if request.waits() {
                    link.waits.insert(id);
                }
                self.core.apply(ticket, request, &mut replies);
            }
            Call::Cancel(target) => {
                if self.core.cancel((token, target)) {
                    replies.push(((token, target), Reply::Cancelled));
                }
            }
            Call::Bye => {
                self.members.leave(&link.hello, link.note.number);
                self.count_others();
            }
            Call::Ping => replies.push((ticket, Reply::Done)),
        }
        self.deliver(replies);
        match self.links.get(&token) {
            Some(link) if link.waits.len() > MAX_WAITS => Err(CloseReason::TooManyWaits),
            _ => Ok(()),
        }
    }

    /// Carries out a request that changes the store, unless it was carried out before.
    fn change_once(
        &mut self,
        ticket: Ticket,
        oldest: u64,
        request: Request,
    ) -> Result<Replies<Ticket>, CloseReason> {
        let (token, id) = ticket;
        let Some(link) = self.links.get(&token) else { return Ok(Vec::new()) };
        let number = link.note.number;
        let is_member = link.hello.rank.is_some();
        let mut replies = Vec::new();
        match self.clients.judge(number, id, oldest) {
            Verdict::New => {}
            Verdict::Again(reply) => return Ok(vec![(ticket, reply)]),
            Verdict::Late => {
                let reason = format!("request {id} is too late, its client has given it up");
                return Ok(vec![(ticket, Reply::Failed(reason))]);
            }
            Verdict::TooMany => return Err(CloseReason::TooManyUnanswered),
        }
        match &request {
            Request::Append { key, value }
                if key == LOG && is_member && self.core.len_of(LOG) + value.len() > MEMBERS_SHARE =>
            {
                let reason = format!("the event log has {MEMBERS_SHARE} bytes for members and is full");
                replies.push((ticket, Reply::Failed(reason)));
            }
            _ => self.core.apply(ticket, request, &mut replies),
        }
        if let Some((_, reply)) = replies.iter().find(|(its, _)| *its == ticket) {
            self.clients.keep(number, id, reply.clone());
        }
        Ok(replies)
    }

    fn deliver(&mut self, replies: Replies<Ticket>) {
        for ((token, id), reply) in replies {
            let Some(link) = self.links.get_mut(&token) else { continue };
            link.waits.remove(&id);
            if link.push(id, &reply) {
                self.unsent.push(token);
            }
        }
    }

    fn send_unsent(&mut self) {
        // Closing a link can cause replies to others.
        while let Some(token) = self.unsent.pop() {
            let Some(link) = self.links.get_mut(&token) else { continue };
            match link.flush() {
                Ok(false) => {}
                Ok(true) => self.again.push(token),
                Err(_) => self.close(token),
            }
        }
    }

    fn close_because(&mut self, token: usize, reason: &CloseReason) {
        if let Some(link) = self.links.get_mut(&token) {
            tracing::warn!(member = %link.hello, %reason, "closed a connection");
            link.push(0, &Reply::Failed(reason.to_string()));
            let _ = link.flush();
        }
        self.close(token);
    }

    /// Closes a link. If it was the life line of a member that has not said goodbye, the member may come back for a
    /// moment.
    fn close(&mut self, token: usize) {
        let Some(link) = self.cut(token) else { return };
        let now = Instant::now();
        let number = link.note.number;
        let others = self.clients.links(number).len();
        let Some(rank) = link.hello.rank.filter(|_| self.members.is_present(&link.hello, number)) else {
            return;
        };
        let member = Missing { rank, number };
        if link.is_life_line() {
            let pid = self.members.can_see_process(link.note).then_some(link.hello.pid);
            self.grace_periods.begin(member, pid, others, now);
        } else if others == 0 {
            self.grace_periods.disconnected(member, now);
        }
    }

    /// Closes a link and cancels its waits.
    fn cut(&mut self, token: usize) -> Option<Link> {
        let link = self.links.remove(&token)?;
        for id in &link.waits {
            self.core.cancel((token, *id));
        }
        self.clients.disconnected(link.note.number, token, Instant::now());
        Some(link)
    }

    /// Reports a member that has not come back as lost: to all that follow the log, and to the member itself, should it
    /// still live.
    fn lose(&mut self, member: Missing) {
        let Missing { rank, number } = member;
        let Some(event) = self.members.lose(rank, number) else { return };
        self.append(event.to_line());
        self.count_others();
        for token in self.clients.links(number) {
            self.close_because(token, &CloseReason::Lost { rank });
        }
    }

    /// Appends a line to the event log.
    fn append(&mut self, line: Vec<u8>) {
        self.apply(Request::Append { key: LOG.into(), value: line });
    }

    /// Carries out a request of the server itself.
    fn apply(&mut self, request: Request) {
        let mut replies = Vec::new();
        self.core.apply((WAKE.0, 0), request, &mut replies);
        self.deliver(replies);
    }

    fn count_others(&self) {
        self.shared.set_others(self.members.num_others());
    }
}
