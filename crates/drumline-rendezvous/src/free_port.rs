//! A port for a server that is started a moment later, as tests and scripts want one.
//!
//! Asking the system for any port gives one of those that it also gives to every outgoing connection, so that it may be gone
//! a moment later. This one is from below them, and each is given once by a process. It is tried by binding alone: a socket that listens,
//! even for a moment, may be inherited by a child that another thread is just starting, and then keeps the port a little.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

/// Ports from here on: above the well-known ones, below those that Linux gives out by itself.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// A port of the loopback address that nobody has, and that this process has not been given before.
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
    // Processes begin at different places, so that two that look at the same moment do not find the same port.
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
    fn a_port_somebody_listens_on_is_not_free_and_others_are_given_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_free(listener.local_addr().unwrap().port()).unwrap());
        let mut ports: Vec<_> = (0..100).map(|_| free_port().unwrap()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| (FIRST..FIRST + COUNT).contains(port)));
    }
}
