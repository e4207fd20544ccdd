//! The server's turns: wait for sockets, read calls, let the core answer, send replies.
//!
//! Sockets report a change once (edge triggered), so links that stop reading early are noted down in `again`. A
//! connection keeps the token that the doorstep gave it; an event for a closed one finds nobody.

use super::link::{Inflow, Link, MAX_WAITS, ToEnd};
use super::roster::{Entry, Roster};
use super::{ServerOptions, Shared};
use crate::core::{Core, Replies};
use crate::doorstep::{Doorstep, Knock, LISTEN, Proved, WAKE};
use crate::events::{Event, LOG, MEMBERS_SHARE, incarnation_key};
use crate::frame::Call;
use crate::handshake::{Cause, Hello, Prover, Refusal, ServerHandshake};
use crate::store::request::{Reply, Request};
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
        self.doorstep.turn(Instant::now());
        self.send_unsent();
    }

    /// How long nothing can happen by itself.
    fn patience(&self, now: Instant) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        Some(self.doorstep.next_turn()?.saturating_duration_since(now))
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
        let Proved { token, mut stranger, hello, .. } = proved;
        let verdict = if self.shared.ending.load(Ordering::Relaxed) && self.roster.is_new(&hello) {
            let message =
                format!("the job is ending, {hello} comes too late; try starting it with the next one");
            Err(Refusal::new(Cause::Ending, message))
        } else {
            self.roster.admit(&hello)
        };
        match verdict {
            Err(refusal) => {
                stranger.refuse(&refusal);
                self.tell_of(Some(&hello), refusal);
            }
            Ok(entry) => {
                // If this fails, the first read will tell, and the link ends as links do.
                let _ = stranger.send(&ServerHandshake::WELCOME);
                let is_life_line = entry != Entry::Further;
                self.record(entry);
                self.links.insert(token, Link::new(stranger.stream, hello, is_life_line));
                self.count_others();
                self.serve_link(token, ToEnd::Yes);
            }
        }
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
            && let Some((seq, call)) = link.next_call().map_err(|error| error.to_string())?
        {
            self.carry_out(token, seq, call)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, token: usize, seq: u64, call: Call) -> Result<(), String> {
        let mut replies = Vec::new();
        match call {
            Call::Request(Request::Append { key, value })
                if key == LOG
                    && self.core.len_of(LOG) + value.len() > MEMBERS_SHARE
                    && self.links.get(&token).is_some_and(|link| link.hello.rank.is_some()) =>
            {
                let reason = format!("the event log has {MEMBERS_SHARE} bytes for members and is full");
                replies.push(((token, seq), Reply::Failed(reason)));
            }
            Call::Request(request) => {
                let Some(link) = self.links.get_mut(&token) else { return Ok(()) };
                if request.waits() {
                    link.waits.insert(seq);
                }
                self.core.apply((token, seq), request, &mut replies);
            }
            Call::Cancel(target) => {
                if self.core.cancel((token, target)) {
                    replies.push(((token, target), Reply::Cancelled));
                }
            }
            Call::Bye => {
                if let Some(link) = self.links.get(&token) {
                    self.roster.leave(&link.hello);
                    self.count_others();
                }
            }
        }
        self.deliver(replies);
        match self.links.get(&token) {
            Some(link) if link.waits.len() > MAX_WAITS => {
                Err(format!("one connection may have {MAX_WAITS} waits open, this has more"))
            }
            _ => Ok(()),
        }
    }

    fn deliver(&mut self, replies: Replies<Ticket>) {
        for ((token, seq), reply) in replies {
            let Some(link) = self.links.get_mut(&token) else { continue };
            link.waits.remove(&seq);
            if link.push(seq, &reply) {
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

    /// Ends a link; if it was a life line and no goodbye was said, everybody who follows the log learns it.
    fn close(&mut self, token: usize) {
        let Some(link) = self.links.remove(&token) else { return };
        for seq in &link.waits {
            self.core.cancel((token, *seq));
        }
        if !link.is_life_line {
            return;
        }
        if let Some(event) = self.roster.lose(&link.hello) {
            tracing::warn!(member = %link.hello, "lost");
            self.append(event.to_line());
        }
        self.count_others();
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
