//! One connection of a store's client: a request out, its reply in.
//!
//! A wait whose deadline passes is called off with `Cancel`, and the one reply it gets is still read: the connection
//! stays in order and can be used again. Should that reply be late as well, its number tells it from the next.

use crate::frame::{Call, Frame, FrameError, encode_call};
use crate::store::request::{Reply, Request};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time for the reply to a `Cancel`.
const GRACE: Duration = Duration::from_millis(500);
/// Time for a server to take what we send: one that is frozen does so only as long as the system has room for it.
const SEND: Duration = Duration::from_secs(30);
/// The same for a goodbye, for which nobody should have to wait.
const SEND_BYE: Duration = Duration::from_secs(1);
const CHUNK: usize = 32 * 1024;

#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    last_seq: u64,
    input: Vec<u8>,
    is_life_line: bool,
}

/// Why a connection cannot be used any more.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    Frame(FrameError),
    /// The server ended it and said why.
    Closed(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        Broken::Io(error)
    }
}

impl Wire {
    pub(super) fn new(stream: TcpStream) -> io::Result<Wire> {
        stream.set_write_timeout(Some(SEND))?;
        Ok(Wire { stream, last_seq: 0, input: Vec::new(), is_life_line: false })
    }

    pub(super) fn into_life_line(self) -> Wire {
        Wire { is_life_line: true, ..self }
    }

    pub(super) fn is_life_line(&self) -> bool {
        self.is_life_line
    }

    /// Our address and the server's.
    pub(super) fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.stream.local_addr()?, self.stream.peer_addr()?))
    }

    /// The reply, or `None` if the deadline passed first.
    pub(super) fn call(&mut self, request: Request, deadline: Instant) -> Result<Option<Reply>, Broken> {
        let waits = request.waits();
        let seq = self.send(&Call::Request(request))?;
        if let Some(reply) = self.reply(seq, deadline)? {
            return Ok(Some(reply));
        }
        if waits {
            self.send(&Call::Cancel(seq))?;
        }
        let late = self.reply(seq, Instant::now() + GRACE)?;
        Ok(late.filter(|reply| *reply != Reply::Cancelled))
    }

    pub(super) fn say_bye(&mut self) -> Result<(), Broken> {
        self.stream.set_write_timeout(Some(SEND_BYE))?;
        self.send(&Call::Bye)?;
        Ok(self.stream.set_write_timeout(Some(SEND))?)
    }

    fn send(&mut self, call: &Call) -> Result<u64, Broken> {
        self.last_seq += 1;
        let mut bytes = Vec::new();
        encode_call(self.last_seq, call, &mut bytes);
        self.stream.write_all(&bytes)?;
        Ok(self.last_seq)
    }

    /// Reads until the reply with number `seq`; earlier ones are late and wanted by nobody.
    fn reply(&mut self, seq: u64, deadline: Instant) -> Result<Option<Reply>, Broken> {
        loop {
            while let Some((number, reply)) = self.next_reply()? {
                match reply {
                    Reply::Failed(reason) if number == 0 => return Err(Broken::Closed(reason)),
                    reply if number == seq => return Ok(Some(reply)),
                    _ => {}
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.fill(left)?;
        }
    }

    fn next_reply(&mut self) -> Result<Option<(u64, Reply)>, Broken> {
        let mut rest = self.input.as_slice();
        let Some(frame) = Frame::split(&mut rest).map_err(Broken::Frame)? else { return Ok(None) };
        let reply = (frame.seq, frame.reply().map_err(Broken::Frame)?);
        let used = self.input.len() - rest.len();
        self.input.drain(..used);
        Ok(Some(reply))
    }

    /// Reads once, for at most `patience`.
    fn fill(&mut self, patience: Duration) -> Result<(), Broken> {
        let mut chunk = [0; CHUNK];
        self.stream.set_read_timeout(Some(patience))?;
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(Broken::Io(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.extend_from_slice(&chunk[..len]);
                Ok(())
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
                _ => Err(Broken::Io(error)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wire to somebody who takes the connection and never reads from it.
    fn to_one_who_never_reads() -> (Wire, TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let wire = Wire::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        (wire, listener.accept().unwrap().0)
    }

    fn time_of_bye(wire: &mut Wire) -> (bool, Duration) {
        let began = Instant::now();
        (wire.say_bye().is_ok(), began.elapsed())
    }

    #[test]
    fn a_goodbye_waits_for_nobody_even_if_the_system_has_no_room_for_it() {
        let (mut wire, _silent) = to_one_who_never_reads();
        let (said, took) = time_of_bye(&mut wire);
        assert!(said && took < Duration::from_millis(500), "control: room enough, {took:?}");
        wire.stream.set_nonblocking(true).unwrap();
        while (&wire.stream).write(&[0; CHUNK]).is_ok() {}
        wire.stream.set_nonblocking(false).unwrap();
        let (said, took) = time_of_bye(&mut wire);
        assert!(!said && took < SEND_BYE + Duration::from_secs(2), "{took:?}");
    }
}
