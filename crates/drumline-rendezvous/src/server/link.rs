//! A connection that has proved the job key: turns received bytes into calls, and replies into bytes.

use crate::client_note::{ClientNote, Line};
use crate::frame::{Call, Frame, FrameError, Opener, Sealer, encode_reply};
use crate::handshake::{Hello, Session};
use crate::store::request::Reply;
use mio::net::TcpStream;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read, Write};

/// With this many bytes waiting to be sent, no more calls are taken: the client must read first.
const HIGH_WATER: usize = 1024 * 1024;
/// How many bytes are read from one link before the others get their turn.
const TURN: usize = 1024 * 1024;
/// How many waits one connection may have open.
pub(super) const MAX_WAITS: usize = 64;
/// A larger buffer is freed when it is empty.
const KEEP: usize = 64 * 1024;

pub(super) struct Link {
    stream: TcpStream,
    pub(super) hello: Hello,
    pub(super) note: ClientNote,
    /// Numbers of the waits that are not answered yet.
    pub(super) waits: BTreeSet<u64>,
    opener: Opener,
    sealer: Sealer,
    input: Vec<u8>,
    /// How many bytes of the input were taken as calls.
    taken: usize,
    output: Vec<u8>,
    /// How many bytes of the output were sent.
    sent: usize,
    /// Whether calls were not taken because of the high water mark.
    delayed: bool,
}

/// A call with its number, and the oldest of its client's requests that has no reply yet.
pub(super) struct Numbered {
    pub(super) id: u64,
    pub(super) oldest: u64,
    pub(super) call: Call,
}

/// The result of reading.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Inflow {
    /// Nothing more for now.
    Dry,
    /// The turn is over, there may be more.
    More,
    /// The other side has closed.
    End,
}

impl Link {
    pub(super) fn new(stream: TcpStream, hello: Hello, note: ClientNote, session: &Session) -> Link {
        Link {
            stream,
            hello,
            note,
            waits: BTreeSet::new(),
            opener: Opener::new(session.incoming()),
            sealer: Sealer::new(session.outgoing()),
            input: Vec::new(),
            taken: 0,
            output: Vec::new(),
            sent: 0,
            delayed: false,
        }
    }

    /// Reads the available bytes, at most one turn's worth, into the input buffer. A short read has emptied the socket,
    /// and later bytes are a new event, unless the end is known to be there too (`to_end`).
    pub(super) fn read(&mut self, scratch: &mut [u8], to_end: ToEnd) -> io::Result<Inflow> {
        let mut total = 0;
        while total < TURN {
            match self.stream.read(scratch) {
                Ok(0) => return Ok(Inflow::End),
                Ok(len) => {
                    self.input.extend_from_slice(&scratch[..len]);
                    total += len;
                    if len < scratch.len() && to_end == ToEnd::No {
                        return Ok(Inflow::Dry);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Inflow::Dry),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Inflow::More)
    }

    /// The next complete call in the input buffer, unless too much waits to be sent.
    pub(super) fn next_call(&mut self) -> Result<Option<Numbered>, FrameError> {
        self.delayed = self.output.len() - self.sent > HIGH_WATER;
        if self.delayed {
            return Ok(None);
        }
        let Some((message, used)) = self.opener.open(&self.input[self.taken..])? else {
            self.input.drain(..self.taken);
            self.taken = 0;
            give_back(&mut self.input);
            return Ok(None);
        };
        let frame = Frame::read(message)?;
        let (oldest, call) = frame.call()?;
        self.taken += used;
        Ok(Some(Numbered { id: frame.id, oldest, call }))
    }

    /// Queues a reply; `true` if the queue was empty.
    pub(super) fn push(&mut self, id: u64, reply: &Reply) -> bool {
        let was_empty = self.output.is_empty();
        self.sealer.seal(&mut self.output, |out| encode_reply(id, reply, out));
        was_empty
    }

    /// Sends as much of the queue as the socket accepts; `true` if delayed calls can continue.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.sent = 0;
        self.output.clear();
        give_back(&mut self.output);
        Ok(self.delayed)
    }

    /// Whether it is its member's life line.
    pub(super) fn is_life_line(&self) -> bool {
        self.note.line != Line::Calls
    }

    /// Whether calls wait until the other side reads.
    pub(super) fn is_delayed(&self) -> bool {
        self.delayed
    }
}

/// Whether a read continues until the socket reports that there is no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToEnd {
    Yes,
    No,
}

fn give_back(buffer: &mut Vec<u8>) {
    if buffer.is_empty() && buffer.capacity() > KEEP {
        *buffer = Vec::new();
    }
}
