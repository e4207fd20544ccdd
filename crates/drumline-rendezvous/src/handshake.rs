//! The handshake: both sides prove that they hold the job key, before either sends or trusts anything else.
//!
//! ```text
//!  client                                                   server
//!    │ opening 58:  magic 8, version 2, job tag 16, nonce 32  │   unknown tag: closed without a byte
//!    ├───────────────────────────────────────────────────────▶│
//!    │ answer 64:   nonce 32, proof 32                        │   the server proves itself first
//!    │◀───────────────────────────────────────────────────────┤
//!    │ proof 384:   hello 352, proof 32                       │   who I am, bound to both nonces
//!    ├───────────────────────────────────────────────────────▶│
//!    │ verdict 1:   0, or the cause of refusal + message 320  │
//!    │◀───────────────────────────────────────────────────────┤
//! ```
//! The tag and the proofs are HMAC-SHA256 under the job key. The proofs cover all bytes exchanged so far, and each side
//! uses its own label: nothing recorded can be replayed, nothing reflected. They are compared in constant time: a key
//! that is nearly right learns no more, and no sooner, than any other. Every message has a fixed size, so no length is
//! ever taken from the other side, and a reader never reads past the handshake. These layouts never change; `version`
//! counts what follows the handshake. Both sides end with the same [`Session`], the keys of what follows.
//!
//! [`ClientHandshake`] and [`ServerHandshake`] do no input or output. [`connect`] runs the first on a socket, a
//! [`Gate`](crate::Gate) the second on many.

mod blocking;
mod client;
mod hello;
mod proof;
mod server;
mod session;

pub use blocking::connect;
pub(crate) use blocking::connect_with;
pub use client::{ClientHandshake, ClientStep};
pub(crate) use hello::this_host;
pub use hello::{Cause, Hello, MAX_HOST, MAX_NOTE, Refusal, Role};
pub use proof::Prover;
pub use server::{ServerHandshake, ServerStep};
pub use session::Session;

use std::io;
use std::time::Duration;

/// First bytes of every connection.
pub const MAGIC: [u8; 8] = *b"DRUMLINE";
/// Version of what follows the handshake.
pub const VERSION: u16 = 2;
/// Bytes of the client's opening.
pub const OPENING: usize = 8 + 2 + 16 + 32;
/// Bytes of the server's answer.
pub const ANSWER: usize = 32 + 32;
/// Bytes of the client's proof.
pub const PROOF: usize = hello::SIZE + 32;
/// Bytes of a refusal's message.
pub const MESSAGE: usize = 320;

/// A server with too many pending connections drops the oldest, but not one that has sent the job's tag within this
/// time, in which a member answers.
pub(crate) const YOUNG: Duration = Duration::from_millis(100);

/// How a handshake fails.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// Client: the server does not hold the key.
    #[error(
        "the server did not prove the job key: it belongs to another job or is another program; try checking address, port and job key"
    )]
    NotProved,
    /// Client: the server ended the connection without an answer.
    #[error(
        "the server closed the connection without an answer, as it does with a job key it does not know: it belongs to another job or is another program; try checking address, port and job key"
    )]
    Closed,
    /// Client: the server holds the key and refuses this client.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// Server: the client does not hold the key.
    #[error("not a client of this job: {0}")]
    Stranger(&'static str),
    /// The deadline passed.
    #[error("the other side was silent for {0:?}")]
    Timeout(Duration),
    /// A field of the hello is too long.
    #[error("{field} may have {limit} bytes, got {bytes}")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The most allowed.
        limit: usize,
    },
    /// The connection broke.
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] io::Error),
}
