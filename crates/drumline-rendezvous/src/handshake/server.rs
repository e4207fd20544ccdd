//! The server's side of the handshake, without a socket.

use super::hello::{Cause, Hello, Refusal, SIZE};
use super::proof::Prover;
use super::{ANSWER, HandshakeError, OPENING, PROOF, Session, VERSION};
use crate::job_key::random_bytes;
use hmac::Mac;

/// What the server does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerStep {
    /// Send these bytes, then continue reading.
    Send([u8; ANSWER]),
    /// The client holds the key: decide, and send [`WELCOME`](ServerHandshake::WELCOME) or
    /// [`refusal`](ServerHandshake::refusal). The session holds the connection's keys.
    Proved(Hello, Session),
    /// The client holds the key, but its version differs: send this refusal and close.
    Refuse(Refusal),
}

/// The server's side. Repeat: read [`want`](Self::want) bytes, pass them to [`receive`](Self::receive), and do what it
/// returns. After an error, close without sending a byte.
#[derive(Debug, Default)]
pub struct ServerHandshake {
    exchanged: Option<Exchanged>,
}

/// The messages so far, once the opening is known to be of this job.
#[derive(Debug)]
struct Exchanged {
    version: u16,
    opening: [u8; OPENING],
    answer: [u8; ANSWER],
}

impl ServerHandshake {
    /// The most bytes that [`want`](Self::want) ever returns.
    pub const LARGEST: usize = PROOF;
    /// Sent to a client that is admitted.
    pub const WELCOME: [u8; 1] = [0];

    /// A handshake with one new connection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the client's opening was of this job.
    pub(crate) fn knows_client(&self) -> bool {
        self.exchanged.is_some()
    }

    /// How many bytes to read next, exactly.
    pub fn want(&self) -> usize {
        if self.exchanged.is_some() { PROOF } else { OPENING }
    }

    /// Processes the [`want`](Self::want) bytes that were read.
    pub fn receive(&mut self, prover: &Prover, bytes: &[u8]) -> Result<ServerStep, HandshakeError> {
        match &self.exchanged {
            None => self.answer(prover, bytes),
            Some(exchanged) => exchanged.verify(prover, bytes),
        }
    }

    /// The bytes that tell a client why it is not admitted.
    pub fn refusal(refusal: &Refusal) -> Vec<u8> {
        refusal.encode()
    }

    fn answer(&mut self, prover: &Prover, bytes: &[u8]) -> Result<ServerStep, HandshakeError> {
        let opening: [u8; OPENING] =
            bytes.try_into().map_err(|_| HandshakeError::Stranger("a short opening"))?;
        let version =
            prover.version_of(&opening).ok_or(HandshakeError::Stranger("its opening is not of this job"))?;
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let answer = prover.answer(&opening, &nonce);
        self.exchanged = Some(Exchanged { version, opening, answer });
        Ok(ServerStep::Send(answer))
    }
}

impl Exchanged {
    fn verify(&self, prover: &Prover, bytes: &[u8]) -> Result<ServerStep, HandshakeError> {
        let (hello, proof) = bytes.split_at_checked(SIZE).ok_or(HandshakeError::Stranger("a short proof"))?;
        let expected = prover.client_mac(&self.opening, &self.answer, hello);
        expected.verify_slice(proof).map_err(|_| HandshakeError::Stranger("its proof is wrong"))?;
        if self.version != VERSION {
            let message = format!(
                "the store has version {VERSION}, this rank version {}; try the same build on all ranks",
                self.version
            );
            return Ok(ServerStep::Refuse(Refusal::new(Cause::Version, message)));
        }
        let session = prover.server_session(&self.opening, &self.answer, hello);
        let hello = Hello::decode(hello).ok_or(HandshakeError::Stranger("its hello is invalid"))?;
        Ok(ServerStep::Proved(hello, session))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ClientHandshake, ClientStep, Role};
    use super::*;
    use crate::JobKey;

    fn hello() -> Hello {
        Hello::new(Role::Store).member(1, 4).round(7)
    }

    /// Runs both sides up to the client's proof.
    fn halfway(prover: &Prover, version: u16) -> (ClientHandshake, ServerHandshake, Box<[u8; PROOF]>) {
        let mut client = ClientHandshake::with_version(prover, &hello(), version).unwrap();
        let mut server = ServerHandshake::new();
        let ServerStep::Send(answer) = server.receive(prover, client.opening()).unwrap() else { panic!() };
        let ClientStep::Send(proof) = client.receive(&answer).unwrap() else { panic!() };
        (client, server, proof)
    }

    #[test]
    fn both_sides_with_the_same_key_succeed() {
        let prover = Prover::from(&JobKey::random());
        let (mut client, mut server, proof) = halfway(&prover, VERSION);
        let ServerStep::Proved(received, theirs) = server.receive(&prover, &proof[..]).unwrap() else {
            panic!()
        };
        let ClientStep::Welcome(ours) = client.receive(&ServerHandshake::WELCOME).unwrap() else { panic!() };
        assert_eq!(received, hello());
        assert_eq!((ours.outgoing(), ours.incoming()), (theirs.incoming(), theirs.outgoing()));
        assert_ne!(ours.outgoing(), ours.incoming(), "each direction has its own key");
    }

    #[test]
    fn no_two_connections_share_a_key() {
        let prover = Prover::from(&JobKey::random());
        let session = || {
            let (_, mut server, proof) = halfway(&prover, VERSION);
            let ServerStep::Proved(_, session) = server.receive(&prover, &proof[..]).unwrap() else {
                panic!()
            };
            session
        };
        let (a, b) = (session(), session());
        assert!(a.outgoing() != b.outgoing() && a.incoming() != b.incoming());
        assert_eq!(format!("{a:?}"), "Session(..)");
    }

    #[test]
    fn another_key_fails_on_either_side() {
        let (ours, theirs) = (Prover::from(&JobKey::random()), Prover::from(&JobKey::random()));
        let mut client = ClientHandshake::new(&theirs, &hello()).unwrap();
        assert!(ServerHandshake::new().receive(&ours, client.opening()).is_err());
        // A server that saw the tag but lacks the key.
        let mut nonce_and_guess = [0; ANSWER];
        random_bytes(&mut nonce_and_guess);
        assert!(matches!(client.receive(&nonce_and_guess), Err(HandshakeError::NotProved)));
    }

    #[test]
    fn a_recorded_handshake_cannot_be_replayed() {
        let prover = Prover::from(&JobKey::random());
        let (client, _, proof) = halfway(&prover, VERSION);
        let mut again = ServerHandshake::new();
        again.receive(&prover, client.opening()).unwrap();
        assert!(matches!(
            again.receive(&prover, &proof[..]),
            Err(HandshakeError::Stranger("its proof is wrong"))
        ));
    }

    #[test]
    fn every_changed_bit_of_the_proof_is_noticed() {
        let prover = Prover::from(&JobKey::random());
        let (_, mut server, proof) = halfway(&prover, VERSION);
        for bit in 0..8 * PROOF {
            let mut changed = proof.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(server.receive(&prover, &changed[..]).is_err(), "bit {bit}");
        }
        assert!(server.receive(&prover, &proof[..]).is_ok(), "control: unchanged");
    }

    #[test]
    fn another_version_gets_both_values_after_the_proof() {
        let prover = Prover::from(&JobKey::random());
        let (mut client, mut server, proof) = halfway(&prover, 9);
        let ServerStep::Refuse(refusal) = server.receive(&prover, &proof[..]).unwrap() else { panic!() };
        let bytes = ServerHandshake::refusal(&refusal);
        assert_eq!(client.receive(&bytes[..1]).unwrap(), ClientStep::More);
        let error = client.receive(&bytes[1..]).unwrap_err().to_string();
        assert!(error.contains("version 2, this rank version 9"), "{error}");
    }
}
