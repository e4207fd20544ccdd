//! Finds a free port for a server that is started a moment later, for tests and scripts.
//!
//! The system's own choice would be an ephemeral port, which it may give to an outgoing connection a moment later. This
//! one is from below those, and a process gets each one once. It is tested by binding only: a socket that listens, even
//! briefly, may be inherited by a child that another thread is just starting, which would keep the port for a while.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

/// The first port: above the well-known ones, below the ephemeral ones of Linux.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// A free port of the loopback address that this process has not been given before.
///
/// ```
/// use std::net::TcpListener;
///
/// let port = drumline_rendezvous::free_port()?;
/// let listener = TcpListener::bind(("127.0.0.1", port))?;
/// assert_ne!(drumline_rendezvous::free_port()?, port);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn free_port() -> io::Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Processes start at different ports, so that two that search at the same moment do not find the same one.
    let begin = (std::process::id().wrapping_mul(97) % u32::from(COUNT)) as u16;
    for _ in 0..COUNT {
        let port = FIRST + (begin + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        if is_free(port)? {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no port from {FIRST} on is free")))
}

fn is_free(port: u16) -> io::Result<bool> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    match bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::ADDRINUSE) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_in_use_is_not_free_and_others_are_given_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_free(listener.local_addr().unwrap().port()).unwrap());
        let mut ports: Vec<_> = (0..100).map(|_| free_port().unwrap()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| (FIRST..FIRST + COUNT).contains(port)));
    }
}
