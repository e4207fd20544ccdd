//! The options of every socket of a store.

use crate::worker_env::host_timeout;
use rustix::net::sockopt;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Silence after which the system probes the other host, and the time between two probes.
const PROBE: Duration = Duration::from_secs(5);

/// Sets the options: small frames are sent at once, and a connection ends when the other host was silent for
/// `DRUMLINE_HOST_TIMEOUT`. Set on a listener, they apply to all its connections.
pub(crate) fn tune(socket: &impl AsFd) -> io::Result<()> {
    let timeout = host_timeout();
    let probe = PROBE.min(timeout / 2).max(Duration::from_secs(1));
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, probe)?;
    sockopt::set_tcp_keepintvl(socket, probe)?;
    // The user timeout decides, also for probes; the count only has to be larger.
    let probes = timeout.as_secs() / probe.as_secs() + 1;
    sockopt::set_tcp_keepcnt(socket, u32::try_from(probes).unwrap_or(MAX_PROBES).min(MAX_PROBES))?;
    sockopt::set_tcp_user_timeout(
        socket,
        u32::try_from(timeout.as_millis()).unwrap_or(MAX_TIMEOUT).min(MAX_TIMEOUT),
    )?;
    Ok(())
}

/// The system's limits: probes, and milliseconds in 31 bits.
const MAX_PROBES: u32 = 127;
const MAX_TIMEOUT: u32 = i32::MAX as u32;
