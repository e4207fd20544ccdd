//! A stream of bytes in both directions that outlives its TCP connection.
//!
//! ```text
//!   sent ──▶ our kernel ──▶ network ──▶ their kernel ──▶ read
//!            lost with the connection    drained when it breaks
//!    └─ ring: the bytes that their kernel has not acknowledged
//! ```
//! When the connection breaks, each side drains what its kernel still has, both tell how many bytes they have, and each sends
//! again what the other lacks. So nothing is lost, nothing comes twice, and the bytes are the same. A proxy that acknowledges
//! in the other side's place may lose more than is kept, which is an error. Not here: how a new connection is made (`link`).

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Timespec;

use super::outstanding::num_outstanding;
use super::ring::Ring;

/// More than any kernel holds of what one side has not read.
const MAX_DRAINED: u64 = 64 << 20;

/// How long the other side may take to notice that a connection is broken on purpose.
const NOTICED: Duration = Duration::from_secs(5);

/// Both directions of a link.
#[derive(Debug)]
pub(super) struct Pipe {
    connection: Result<TcpStream, Break>,
    /// Bytes given to the kernel, counted from the link's beginning. Behind the ring's end after a resumption, and while a
    /// record waits to go out; ahead of it while sent bytes can still be had from their owner.
    sent: u64,
    ring: Ring,
    /// Bytes that were read by whoever uses the link.
    received: u64,
    /// What came over a connection that has ended and has not been read: the last bytes of this many.
    drained: Vec<u8>,
    num_drained: usize,
}

/// How and when a connection ended.
#[derive(Debug, Clone)]
pub(super) struct Break {
    pub(super) since: Instant,
    pub(super) cause: String,
    /// The other host did not answer for as long as hosts are waited for.
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
    /// Over `stream`, which must not block. `window` is the most that this kernel may hold of what is sent; 0 to remember
    /// nothing.
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

    /// Bytes that need not be sent again.
    pub(super) fn received(&self) -> u64 {
        self.received + self.num_drained as u64
    }

    /// Gives the kernel what it takes, past the ring: see [`keep`](Self::keep).
    pub(super) fn write(&mut self, pieces: &[IoSlice<'_>]) -> usize {
        if !self.flush() {
            return 0;
        }
        let written = self.act(|mut stream| stream.write_vectored(pieces));
        self.sent += written as u64;
        written
    }

    /// Remembers bytes that were written, in the order in which they were: before their owner takes them back, and before
    /// the link is resumed.
    pub(super) fn keep(&mut self, bytes: &[u8]) {
        let num_kept = match &self.connection {
            _ if self.ring.capacity() == 0 => 0,
            Ok(stream) => num_outstanding(stream).unwrap_or(self.ring.capacity()),
            Err(_) => self.ring.capacity(),
        };
        self.ring.push_last(bytes, num_kept);
    }

    /// The bytes that were sent so far; those of the ring's that have not gone out count.
    pub(super) fn position(&self) -> u64 {
        self.sent.max(self.ring.end())
    }

    /// The other side has read all bytes before this position.
    pub(super) fn forget(&mut self, position: u64) {
        self.ring.forget(position);
    }

    /// Has `bytes` sent by [`flush`](Self::flush).
    pub(super) fn stage(&mut self, bytes: &[u8]) {
        self.ring.push(bytes);
    }

    /// Whether something is staged, or must be sent again, and can be.
    pub(super) fn has_backlog(&self) -> bool {
        self.sent < self.ring.end() && self.connection.is_ok()
    }

    /// Gives the kernel what it takes of what is staged or must be sent again; says whether that was all.
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

    /// Reads what has come.
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

    /// Looks at what has come without taking it, and so notices if the connection has ended.
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

    /// Notices if the connection has ended, also behind bytes that have come and that nobody has read.
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
            // The kernel holds less; one that would block or has failed has no more.
            let _ = stream.take(MAX_DRAINED).read_to_end(&mut self.drained);
            self.num_drained += self.drained.len() - before;
        }
    }

    /// Breaks the connection on purpose: says no more over it, and leaves it when the other side has noticed. What comes until
    /// then has arrived for the other kernel, which will not send it again.
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

    /// The other side says that the connection has ended: it has made a new one.
    pub(super) fn leave_connection(&mut self) {
        if self.connection.is_ok() {
            self.fail(&io::Error::other("the other side gave it up"));
        }
    }

    /// Continues over a new connection with a side that has received so many bytes.
    pub(super) fn resume(&mut self, stream: TcpStream, received_there: u64) -> Result<(), String> {
        if self.ring.since(received_there).is_none() {
            return Err(format!(
                "the other side has received {received_there} bytes of {}, and what follows is no longer kept",
                self.ring.end()
            ));
        }
        self.sent = received_there;
        self.connection = Ok(stream);
        Ok(())
    }

    /// Says to the kernel that nothing more will be sent.
    pub(super) fn shut(&self) {
        if let Ok(stream) = &self.connection {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

/// The call, again if a signal interrupted it; 0 if it would block.
fn once(stream: &TcpStream, mut call: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call(stream) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            other => return other,
        }
    }
}
