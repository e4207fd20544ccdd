//! The client's side of the handshake, without a socket.

use super::hello::{Hello, Refusal, SIZE};
use super::proof::Prover;
use super::{ANSWER, HandshakeError, MESSAGE, OPENING, PROOF, Session, VERSION};
use crate::job_key::random_bytes;
use hmac::Mac;

/// What the client does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientStep {
    /// Send these bytes, then continue reading.
    Send(Box<[u8; PROOF]>),
    /// Continue reading.
    More,
    /// Both sides have proved the key and the server admits us; these are the connection's keys.
    Welcome(Session),
}

/// The client's side. Send [`opening`](Self::opening). Then repeat: read [`want`](Self::want) bytes, pass them to
/// [`receive`](Self::receive), and do what it returns.
#[derive(Debug)]
pub struct ClientHandshake {
    prover: Prover,
    opening: [u8; OPENING],
    hello: Box<[u8; SIZE]>,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Answer,
    Verdict(Session),
    Message(u8),
}

impl ClientHandshake {
    /// A handshake as `hello`.
    pub fn new(prover: &Prover, hello: &Hello) -> Result<Self, HandshakeError> {
        Self::with_version(prover, hello, VERSION)
    }

    /// Pretends that this program has another version; for tests.
    #[doc(hidden)]
    pub fn with_version(prover: &Prover, hello: &Hello, version: u16) -> Result<Self, HandshakeError> {
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let opening = prover.opening(version, &nonce);
        let hello = Box::new(hello.encode()?);
        Ok(ClientHandshake { prover: prover.clone(), opening, hello, state: State::Answer })
    }

    /// The first bytes to send.
    pub fn opening(&self) -> &[u8; OPENING] {
        &self.opening
    }

    /// How many bytes to read next, exactly.
    pub fn want(&self) -> usize {
        match self.state {
            State::Answer => ANSWER,
            State::Verdict(_) => 1,
            State::Message(_) => MESSAGE,
        }
    }

    /// Processes the [`want`](Self::want) bytes that were read.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<ClientStep, HandshakeError> {
        match (&self.state, bytes) {
            (State::Answer, _) => self.prove(bytes.try_into().map_err(|_| HandshakeError::NotProved)?),
            (State::Verdict(session), [0]) => Ok(ClientStep::Welcome(session.clone())),
            (State::Verdict(_), [cause, ..]) => {
                self.state = State::Message(*cause);
                Ok(ClientStep::More)
            }
            (State::Verdict(_), []) => Ok(ClientStep::More),
            (State::Message(cause), message) => {
                Err(HandshakeError::Refused(Refusal::decode(*cause, message)))
            }
        }
    }

    /// Checks the server's proof before anything more is sent.
    fn prove(&mut self, answer: &[u8; ANSWER]) -> Result<ClientStep, HandshakeError> {
        if !self.prover.is_servers(&self.opening, answer) {
            return Err(HandshakeError::NotProved);
        }
        let mac = self.prover.client_mac(&self.opening, answer, &self.hello[..]).finalize().into_bytes();
        let mut proof = Box::new([0; PROOF]);
        proof[..SIZE].copy_from_slice(&self.hello[..]);
        proof[SIZE..].copy_from_slice(&mac);
        self.state = State::Verdict(self.prover.client_session(&self.opening, answer, &self.hello[..]));
        Ok(ClientStep::Send(proof))
    }
}
