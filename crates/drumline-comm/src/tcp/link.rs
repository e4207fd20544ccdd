//! A link between two ranks: a pipe, with records if it is protected, that is reconnected when its connection breaks.
//!
//! ```text
//!   drive, streams ──▶ records (none: straight through) ──▶ pipe ──▶ TCP connection
//!                                                            ▲ broken: the side that connected connects again,
//!                                                              the other accepts the connection under the same name
//! ```
//! A break is no error: nothing moves until the link is reconnected ([`Link::maintain`]) by the call that waits for it, or by
//! the `reconnector` if no call does. The connecting side tries as long as a silent host is waited for. The other side waits
//! for it: its calls have their deadlines, and the store reports the death of a rank.

use std::io::{IoSlice, IoSliceMut, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use drumline_rendezvous::handshake::Session;

use super::drive::BURST;
use super::frame::{GOODBYE, HEADER};
use super::hub::{Arrival, DialError, Hub};
use super::name::LinkName;
use super::pipe::{Break, Pipe};
use super::record::{BadRecord, MAX_DATA, Opener, Sealer};
use super::resumption::{self, ANSWER};
use super::security::LinkSecurity;

/// The pause between two attempts to reconnect.
const REST: Duration = Duration::from_millis(50);

/// How long a goodbye may take if the other side has no room for it.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(100);

/// One link of a group.
#[derive(Debug)]
pub(crate) struct Link {
    name: LinkName,
    /// Where the other side listens, if this side connects.
    dials: Option<SocketAddr>,
    pipe: Pipe,
    records: Option<Records>,
    attempt: Attempt,
    /// When the other side last answered an attempt to reconnect.
    last_answer: Option<Instant>,
    /// Why the link will not be reconnected.
    error: Option<ReconnectError>,
    /// The position at which the current step began. When the other side sends its next header, it has read all before it.
    mark: u64,
    /// Whether a frame has begun and not ended: a goodbye would be read as a part of it.
    pub(crate) is_mid_frame: bool,
}

/// Why a link could not be reconnected.
#[derive(Debug, Clone)]
pub(crate) enum ReconnectError {
    /// The other side has dropped the link. This matters only to a call that still needs it.
    Refused(String),
    /// Bytes that were sent may be lost, or somebody has tampered with the new connection.
    Lost(String),
}

impl ReconnectError {
    /// The reason, if it ends the call.
    pub(crate) fn cause(self, is_needed: bool) -> Option<String> {
        match self {
            Self::Refused(cause) => is_needed.then_some(cause),
            Self::Lost(cause) => Some(cause),
        }
    }
}

/// The layer between data and the pipe of a protected link.
#[derive(Debug)]
struct Records {
    sealer: Sealer,
    opener: Opener,
    /// Length of the data in records that have not been sent completely. It counts as written only then.
    staged: usize,
}

/// The state of reconnecting.
#[derive(Debug)]
enum Attempt {
    /// Connect, but not before this time.
    At(Instant),
    /// A connection is made. These are the bytes read so far of the other side's answer.
    Answer(Arrival, Vec<u8>),
}

impl Link {
    /// A link that this side has made.
    pub(crate) fn dialled(
        hub: &Hub,
        address: SocketAddr,
        name: &LinkName,
        deadline: Instant,
    ) -> Result<Self, DialError> {
        let (stream, session) = hub.connect(address, name, None, deadline)?;
        Ok(Self::new(hub, name, Some(address), stream, &session))
    }

    /// The link that the other side has made, if it has.
    pub(crate) fn arrived(hub: &Hub, name: &LinkName) -> Option<Self> {
        let Arrival { stream, session } = hub.claim(name)?;
        Some(Self::new(hub, name, None, stream, &session))
    }

    fn new(
        hub: &Hub,
        name: &LinkName,
        dials: Option<SocketAddr>,
        stream: TcpStream,
        session: &Session,
    ) -> Self {
        let records = match hub.security(name) {
            LinkSecurity::None => None,
            security => Some(Records {
                sealer: Sealer::new(security, session.outgoing()),
                opener: Opener::new(security, session.incoming()),
                staged: 0,
            }),
        };
        let pipe = Pipe::new(stream, hub.window(name));
        let attempt = Attempt::At(Instant::now());
        Self {
            name: name.clone(),
            dials,
            pipe,
            records,
            attempt,
            last_answer: None,
            error: None,
            mark: 0,
            is_mid_frame: false,
        }
    }

    /// The descriptor to poll; `None` while the connection is broken.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.stream().map(AsFd::as_fd)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.pipe.broken().is_some()
    }

    /// Sends what it can of the two slices, and returns how much that is. The rest must be passed again.
    pub(crate) fn write(&mut self, first: &[u8], second: &[u8]) -> usize {
        let Some(records) = &mut self.records else {
            return self.pipe.write(&[IoSlice::new(first), IoSlice::new(second)]);
        };
        if records.staged == 0 {
            records.staged = records.stage(&mut self.pipe, first, second);
        }
        if self.pipe.flush() { std::mem::take(&mut records.staged) } else { 0 }
    }

    /// Copies bytes that were written, in case they must be sent again.
    pub(crate) fn keep(&mut self, bytes: &[u8]) {
        // Records are kept when they are made.
        if self.records.is_none() {
            self.pipe.keep(bytes);
        }
    }

    /// A step begins. The other side begins the step only when it has read all that was sent before.
    pub(crate) fn mark(&mut self) {
        self.mark = self.pipe.position();
    }

    /// The other side has begun the step: what was sent before it need not be kept.
    pub(crate) fn acknowledge(&mut self) {
        self.pipe.forget(self.mark);
    }

    /// Reads what has arrived into the two slices, and returns how much that is.
    pub(crate) fn read(&mut self, first: &mut [u8], second: &mut [u8]) -> Result<usize, BadRecord> {
        let Some(records) = &mut self.records else {
            return Ok(self.pipe.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)]));
        };
        let mut read = 0;
        for into in [first, second] {
            let len = records.read(&mut self.pipe, into)?;
            read += len;
            if len < into.len() {
                break;
            }
        }
        Ok(read)
    }

    /// The next header, if all of it has arrived; it is not consumed.
    pub(crate) fn peek(&mut self) -> Option<[u8; HEADER]> {
        let mut header = [0; HEADER];
        match &mut self.records {
            None => (self.pipe.peek(&mut header) == HEADER).then_some(header),
            Some(records) => {
                // A bad record is an error for the call that reads it.
                records.opener.open_ahead().ok()?;
                if records.opener.left().is_empty() {
                    records.fill(&mut self.pipe);
                    records.opener.open_ahead().ok()?;
                }
                records.opener.left().first_chunk().copied()
            }
        }
    }

    /// Whether data that was accepted is still to be sent: only after the link was reconnected.
    pub(crate) fn has_backlog(&self) -> bool {
        self.pipe.has_backlog()
    }

    /// Sends what it can of the backlog.
    pub(crate) fn catch_up(&mut self) {
        self.pipe.flush();
    }

    /// Notices the end of a connection that nothing is sent or read over at the moment, continues to reconnect a broken one,
    /// and sends what was lost with it.
    pub(crate) fn maintain(&mut self, hub: &Hub) -> Result<(), ReconnectError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        self.pipe.notice_end();
        self.reconnect(hub).inspect_err(|error| self.error = Some(error.clone()))?;
        self.catch_up();
        Ok(())
    }

    /// One attempt to reconnect; an error after enough attempts, or if it cannot succeed.
    fn reconnect(&mut self, hub: &Hub) -> Result<(), ReconnectError> {
        match (self.dials, self.pipe.broken().cloned()) {
            (None, _) => self.accept_new_connection(hub),
            (Some(_), None) => Ok(()),
            (Some(address), Some(broken)) => self.redial(hub, address, &broken),
        }
    }

    /// Accepts a new connection. The other side may have made it before this one has noticed that the old one has ended.
    fn accept_new_connection(&mut self, hub: &Hub) -> Result<(), ReconnectError> {
        let Some((arrival, received_there)) = hub.claim_resumed(&self.name) else { return Ok(()) };
        let Arrival { stream, session } = arrival;
        self.pipe.leave_connection();
        // The write cannot be partial: nothing was sent over this connection before.
        let answer = resumption::encode(self.pipe.received(), &session);
        let written = std::io::Write::write(&mut &stream, &answer);
        if !matches!(written, Ok(resumption::ANSWER)) {
            return Ok(());
        }
        self.resume(stream, received_there)
    }

    fn redial(&mut self, hub: &Hub, address: SocketAddr, broken: &Break) -> Result<(), ReconnectError> {
        let error = match &mut self.attempt {
            Attempt::At(at) if *at > Instant::now() => return Ok(()),
            Attempt::At(_) => match hub.connect(
                address,
                &self.name,
                Some(self.pipe.received()),
                Instant::now() + hub.host_timeout(),
            ) {
                Ok((stream, session)) => {
                    self.last_answer = Some(Instant::now());
                    self.attempt = Attempt::Answer(Arrival { stream, session }, Vec::new());
                    return Ok(());
                }
                Err(DialError::Refused(reason)) => return Err(ReconnectError::Refused(reason)),
                Err(DialError::Failed(error)) => error,
            },
            Attempt::Answer(made, known) => match read_answer(&made.stream, known) {
                Ok(None) => return Ok(()),
                Ok(Some(answer)) => {
                    let received_there = resumption::decode(&answer, &made.session);
                    let received_there =
                        received_there.map_err(|bad| ReconnectError::Lost(bad.to_string()))?;
                    let rest = Attempt::At(Instant::now());
                    let Attempt::Answer(made, _) = std::mem::replace(&mut self.attempt, rest) else {
                        return Ok(());
                    };
                    return self.resume(made.stream, received_there);
                }
                Err(error) => error.to_string(),
            },
        };
        self.attempt = Attempt::At(Instant::now() + REST);
        // If the connection broke because the host was silent for so long, it is not waited for again.
        let host_timeout = if broken.timed_out { Duration::ZERO } else { hub.host_timeout() };
        let tried = self.last_answer.map_or(broken.since, |answer| answer.max(broken.since)).elapsed();
        if tried < host_timeout {
            return Ok(());
        }
        Err(ReconnectError::Lost(format!(
            "the connection to {address} broke ({}) and could not be made again for {:.0} s ({error}); try looking at the \
             network between the two hosts, or a longer DRUMLINE_HOST_TIMEOUT",
            broken.cause,
            tried.as_secs_f64()
        )))
    }

    fn resume(&mut self, stream: TcpStream, received_there: u64) -> Result<(), ReconnectError> {
        let broken = self.pipe.broken().cloned();
        let resumed = self.pipe.resume(stream, received_there);
        resumed.map_err(|lost| ReconnectError::Lost(lost.to_string()))?;
        let LinkName { group, from, to, .. } = &self.name;
        tracing::info!(group, from, to, cause = broken.map(|broken| broken.cause), "reconnected a link");
        Ok(())
    }

    /// Whether it is broken, and may still be reconnected.
    pub(super) fn is_reconnecting(&self, hub: &Hub) -> bool {
        self.pipe.broken().is_some_and(|broken| broken.since.elapsed() < hub.host_timeout())
    }

    /// Since when, and why, it is broken, as text.
    pub(crate) fn break_text(&self) -> Option<String> {
        let Break { since, cause, .. } = self.pipe.broken()?;
        let seconds = since.elapsed().as_secs_f64();
        Some(format!(
            "its connection broke {seconds:.0} s ago ({cause}) and the other side has not made it again"
        ))
    }

    /// Breaks the connection as a network would; the link is then reconnected.
    pub(crate) fn break_connection(&mut self) {
        self.pipe.break_connection();
    }

    /// Sends a goodbye: nothing more will be sent, and the link need not be reconnected.
    pub(crate) fn say_goodbye(&mut self) {
        let deadline = Instant::now() + GOODBYE_TIMEOUT;
        let mut sent = self.is_mid_frame as usize * HEADER;
        while sent < HEADER && !self.is_broken() && Instant::now() < deadline {
            match self.write(&GOODBYE[sent..], &[]) {
                0 => std::thread::sleep(Duration::from_millis(1)),
                written => sent += written,
            }
        }
        // The kernel sends everything before the end. But if the peer sent something that was not read here, the close that
        // follows resets the connection, and what the peer has not read by then may be lost.
        self.pipe.shut();
    }
}

impl Records {
    /// Makes records of the two slices, at most a burst; returns the length of their data. Several records are sent by one
    /// system call.
    fn stage(&mut self, pipe: &mut Pipe, mut first: &[u8], mut second: &[u8]) -> usize {
        let mut staged = 0;
        while staged + MAX_DATA <= BURST && !(first.is_empty() && second.is_empty()) {
            let head = first.split_off(..first.len().min(MAX_DATA)).unwrap_or_default();
            // A header before long data has its own record, so that records end where the reader's buffers end.
            let room = if !head.is_empty() && second.len() >= MAX_DATA { 0 } else { MAX_DATA - head.len() };
            let tail = second.split_off(..second.len().min(room)).unwrap_or_default();
            let len = head.len() + tail.len();
            pipe.stage(self.sealer.record_len(len), |record| self.sealer.seal([head, tail], record));
            staged += len;
        }
        staged
    }

    /// Copies verified data into `into`; reads more if there is none.
    fn read(&mut self, pipe: &mut Pipe, into: &mut [u8]) -> Result<usize, BadRecord> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let len = self.opener.read(into)?;
            if len > 0 {
                return Ok(len);
            }
            if self.fill(pipe) == 0 {
                return Ok(0);
            }
        }
    }

    /// Reads what has arrived, and returns how much that is.
    fn fill(&mut self, pipe: &mut Pipe) -> usize {
        let read = pipe.read(&mut [IoSliceMut::new(self.opener.room())]);
        self.opener.fill(read);
        read
    }
}

/// Reads more of the answer to a new connection; `None` if not all of it has arrived.
fn read_answer(mut stream: &TcpStream, known: &mut Vec<u8>) -> std::io::Result<Option<[u8; ANSWER]>> {
    let mut bytes = [0; ANSWER];
    match stream.read(&mut bytes[known.len()..]) {
        Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
        Ok(read) => {
            let missing = known.len();
            known.extend_from_slice(&bytes[missing..missing + read]);
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(known.as_slice().try_into().ok())
}
