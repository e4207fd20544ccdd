//! What is set on every socket of a store.

use rustix::net::sockopt;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Small frames leave at once, and a host that has vanished without a word is noticed after ten seconds. Set on a
/// listener, it holds for all its connections.
pub(crate) fn tune(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, 5)?;
    sockopt::set_tcp_user_timeout(socket, 10_000)?;
    Ok(())
}
