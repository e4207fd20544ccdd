//! Computes the job's tag and the two proofs from the job key.

use super::{ANSWER, MAGIC, OPENING, Session};
use crate::JobKey;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// A job key, with the part of the HMAC precomputed that is the same for all handshakes. Cheap to clone.
#[derive(Clone)]
pub struct Prover(Hmac<Sha256>);

impl From<&JobKey> for Prover {
    fn from(key: &JobKey) -> Prover {
        Prover(Hmac::new_from_slice(key.as_bytes()).expect("HMAC takes keys of any length"))
    }
}

impl Prover {
    /// The MAC over the parts, one after the other; the first is a label that no other use shares.
    fn mac(&self, parts: [&[u8]; 4]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        parts.into_iter().for_each(|part| mac.update(part));
        mac
    }

    pub(super) fn opening(&self, version: u16, nonce: &[u8; 32]) -> [u8; OPENING] {
        let mut opening = [0; OPENING];
        opening[..8].copy_from_slice(&MAGIC);
        opening[8..10].copy_from_slice(&version.to_le_bytes());
        opening[10..26].copy_from_slice(&self.tag().finalize().into_bytes()[..16]);
        opening[26..].copy_from_slice(nonce);
        opening
    }

    fn tag(&self) -> Hmac<Sha256> {
        self.mac([b"drumline tag", b"", b"", b""])
    }

    /// The version in an opening that has our tag; the comparison takes the same time whatever is wrong.
    pub(super) fn version_of(&self, opening: &[u8; OPENING]) -> Option<u16> {
        let tag_fits = self.tag().verify_truncated_left(&opening[10..26]).is_ok();
        (opening[..8] == MAGIC && tag_fits).then(|| u16::from_le_bytes([opening[8], opening[9]]))
    }

    pub(super) fn answer(&self, opening: &[u8; OPENING], nonce: &[u8; 32]) -> [u8; ANSWER] {
        let mut answer = [0; ANSWER];
        answer[..32].copy_from_slice(nonce);
        answer[32..].copy_from_slice(&self.server_mac(opening, nonce).finalize().into_bytes());
        answer
    }

    pub(super) fn is_servers(&self, opening: &[u8; OPENING], answer: &[u8; ANSWER]) -> bool {
        let (nonce, proof) = answer.split_at(32);
        self.server_mac(opening, nonce).verify_slice(proof).is_ok()
    }

    fn server_mac(&self, opening: &[u8; OPENING], nonce: &[u8]) -> Hmac<Sha256> {
        self.mac([b"drumline server", opening, nonce, b""])
    }

    pub(super) fn client_mac(
        &self,
        opening: &[u8; OPENING],
        answer: &[u8; ANSWER],
        hello: &[u8],
    ) -> Hmac<Sha256> {
        self.mac([b"drumline client", opening, answer, hello])
    }

    /// The keys of the connection with this handshake, as the client sees them.
    pub(super) fn client_session(
        &self,
        opening: &[u8; OPENING],
        answer: &[u8; ANSWER],
        hello: &[u8],
    ) -> Session {
        let key = |label| self.mac([label, opening, answer, hello]).finalize().into_bytes().into();
        Session::new(key(b"drumline to server"), key(b"drumline to client"))
    }

    /// The same keys as the server sees them.
    pub(super) fn server_session(
        &self,
        opening: &[u8; OPENING],
        answer: &[u8; ANSWER],
        hello: &[u8],
    ) -> Session {
        self.client_session(opening, answer, hello).reversed()
    }
}

impl fmt::Debug for Prover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Prover(..)")
    }
}
