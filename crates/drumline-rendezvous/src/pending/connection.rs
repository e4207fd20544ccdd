//! A connection that has not proved the job key yet. It costs this struct and a socket, for a short time.

use crate::handshake::{HandshakeError, Hello, Prover, Refusal, ServerHandshake, ServerStep, Session};
use mio::net::TcpStream;
use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::time::Instant;

pub(crate) struct PendingConnection {
    pub(crate) stream: TcpStream,
    pub(super) from: IpAddr,
    pub(super) since: Instant,
    handshake: ServerHandshake,
    buffer: [u8; ServerHandshake::LARGEST],
    filled: usize,
}

/// The result of continuing a handshake.
pub(super) enum Progress {
    Waiting,
    Proved(Hello, Session),
    /// The client has proved the key, but its version differs; it was sent this refusal.
    Refused(Refusal),
    Gone,
}

impl PendingConnection {
    pub(super) fn new(stream: TcpStream, from: IpAddr, since: Instant) -> PendingConnection {
        PendingConnection {
            stream,
            from,
            since,
            handshake: ServerHandshake::new(),
            buffer: [0; ServerHandshake::LARGEST],
            filled: 0,
        }
    }

    /// Whether it has sent the job's tag, which only members know, and those who have seen a member connect.
    pub(super) fn is_tagged(&self) -> bool {
        self.handshake.knows_client()
    }

    /// Reads the available bytes, and never more than the handshake needs.
    pub(super) fn advance(&mut self, prover: &Prover) -> Progress {
        loop {
            if let Some(progress) = self.read_step(prover) {
                return progress;
            }
        }
    }

    /// The same up to the opening: `Waiting` if the opening is right or incomplete.
    pub(super) fn open(&mut self, prover: &Prover) -> Progress {
        while !self.is_tagged() {
            if let Some(progress) = self.read_step(prover) {
                return progress;
            }
        }
        Progress::Waiting
    }

    /// Reads once; `None` if there may be more.
    fn read_step(&mut self, prover: &Prover) -> Option<Progress> {
        let want = self.handshake.want();
        match self.stream.read(&mut self.buffer[self.filled..want]) {
            Ok(0) => return Some(Progress::Gone),
            Ok(len) => self.filled += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(Progress::Waiting),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Some(Progress::Gone),
        }
        if self.filled < want {
            return None;
        }
        self.filled = 0;
        match self.step(prover, want) {
            Ok(None) => None,
            Ok(Some((hello, session))) => Some(Progress::Proved(hello, session)),
            Err(HandshakeError::Refused(refusal)) => Some(Progress::Refused(refusal)),
            Err(error) => {
                tracing::debug!(%error, "closed a connection");
                Some(Progress::Gone)
            }
        }
    }

    fn step(&mut self, prover: &Prover, want: usize) -> Result<Option<(Hello, Session)>, HandshakeError> {
        match self.handshake.receive(prover, &self.buffer[..want])? {
            ServerStep::Send(answer) => self.send(&answer).map(|()| None),
            ServerStep::Proved(hello, session) => Ok(Some((hello, session))),
            ServerStep::Refuse(refusal) => {
                self.refuse(&refusal);
                Err(HandshakeError::Refused(refusal))
            }
        }
    }

    /// A new connection has buffer space for the few bytes of a handshake; one without is not a member's.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        Ok(self.stream.write_all(bytes)?)
    }

    pub(crate) fn refuse(&mut self, refusal: &Refusal) {
        tracing::info!(%refusal, "refused a client");
        let _ = self.send(&ServerHandshake::refusal(refusal));
    }
}
