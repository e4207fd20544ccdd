//! Claims a port of this machine for a program that will listen on it later.
//!
//! Two sockets that are bound with `SO_REUSEADDR` may share a port as long as neither listens. A claim is the name of
//! an abstract Unix socket: only one process can have it, the kernel frees it when its holder ends, and like the port
//! it is specific to one network namespace.

use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A port that is claimed until this is dropped.
#[derive(Debug)]
pub struct PortClaim {
    _socket: Option<UnixDatagram>,
}

impl PortClaim {
    /// Claims `port`; [`ErrorKind::AddrInUse`] if another process has. If the system does not allow such a socket,
    /// nothing is claimed.
    ///
    /// ```
    /// use drumline_rendezvous::PortClaim;
    ///
    /// let claim = PortClaim::take(29_555)?;
    /// assert!(PortClaim::take(29_555).is_err());
    /// drop(claim);
    /// assert!(PortClaim::take(29_555).is_ok());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn take(port: u16) -> io::Result<Self> {
        let name = SocketAddr::from_abstract_name(claim_name(port))?;
        match UnixDatagram::bind_addr(&name) {
            Ok(socket) => Ok(Self { _socket: Some(socket) }),
            Err(error) if error.kind() == ErrorKind::AddrInUse => Err(error),
            Err(error) => {
                tracing::debug!(%error, port, "cannot claim the port");
                Ok(Self { _socket: None })
            }
        }
    }
}

/// The socket's name.
pub(crate) fn claim_name(port: u16) -> String {
    format!("drumline/port/{port}")
}
