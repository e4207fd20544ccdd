//! A connection that has proved the job key: bytes in become calls, replies become bytes out.

use crate::client_note::{ClientNote, Line};
use crate::frame::{Call, Frame, FrameError, Opener, Sealer, encode_reply};
use crate::handshake::{Hello, Session};
use crate::store::request::Reply;
use mio::net::TcpStream;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read, Write};

/// With this much waiting to be sent, no more calls are taken: one who does not listen is not answered further.
const HIGH_WATER: usize = 1024 * 1024;
/// Bytes read from one link before the others have their turn.
const TURN: usize = 1024 * 1024;
/// Waits that one connection may have open.
pub(super) const MAX_WAITS: usize = 64;
/// A buffer larger than this is given back when it is empty.
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
    /// How much of the input has been taken as calls.
    taken: usize,
    output: Vec<u8>,
    /// How much of the output has been sent.
    sent: usize,
    /// Calls were left untaken because of the high water mark.
    held_up: bool,
}

/// A call as it came: its number, and the oldest of its client's requests that has no reply yet.
pub(super) struct Numbered {
    pub(super) id: u64,
    pub(super) oldest: u64,
    pub(super) call: Call,
}

/// What came of reading.
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
            held_up: false,
        }
    }

    /// Reads what is there, at most one turn's worth, into the input buffer. A short read has emptied the socket and
    /// what comes later is a new event, unless it is known that the end is there too (`to_end`).
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

    /// The next whole call in the input buffer, unless too much waits to be sent.
    pub(super) fn next_call(&mut self) -> Result<Option<Numbered>, FrameError> {
        self.held_up = self.output.len() - self.sent > HIGH_WATER;
        if self.held_up {
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

    /// Sends as much of the queue as the socket takes; `true` if calls that were held up can now go on.
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
        Ok(self.held_up)
    }

    /// Whether it is its member's life line.
    pub(super) fn is_life_line(&self) -> bool {
        self.note.line != Line::Calls
    }

    /// Whether calls wait for the other side to listen.
    pub(super) fn is_held_up(&self) -> bool {
        self.held_up
    }
}

/// Whether a read goes on until the socket says that there is no more.
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
