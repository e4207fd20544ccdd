//! The keys of one connection, derived from the job key and all messages of its handshake.
//!
//! Both nonces and the hello are part of the derivation, so no two connections share a key, and a connection that was
//! opened for one purpose cannot be used for another. Each direction has its own key: what one side sent cannot be
//! reflected to it. Not here: what the keys are used for (`frame` in this crate, `tcp` in `drumline-comm`).

use std::fmt;
use zeroize::Zeroizing;

/// The two keys of a connection, as one of its ends sees them.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    outgoing: Zeroizing<[u8; 32]>,
    incoming: Zeroizing<[u8; 32]>,
}

impl Session {
    pub(super) fn new(outgoing: [u8; 32], incoming: [u8; 32]) -> Session {
        Session { outgoing: Zeroizing::new(outgoing), incoming: Zeroizing::new(incoming) }
    }

    /// The same keys, as the other end sees them.
    pub(super) fn reversed(self) -> Session {
        Session { outgoing: self.incoming, incoming: self.outgoing }
    }

    /// The key for what this end sends.
    pub fn outgoing(&self) -> &[u8; 32] {
        &self.outgoing
    }

    /// The key for what the other end sends.
    pub fn incoming(&self) -> &[u8; 32] {
        &self.incoming
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Session(..)")
    }
}
