//! A stream of bytes in both directions that survives the end of its TCP connection.
//!
//! ```text
//!   sent ──▶ our kernel ──▶ network ──▶ their kernel ──▶ read
//!            lost with the connection    drained when it breaks
//!    └─ ring: the bytes that their kernel has not acknowledged
//! ```
//! When the connection breaks, each side drains what its kernel still holds, each sends the number of bytes that it has, and each
//! sends again what the other lacks. So nothing is lost, nothing comes twice, and the bytes are the same. A proxy that
//! acknowledges bytes for the other side may lose more than is kept, which is an error. Not here: how to reconnect (`link`).

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Timespec;

use super::outstanding::num_outstanding;
use super::ring::Ring;

/// More bytes than any kernel holds of what one side has not read.
const MAX_DRAINED: u64 = 64 << 20;

/// How long the other side may take to notice that a connection is broken on purpose.
const NOTICED: Duration = Duration::from_secs(5);

/// Both directions of a link.
#[derive(Debug)]
pub(super) struct Pipe {
    connection: Result<TcpStream, Break>,
    /// Bytes given to the kernel, counted from the link's beginning. Less than the ring's end after a resumption, and while
    /// records wait to be sent; more while the sent bytes still belong to the caller.
    sent: u64,
    ring: Ring,
    /// Bytes that the user of the link has read.
    received: u64,
    /// What arrived over a connection that has ended. The last `num_drained` bytes have not been read.
    drained: Vec<u8>,
    num_drained: usize,
}

/// How and when a connection ended.
#[derive(Debug, Clone)]
pub(super) struct Break {
    pub(super) since: Instant,
    pub(super) cause: String,
    /// Whether the other host did not answer for the host timeout.
    pub(super) timed_out: bool,
}

impl Break {
    fn new(error: &io::Error) -> Self {
        let cause = match error.kind() {
            ErrorKind::UnexpectedEof => "it ended without a goodbye".into(),
            _ => error.to_string(),
        };
        Self { since: Instant::now(), cause, timed_out: error.kind() == ErrorKind::TimedOut }
    }
}

impl Pipe {
    /// A pipe over `stream`, which must not block. `window` is the most that this kernel may hold of what is sent; 0 keeps no
    /// bytes.
    pub(super) fn new(stream: TcpStream, window: usize) -> Self {
        let (ring, drained) = (Ring::new(window), Vec::new());
        Self { connection: Ok(stream), sent: 0, ring, received: 0, drained, num_drained: 0 }
    }

    pub(super) fn stream(&self) -> Option<&TcpStream> {
        self.connection.as_ref().ok()
    }

    pub(super) fn broken(&self) -> Option<&Break> {
        self.connection.as_ref().err()
    }

    /// The number of bytes that need not be sent again.
    pub(super) fn received(&self) -> u64 {
        self.received + self.num_drained as u64
    }

    /// Gives the kernel what it accepts, without the ring: see [`keep`](Self::keep).
    pub(super) fn write(&mut self, pieces: &[IoSlice<'_>]) -> usize {
        if !self.flush() {
            return 0;
        }
        let written = self.act(|mut stream| stream.write_vectored(pieces));
        self.sent += written as u64;
        written
    }

    /// Copies bytes that were written, in the same order: before the caller may change them, and before the link is resumed.
    pub(super) fn keep(&mut self, bytes: &[u8]) {
        let num_kept = match &self.connection {
            _ if self.ring.capacity() == 0 => 0,
            Ok(stream) => num_outstanding(stream).unwrap_or(self.ring.capacity()),
            Err(_) => self.ring.capacity(),
        };
        self.ring.push_last(bytes, num_kept);
    }

    /// The number of bytes sent so far, including those in the ring that the kernel does not have yet.
    pub(super) fn position(&self) -> u64 {
        self.sent.max(self.ring.end())
    }

    /// The other side has read all bytes before this position.
    pub(super) fn forget(&mut self, position: u64) {
        self.ring.forget(position);
    }

    /// Adds `len` bytes, which `make` writes into the ring, for [`flush`](Self::flush) to send.
    pub(super) fn stage(&mut self, len: usize, make: impl FnOnce(&mut [u8])) {
        self.ring.push_with(len, make);
    }

    /// Whether something is staged or must be sent again, and can be.
    pub(super) fn has_backlog(&self) -> bool {
        self.sent < self.ring.end() && self.connection.is_ok()
    }

    /// Gives the kernel what it accepts of what is staged or must be sent again; returns whether that was all.
    pub(super) fn flush(&mut self) -> bool {
        while self.sent < self.ring.end() {
            let Some(pieces) = self.ring.since(self.sent) else { return false };
            let pieces = pieces.map(IoSlice::new);
            let written = match &mut self.connection {
                Ok(stream) => once(stream, |mut stream| stream.write_vectored(&pieces)),
                Err(_) => return false,
            };
            match written {
                Ok(0) => return false,
                Ok(written) => self.sent += written as u64,
                Err(error) => {
                    self.fail(&error);
                    return false;
                }
            }
        }
        true
    }

    /// Reads what has arrived.
    pub(super) fn read(&mut self, pieces: &mut [IoSliceMut<'_>]) -> usize {
        if pieces.iter().all(|piece| piece.is_empty()) {
            return 0;
        }
        let read = if self.num_drained > 0 {
            let rest = &self.drained[self.drained.len() - self.num_drained..];
            let read = (&*rest).read_vectored(pieces).unwrap_or(0);
            self.num_drained -= read;
            read
        } else {
            self.act(|mut stream| match stream.read_vectored(pieces) {
                Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                other => other,
            })
        };
        self.received += read as u64;
        if self.num_drained == 0 {
            self.drained = Vec::new();
        }
        read
    }

    /// Reads what has arrived without consuming it, and so notices if the connection has ended.
    pub(super) fn peek(&mut self, into: &mut [u8]) -> usize {
        if self.num_drained > 0 {
            let rest = &self.drained[self.drained.len() - self.num_drained..];
            return (&*rest).read(into).unwrap_or(0);
        }
        self.act(|stream| match stream.peek(into) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            other => other,
        })
    }

    /// Notices if the connection has ended, also if unread bytes are before its end.
    pub(super) fn notice_end(&mut self) {
        let Ok(stream) = &self.connection else { return };
        let mut fds = [PollFd::new(stream, PollFlags::empty())];
        let is_over = rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
        if is_over {
            let error = stream.take_error().ok().flatten();
            self.fail(&error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into()));
        } else {
            self.peek(&mut [0]);
        }
    }

    /// One call on the connection; 0 if it would block or has broken.
    fn act(&mut self, call: impl FnMut(&TcpStream) -> io::Result<usize>) -> usize {
        let Ok(stream) = &self.connection else { return 0 };
        match once(stream, call) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.fail(&error);
                0
            }
        }
    }

    fn fail(&mut self, error: &io::Error) {
        if let Ok(stream) = std::mem::replace(&mut self.connection, Err(Break::new(error))) {
            let before = self.drained.len();
            // An error means that there is no more.
            let _ = stream.take(MAX_DRAINED).read_to_end(&mut self.drained);
            self.num_drained += self.drained.len() - before;
        }
    }

    /// Breaks the connection on purpose: sends no more over it, and closes it when the other side has noticed. What arrives
    /// until then is read, since the other kernel will not send it again.
    pub(super) fn break_connection(&mut self) {
        let Ok(stream) = &self.connection else { return };
        let _ = stream.shutdown(Shutdown::Write);
        let (deadline, before) = (Instant::now() + NOTICED, self.drained.len());
        while let Err(error) = (&*stream).read_to_end(&mut self.drained)
            && error.kind() == ErrorKind::WouldBlock
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.num_drained += self.drained.len() - before;
        self.fail(&io::Error::other("broken on purpose"));
    }

    /// Gives the connection up: the other side has made a new one.
    pub(super) fn leave_connection(&mut self) {
        if self.connection.is_ok() {
            self.fail(&io::Error::other("the other side gave it up"));
        }
    }

    /// Continues over a new connection with a side that has received this many bytes.
    pub(super) fn resume(&mut self, stream: TcpStream, received_there: u64) -> Result<(), LostBytes> {
        if self.ring.since(received_there).is_none() {
            return Err(LostBytes { received: received_there, sent: self.ring.end() });
        }
        self.sent = received_there;
        self.connection = Ok(stream);
        Ok(())
    }

    /// Shuts the sending direction down.
    pub(super) fn shut(&self) {
        if let Ok(stream) = &self.connection {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

/// Bytes that the other side lacks and that are no longer kept.
#[derive(Debug, thiserror::Error)]
#[error("the other side has received {received} bytes of {sent}, and what follows is no longer kept")]
pub(super) struct LostBytes {
    received: u64,
    sent: u64,
}

/// The call, repeated if a signal interrupted it; 0 if it would block.
fn once(stream: &TcpStream, mut call: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call(stream) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            other => return other,
        }
    }
}
