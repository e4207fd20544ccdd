//! The client's side of the handshake on one blocking socket, with a deadline. The server's side is in `pending`.

use super::{ClientHandshake, ClientStep, HandshakeError, Hello, Prover, Session};
use crate::JobKey;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Proves the key to the server, after the server has proved it to us. Returns the connection's keys.
pub fn connect(
    stream: &mut TcpStream,
    key: &JobKey,
    hello: &Hello,
    deadline: Instant,
) -> Result<Session, HandshakeError> {
    connect_with(stream, &Prover::from(key), hello, deadline)
}

pub(crate) fn connect_with(
    stream: &mut TcpStream,
    prover: &Prover,
    hello: &Hello,
    deadline: Instant,
) -> Result<Session, HandshakeError> {
    let mut handshake = ClientHandshake::new(prover, hello)?;
    let mut socket = Socket { stream, began: Instant::now(), deadline };
    socket.send(handshake.opening())?;
    let mut buffer = [0; super::MESSAGE];
    loop {
        let bytes = &mut buffer[..handshake.want()];
        socket.fill(bytes)?;
        match handshake.receive(bytes)? {
            ClientStep::Send(proof) => socket.send(&proof[..])?,
            ClientStep::More => {}
            ClientStep::Welcome(session) => return socket.finish().map(|()| session),
        }
    }
}

struct Socket<'a> {
    stream: &'a mut TcpStream,
    began: Instant,
    deadline: Instant,
}

impl Socket<'_> {
    fn send(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write_all(bytes).map_err(|error| self.failed(error))
    }

    fn fill(&mut self, mut bytes: &mut [u8]) -> Result<(), HandshakeError> {
        while !bytes.is_empty() {
            self.stream.set_read_timeout(Some(self.left()?))?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(HandshakeError::Closed),
                Ok(len) => bytes = &mut bytes[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Removes the time limits from the socket.
    fn finish(&self) -> Result<(), HandshakeError> {
        self.stream.set_read_timeout(None)?;
        Ok(self.stream.set_write_timeout(None)?)
    }

    fn left(&self) -> Result<Duration, HandshakeError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(HandshakeError::Timeout(self.began.elapsed())) } else { Ok(left) }
    }

    fn failed(&self, error: io::Error) -> HandshakeError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => HandshakeError::Timeout(self.began.elapsed()),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => HandshakeError::Closed,
            _ => HandshakeError::Io(error),
        }
    }
}
