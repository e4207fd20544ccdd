//! Reserves a port of this machine for a program that will listen on it later.
//!
//! The port is bound but not listened on. The system does not hand out a bound port to a program that asks for any free
//! port. But it lets a program that asks for this port with `SO_REUSEADDR`, as servers do, listen on it beside us. That
//! would also let another launcher in, so among launchers the port belongs to the one that has claimed its number.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use drumline_rendezvous::PortClaim;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// A port that is reserved until this is dropped.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    port: u16,
    _socket: OwnedFd,
    _claim: PortClaim,
}

impl ReservedPort {
    /// Reserves `port` on all addresses of this machine; 0 takes any free port.
    pub(crate) fn reserve(port: u16) -> io::Result<Self> {
        // PyTorch's servers listen on IPv6 and IPv4 where both exist.
        match Self::bound((Ipv6Addr::UNSPECIFIED, port).into()) {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                Self::bound((Ipv4Addr::UNSPECIFIED, port).into())
            }
            bound => bound,
        }
    }

    fn bound(addr: SocketAddr) -> io::Result<Self> {
        let family = if addr.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // A port requested by number may still have connections that have just ended; any free port has none.
        if addr.port() != 0 {
            set_socket_reuseaddr(&socket, true)?;
        }
        bind(&socket, &addr)?;
        set_socket_reuseaddr(&socket, true)?;
        let bound: SocketAddr = getsockname(&socket)?.try_into()?;
        let port = bound.port();
        Ok(Self { port, _socket: socket, _claim: PortClaim::take(port)? })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_is_only_given_to_a_program_that_asks_for_it() {
        let kept: Vec<_> = (0..300).map(|_| ReservedPort::reserve(0).unwrap()).collect();
        let ports: BTreeSet<_> = kept.iter().map(ReservedPort::port).collect();
        assert_eq!(ports.len(), 300);
        for _ in 0..300 {
            let other = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            assert!(!ports.contains(&other));
        }
        let (all, one) = (("0.0.0.0", kept[0].port()), ("127.0.0.1", kept[1].port()));
        let _listening = (TcpListener::bind(all).unwrap(), TcpListener::bind(one).unwrap());
        assert_eq!(ReservedPort::reserve(kept[1].port()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_port_belongs_to_one_launcher_even_before_a_program_listens() {
        let first = ReservedPort::reserve(0).unwrap();
        let taken = |port| ReservedPort::reserve(port).map_err(|error| error.kind()).err();
        assert_eq!(taken(first.port()), Some(io::ErrorKind::AddrInUse));
        let by_number = {
            let port = first.port();
            drop(first);
            ReservedPort::reserve(port).unwrap()
        };
        assert_eq!(taken(by_number.port()), Some(io::ErrorKind::AddrInUse));
        let other = ReservedPort::reserve(0).unwrap();
        assert_ne!(other.port(), by_number.port(), "control: other ports are free");
    }

    #[test]
    fn a_port_that_is_free_again_can_be_reserved_by_number() {
        let port = ReservedPort::reserve(0).unwrap().port();
        assert_eq!(ReservedPort::reserve(port).unwrap().port(), port);
    }
}
