//! Opens the one address that others may connect to.

use crate::JobKey;
use crate::port_holder::{PROC, holder_of};
use crate::socket::tune;
use crate::store::error::StoreError;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

/// How many connections the system may queue before we accept them.
const BACKLOG: i32 = 4096;

/// Listens on exactly `addr` (the first usable one, if a name has several), in non-blocking mode. Without a secret key
/// only loopback is accepted.
pub(crate) fn listen(addr: impl ToSocketAddrs, key: &JobKey) -> Result<TcpListener, StoreError> {
    let mut last = (None, io::Error::from(ErrorKind::NotFound));
    for addr in addr.to_socket_addrs().map_err(StoreError::io("cannot resolve the address to listen on"))? {
        if !key.is_secret() && !addr.ip().is_loopback() {
            return Err(StoreError::NeedsSecret { addr: addr.to_string() });
        }
        match listen_on(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = (Some(addr), error),
        }
    }
    let (addr, source) = last;
    let advice = advice(addr, source.kind());
    let addr = addr.map_or_else(|| "the address".to_string(), |addr| addr.to_string());
    Err(StoreError::Bind { addr, advice, source })
}

fn advice(addr: Option<SocketAddr>, kind: ErrorKind) -> String {
    let holder = || addr.and_then(|addr| holder_of(addr, PROC.as_ref()));
    let advice = match kind {
        ErrorKind::AddrInUse => match holder() {
            Some(holder) => return format!("{holder}; try another port"),
            None => "another program or job uses that port, or RANK=0 was started twice; try another port",
        },
        ErrorKind::AddrNotAvailable => {
            "that is not an address of this machine; try the address of the host of rank 0"
        }
        _ => "try another address",
    };
    advice.to_string()
}

fn listen_on(addr: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(addr)?;
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    tune(&listener)?;
    Ok(listener)
}
