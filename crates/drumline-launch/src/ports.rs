//! A port of this machine kept for a program that will listen there later: nobody else is given it meanwhile.
//!
//! The port is bound and not listened on. The system gives a bound port to nobody who asks for any, and lets whoever asks
//! for this very one with `SO_REUSEADDR`, as servers do, listen on it beside us. Another launcher would be let as well:
//! among launchers the port belongs to whoever has claimed its number.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use drumline_rendezvous::PortClaim;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// A port that is kept until this is dropped.
#[derive(Debug)]
pub(crate) struct ReservedPort {
    port: u16,
    _socket: OwnedFd,
    _claim: PortClaim,
}

impl ReservedPort {
    /// `port` on all addresses of this machine; 0 takes any that is free.
    pub(crate) fn reserve(port: u16) -> io::Result<Self> {
        // Servers of PyTorch listen on both kinds of addresses where there are both.
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
        // Asked for by number, a port of connections that have just ended is free; any port is one nobody has used.
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
    fn a_reserved_port_is_given_to_nobody_but_who_asks_for_it() {
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
    fn a_port_belongs_to_one_launcher_even_before_anybody_listens() {
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
        assert_ne!(other.port(), by_number.port(), "control: any other can be had");
    }

    #[test]
    fn a_port_that_is_free_again_can_be_had_by_number() {
        let port = ReservedPort::reserve(0).unwrap().port();
        assert_eq!(ReservedPort::reserve(port).unwrap().port(), port);
    }
}
