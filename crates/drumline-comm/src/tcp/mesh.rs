//! The links of one group, made when first needed: of two ranks the one with the higher number connects.
//! Not here: moving bytes over them (`drive`).

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::hub::{Channel, LinkName};
use crate::process::Process;
use crate::shm::{Context, Stop};

/// Longest wait before looking at death and deadline again.
pub(super) const NAP: Duration = Duration::from_millis(20);

/// How long the link of a rank that has left may take to come in.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Bytes that may be under way on a link in each direction.
const SOCKET_BUFFER: usize = 4 << 20;

/// The links of one rank of one group. Ranks are counted in the group.
#[derive(Debug)]
pub(crate) struct Mesh {
    group: String,
    process: Arc<Process>,
    members: Vec<usize>,
    me: usize,
    pub(super) links: HashMap<usize, TcpStream>,
    /// Tries before sleeping; none when ranks outnumber cores.
    pub(super) spins: u32,
    /// Room for what is received only to be reduced, kept from call to call: new memory costs a page fault each 4 KiB.
    scratch: Vec<u64>,
}

impl Mesh {
    pub(crate) fn new(
        group: String,
        process: Arc<Process>,
        members: Vec<usize>,
        me: usize,
        spins: u32,
    ) -> Self {
        Self { group, process, members, me, links: HashMap::new(), spins, scratch: Vec::new() }
    }

    pub(crate) fn me(&self) -> usize {
        self.me
    }

    pub(super) fn take_scratch(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.scratch)
    }

    pub(super) fn keep_scratch(&mut self, scratch: Vec<u64>) {
        self.scratch = scratch;
    }

    pub(super) fn ensure(&mut self, cx: &Context<'_>, peer: usize) -> Result<(), Stop> {
        if !self.links.contains_key(&peer) {
            let stream = self.open(cx, peer)?;
            prepare(&stream).map_err(|error| Stop::Link { peer, cause: error.to_string() })?;
            self.links.insert(peer, stream);
        }
        Ok(())
    }

    fn open(&self, cx: &Context<'_>, peer: usize) -> Result<TcpStream, Stop> {
        let begin = Instant::now();
        let link = |cause: String| Stop::Link { peer, cause };
        let hub = self.process.hub().map_err(|error| link(error.to_string()))?;
        let connects = self.me > peer;
        let from = if connects { self.me } else { peer };
        let name = LinkName { group: self.group.clone(), channel: Channel::Data, from };
        let mut last_error = String::new();
        let mut left_since = None;
        loop {
            if connects {
                let outcome = self.process.hub_address(self.members[peer], begin + cx.watch.timeout);
                match outcome.and_then(|address| hub.connect(address, &name, begin + cx.watch.timeout)) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last_error = error,
                }
                std::thread::sleep(NAP);
            } else if let Some(stream) = hub.claim(&name) {
                return Ok(stream);
            } else {
                hub.wait_for_news(NAP);
            }
            match cx.watch.check(begin, Some(peer), &|| false) {
                Err(Stop::TimedOut) if connects => return Err(link(last_error)),
                // What it sent before it left may still be on its way through the hub.
                Err(Stop::Left(_))
                    if !connects && left_since.get_or_insert_with(Instant::now).elapsed() < GRACE => {}
                other => other?,
            }
        }
    }
}

/// Of a link that ended while its process was not known to.
pub(crate) const CLOSED: &str = "the other side closed it; try looking at what that rank wrote last";

/// Small packets at once, no blocking, and an end to links whose other side no longer answers.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    // Enough to keep both sides busy while one of them reduces; the kernel may grant less.
    let _ = sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(3))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    // No time limit for data under way: it would also end the link to a peer that is alive and busy with other things, whose
    // window is closed. Its death is news of the store, and its silence has the call's deadline.
    sockopt::set_tcp_user_timeout(stream, 0)?;
    Ok(())
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // What was sent goes out before the end is told. Only if the peer sent something that was not read here does the
        // close that follows reset the link, and what the peer has not read by then may be lost.
        for stream in self.links.values() {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
    }
}
