//! The server's turns: wait for sockets, read calls, let the core answer, send replies.
//!
//! Sockets report a change once (edge triggered), so links that stop reading early are noted down in `again`. A
//! connection keeps the token that the doorstep gave it; an event for a closed one finds nobody.

use super::clients::{Clients, Verdict};
use super::grace::{Graces, Missing};
use super::link::{Inflow, Link, MAX_WAITS, Numbered, ToEnd};
use super::process::has_ended;
use super::roster::{Entry, Roster};
use super::{ServerOptions, Shared};
use crate::client_note::ClientNote;
use crate::core::{Core, Replies};
use crate::doorstep::{Doorstep, Knock, LISTEN, Proved, WAKE};
use crate::events::{Event, LOG, MEMBERS_SHARE, incarnation_key};
use crate::frame::Call;
use crate::handshake::{Cause, Hello, Prover, Refusal, ServerHandshake};
use crate::store::request::{Reply, Request};
use crate::worker_env::host_timeout;
use mio::{Events, Poll, Token, Waker};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SCRATCH: usize = 64 * 1024;

/// Connection and number of the request; connection 0 is the server itself.
type Ticket = (usize, u64);

pub(super) struct EventLoop {
    poll: Poll,
    doorstep: Doorstep,
    shared: Arc<Shared>,
    roster: Roster,
    clients: Clients,
    graces: Graces,
    core: Core<Ticket>,
    links: HashMap<usize, Link>,
    /// Links that may have more to read.
    again: Vec<usize>,
    /// Links with replies that nobody has tried to send.
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
        let doorstep = Doorstep::new(listener, prover, poll.registry().try_clone()?)?;
        Ok(EventLoop {
            poll,
            doorstep,
            shared,
            roster: Roster::new(options),
            // A client gives up when the store was silent for as long as a host is waited for.
            clients: Clients::new(host_timeout() * 2),
            graces: Graces::default(),
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

    /// Serves until told to stop.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.shared.stop.load(Ordering::Acquire) {
            let patience = self.patience(Instant::now());
            if let Err(error) = self.poll.poll(&mut events, patience)
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
                LISTEN => self.doorstep.ring(),
                Token(token) if event.is_read_closed() => self.serve(token, ToEnd::Yes),
                Token(token) => self.serve(token, ToEnd::No),
            }
        }
        let now = Instant::now();
        self.doorstep.turn(now);
        self.clients.turn(now);
        for member in self.graces.due(now, has_ended) {
            self.lose(member);
        }
        self.send_unsent();
    }

    /// How long nothing can happen by itself.
    fn patience(&self, now: Instant) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let turns = [self.doorstep.next_turn(), self.clients.next_turn(), self.graces.next_turn(now)];
        Some(turns.into_iter().flatten().min()?.saturating_duration_since(now))
    }

    fn serve(&mut self, token: usize, to_end: ToEnd) {
        if self.links.contains_key(&token) {
            return self.serve_link(token, to_end);
        }
        match self.doorstep.serve(token) {
            Some(Knock::Proved(proved)) => self.admit(*proved),
            Some(Knock::Refused(refusal)) => self.tell_of(None, refusal),
            None => {}
        }
    }

    fn admit(&mut self, proved: Proved) {
        let Proved { token, mut stranger, hello, session } = proved;
        let (note, entry) = match self.judge(&hello) {
            Ok(judged) => judged,
            Err(refusal) => {
                stranger.refuse(&refusal);
                return self.tell_of(Some(&hello), refusal);
            }
        };
        // If this fails, the first read will tell, and the link ends as links do.
        let _ = stranger.send(&ServerHandshake::WELCOME);
        if entry == Entry::Resumed {
            self.resume(&hello, note);
        }
        self.record(entry);
        self.clients.joined(note.number, token);
        self.links.insert(token, Link::new(stranger.stream, hello, note, &session));
        self.count_others();
        self.serve_link(token, ToEnd::Yes);
    }

    fn judge(&mut self, hello: &Hello) -> Result<(ClientNote, Entry), Refusal> {
        let note = ClientNote::decode(&hello.note)
            .ok_or_else(|| Refusal::new(Cause::Other, "this is a store, and the note is not a client's"))?;
        if self.shared.ending.load(Ordering::Relaxed) && self.roster.is_new(hello, note) {
            let message =
                format!("the job is ending, {hello} comes too late; try starting it with the next one");
            return Err(Refusal::new(Cause::Ending, message));
        }
        Ok((note, self.roster.admit(hello, note)?))
    }

    /// The member has a new life line; the one before, if it has not ended yet, is of no more use.
    fn resume(&mut self, hello: &Hello, note: ClientNote) {
        tracing::info!(member = %hello, "the life line was made again");
        for token in self.clients.links(note.number) {
            if self.links.get(&token).is_some_and(Link::is_life_line) {
                self.cut(token);
            }
        }
        self.graces.end(Missing { rank: hello.rank.unwrap_or(u32::MAX), number: note.number });
    }

    /// Writes down in which meeting a new member takes part. One that was in another has left that by coming here.
    fn record(&mut self, entry: Entry) {
        let Entry::LifeLine { rank, incarnation, before } = entry else { return };
        if let Some(before) = before {
            self.append(Event::Left { rank }.to_line_in(before));
        }
        self.apply(Request::Set { key: incarnation_key(rank), value: incarnation.to_string().into() });
    }

    /// Those who wait for one that was refused learn it.
    fn tell_of(&mut self, hello: Option<&Hello>, refusal: Refusal) {
        if let Some((incarnation, event)) = self.roster.refused(hello, refusal) {
            self.append(event.to_line_in(incarnation));
        }
    }

    fn serve_link(&mut self, token: usize, to_end: ToEnd) {
        let Some(link) = self.links.get_mut(&token) else { return };
        let inflow = match link.flush() {
            // What was read before comes first; the socket says when it takes more.
            Ok(_) if link.is_held_up() => Ok(Inflow::Dry),
            Ok(_) => link.read(&mut self.scratch, to_end),
            Err(error) => Err(error),
        };
        if let Err(error) = self.carry_out_all(token) {
            return self.close_because(token, error);
        }
        match inflow {
            Ok(Inflow::Dry) => {}
            Ok(Inflow::More) => self.again.push(token),
            Ok(Inflow::End) | Err(_) => self.close(token),
        }
    }

    fn carry_out_all(&mut self, token: usize) -> Result<(), String> {
        while let Some(link) = self.links.get_mut(&token)
            && let Some(numbered) = link.next_call().map_err(|error| error.to_string())?
        {
            self.carry_out(token, numbered)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, token: usize, Numbered { id, oldest, call }: Numbered) -> Result<(), String> {
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
                self.roster.leave(&link.hello, link.note.number);
                self.count_others();
            }
            Call::Ping => replies.push((ticket, Reply::Done)),
        }
        self.deliver(replies);
        match self.links.get(&token) {
            Some(link) if link.waits.len() > MAX_WAITS => {
                Err(format!("one connection may have {MAX_WAITS} waits open, this has more"))
            }
            _ => Ok(()),
        }
    }

    /// Carries out a request that changes the store, unless it has come before.
    fn change_once(
        &mut self,
        ticket: Ticket,
        oldest: u64,
        request: Request,
    ) -> Result<Replies<Ticket>, String> {
        let (token, id) = ticket;
        let Some(link) = self.links.get(&token) else { return Ok(Vec::new()) };
        let (number, is_member) = (link.note.number, link.hello.rank.is_some());
        let mut replies = Vec::new();
        match self.clients.judge(number, id, oldest) {
            Verdict::New => {}
            Verdict::Again(reply) => return Ok(vec![(ticket, reply)]),
            Verdict::Late => {
                let reason = format!("request {id} comes too late, its client has given it up");
                return Ok(vec![(ticket, Reply::Failed(reason))]);
            }
            Verdict::TooMany => return Err("one client has too many requests without a reply".into()),
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
        // Closing a link can bring about replies to others.
        while let Some(token) = self.unsent.pop() {
            let Some(link) = self.links.get_mut(&token) else { continue };
            match link.flush() {
                Ok(false) => {}
                Ok(true) => self.again.push(token),
                Err(_) => self.close(token),
            }
        }
    }

    fn close_because(&mut self, token: usize, error: String) {
        if let Some(link) = self.links.get_mut(&token) {
            tracing::warn!(member = %link.hello, %error, "closed a connection");
            link.push(0, &Reply::Failed(error));
            let _ = link.flush();
        }
        self.close(token);
    }

    /// Ends a link. A member whose life line it was, and who has not said goodbye, may come back for a moment.
    fn close(&mut self, token: usize) {
        let Some(link) = self.cut(token) else { return };
        let now = Instant::now();
        let (number, others) = (link.note.number, self.clients.links(link.note.number).len());
        let Some(rank) = link.hello.rank.filter(|_| self.roster.is_there(&link.hello, number)) else {
            return;
        };
        let member = Missing { rank, number };
        if link.is_life_line() {
            let pid = self.roster.sees_process(link.note).then_some(link.hello.pid);
            self.graces.begin(member, pid, others, now);
        } else if others == 0 {
            self.graces.alone(member, now);
        }
    }

    /// Ends a link and calls off its waits.
    fn cut(&mut self, token: usize) -> Option<Link> {
        let link = self.links.remove(&token)?;
        for id in &link.waits {
            self.core.cancel((token, *id));
        }
        self.clients.parted(link.note.number, token, Instant::now());
        Some(link)
    }

    /// A member has not come back: everybody who follows the log learns it, and so does it, should it live.
    fn lose(&mut self, Missing { rank, number }: Missing) {
        let Some(event) = self.roster.lose(rank, number) else { return };
        self.append(event.to_line());
        self.count_others();
        for token in self.clients.links(number) {
            let reason = format!(
                "rank {rank} was reported as lost, since the connection that shows that it lives broke and was not made again"
            );
            self.close_because(token, reason);
        }
    }

    /// Adds a line to the log.
    fn append(&mut self, line: Vec<u8>) {
        self.apply(Request::Append { key: LOG.into(), value: line });
    }

    /// The server's own request.
    fn apply(&mut self, request: Request) {
        let mut replies = Vec::new();
        self.core.apply((WAKE.0, 0), request, &mut replies);
        self.deliver(replies);
    }

    fn count_others(&self) {
        self.shared.set_others(self.roster.num_others());
    }
}
