//! A link between two ranks: a pipe, protected if that is asked for, that is made again when its connection breaks.
//!
//! ```text
//!   drive, streams ──▶ records (none: straight through) ──▶ pipe ──▶ TCP connection
//!                                                            ▲ broken: the side that dialled dials again,
//!                                                              the other takes in what comes under the same name
//! ```
//! A break is no error: nothing moves until the link is mended ([`Link::look_after`]) by the call that waits for it, or by the
//! `mender` while no call does. The side that dials tries for as long as a silent host is waited for. The other side waits for
//! it: its calls have their deadlines, and the death of a rank is news of the store.

use std::io::{IoSlice, IoSliceMut, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use drumline_rendezvous::handshake::Session;

use super::frame::{GOODBYE, HEADER};
use super::hub::{Arrival, Dialled, Hub};
use super::name::LinkName;
use super::pipe::{Break, Pipe};
use super::record::{Opener, Sealer};
use super::security::LinkSecurity;

/// Rest between two attempts to make a connection again.
const REST: Duration = Duration::from_millis(50);

/// How long a goodbye may take that the other side has no room for.
const FAREWELL: Duration = Duration::from_millis(100);

/// One link of a group.
#[derive(Debug)]
pub(crate) struct Link {
    name: LinkName,
    /// Where the other side listens, if it is this side that connects.
    dials: Option<SocketAddr>,
    pipe: Pipe,
    records: Option<Records>,
    attempt: Attempt,
    /// When the other side last answered an attempt to make the connection again.
    heard: Option<Instant>,
    /// Why it will not be made again.
    unmended: Option<Unmended>,
    /// What was sent before this position is read when the other side sends the next header.
    mark: u64,
    /// A frame has begun and not ended, so a goodbye would be taken for a part of it.
    pub(crate) is_mid_frame: bool,
}

/// Why a link could not be made again.
#[derive(Debug, Clone)]
pub(crate) enum Unmended {
    /// The other side does not want it any more: of no concern to who has nothing to say to it or hear from it.
    Refused(String),
    /// It may lack what was sent.
    Lost(String),
}

impl Unmended {
    /// The reason, if it is one to stop for.
    pub(crate) fn cause(self, is_needed: bool) -> Option<String> {
        match self {
            Self::Refused(cause) => is_needed.then_some(cause),
            Self::Lost(cause) => Some(cause),
        }
    }
}

/// What stands between data and the pipe.
#[derive(Debug)]
struct Records {
    sealer: Sealer,
    opener: Opener,
    /// Data of a record that has not gone out as a whole. Its owner is told only then that it was taken.
    staged: usize,
}

/// How far this side is with making the connection again.
#[derive(Debug)]
enum Attempt {
    /// Not before then.
    At(Instant),
    /// A connection is made; these bytes of what the other side has received are known.
    Answer(TcpStream, Vec<u8>),
}

impl Link {
    /// A link that this side has made.
    pub(crate) fn dialled(
        hub: &Hub,
        address: SocketAddr,
        name: &LinkName,
        deadline: Instant,
    ) -> Result<Self, Dialled> {
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
        let (name, heard, unmended) = (name.clone(), None, None);
        Self { name, dials, pipe, records, attempt, heard, unmended, mark: 0, is_mid_frame: false }
    }

    /// What to wait for; `None` while it is broken.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.stream().map(AsFd::as_fd)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.pipe.broken().is_some()
    }

    /// Sends what it can of the two pieces, and says how much that is. What it does not take must be offered again.
    pub(crate) fn write(&mut self, first: &[u8], second: &[u8]) -> usize {
        let Some(records) = &mut self.records else {
            return self.pipe.write(&[IoSlice::new(first), IoSlice::new(second)]);
        };
        if records.staged == 0 {
            let (record, len) = records.sealer.seal([first, second]);
            self.pipe.stage(record);
            records.staged = len;
        }
        if self.pipe.flush() { std::mem::take(&mut records.staged) } else { 0 }
    }

    /// Remembers bytes that were written, for the case that they must be sent again.
    pub(crate) fn keep(&mut self, bytes: &[u8]) {
        // Records are kept when they are made.
        if self.records.is_none() {
            self.pipe.keep(bytes);
        }
    }

    /// A step begins. The other side begins it, too, only when it has read what was sent before.
    pub(crate) fn mark(&mut self) {
        self.mark = self.pipe.position();
    }

    /// The other side has begun the step that was marked: what was sent before need not be remembered.
    pub(crate) fn acknowledge(&mut self) {
        self.pipe.forget(self.mark);
    }

    /// Reads what has come into the two pieces, and says how much that is.
    pub(crate) fn read(&mut self, first: &mut [u8], second: &mut [u8]) -> Result<usize, String> {
        let Some(records) = &mut self.records else {
            return Ok(self.pipe.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)]));
        };
        let mut read = 0;
        for into in [first, second] {
            let len = records.data(&mut self.pipe)?.min(into.len());
            into[..len].copy_from_slice(&records.opener.data()[..len]);
            records.opener.take(len);
            read += len;
            if len < into.len() {
                break;
            }
        }
        Ok(read)
    }

    /// The header that has come, if all of it has; it stays to be read.
    pub(crate) fn peek(&mut self) -> Option<[u8; HEADER]> {
        let mut header = [0; HEADER];
        match &mut self.records {
            None => (self.pipe.peek(&mut header) == HEADER).then_some(header),
            Some(records) => {
                // A record that is wrong is an error for whoever reads it.
                records.data(&mut self.pipe).ok()?;
                records.opener.data().first_chunk().copied()
            }
        }
    }

    /// Whether something that was taken from its owner has yet to go out: only after a link was made again.
    pub(crate) fn has_backlog(&self) -> bool {
        self.pipe.has_backlog()
    }

    /// Sends what it can of the backlog.
    pub(crate) fn catch_up(&mut self) {
        self.pipe.flush();
    }

    /// Notices the end of a connection that nothing is sent or read over just now, goes on with making a broken one again,
    /// and sends what was lost with it.
    pub(crate) fn look_after(&mut self, hub: &Hub) -> Result<(), Unmended> {
        if let Some(unmended) = &self.unmended {
            return Err(unmended.clone());
        }
        self.pipe.notice_end();
        self.mend(hub).inspect_err(|unmended| self.unmended = Some(unmended.clone()))?;
        self.catch_up();
        Ok(())
    }

    /// An error once it has been tried for long enough, or cannot succeed.
    fn mend(&mut self, hub: &Hub) -> Result<(), Unmended> {
        match (self.dials, self.pipe.broken().cloned()) {
            (None, _) => self.take_in(hub),
            (Some(_), None) => Ok(()),
            (Some(address), Some(broken)) => self.redial(hub, address, &broken),
        }
    }

    /// The other side may have made a new connection before this one has noticed that the old one is of no use.
    fn take_in(&mut self, hub: &Hub) -> Result<(), Unmended> {
        let Some((stream, received_there)) = hub.claim_resumed(&self.name) else { return Ok(()) };
        self.pipe.leave_connection();
        // It fits: nothing was sent over this connection before.
        let told = std::io::Write::write(&mut &stream, &self.pipe.received().to_le_bytes());
        if !matches!(told, Ok(8)) {
            return Ok(());
        }
        self.resume(stream, received_there)
    }

    fn redial(&mut self, hub: &Hub, address: SocketAddr, broken: &Break) -> Result<(), Unmended> {
        let error = match &mut self.attempt {
            Attempt::At(at) if *at > Instant::now() => return Ok(()),
            Attempt::At(_) => match hub.connect(
                address,
                &self.name,
                Some(self.pipe.received()),
                Instant::now() + hub.patience(),
            ) {
                Ok((stream, _)) => {
                    self.heard = Some(Instant::now());
                    self.attempt = Attempt::Answer(stream, Vec::new());
                    return Ok(());
                }
                Err(Dialled::Refused(reason)) => return Err(Unmended::Refused(reason)),
                Err(Dialled::Failed(error)) => error,
            },
            Attempt::Answer(stream, known) => match read_number(stream, known) {
                Ok(None) => return Ok(()),
                Ok(Some(received_there)) => {
                    let rest = Attempt::At(Instant::now());
                    let Attempt::Answer(stream, _) = std::mem::replace(&mut self.attempt, rest) else {
                        return Ok(());
                    };
                    return self.resume(stream, received_there);
                }
                Err(error) => error.to_string(),
            },
        };
        self.attempt = Attempt::At(Instant::now() + REST);
        // Who has waited in vain for a sign of life for that long need not wait as long again.
        let patience = if broken.timed_out { Duration::ZERO } else { hub.patience() };
        let tried = self.heard.map_or(broken.since, |heard| heard.max(broken.since)).elapsed();
        if tried < patience {
            return Ok(());
        }
        Err(Unmended::Lost(format!(
            "the connection to {address} broke ({}) and could not be made again for {:.0} s ({error}); try looking at the \
             network between the two hosts, or a longer DRUMLINE_HOST_TIMEOUT",
            broken.cause,
            tried.as_secs_f64()
        )))
    }

    fn resume(&mut self, stream: TcpStream, received_there: u64) -> Result<(), Unmended> {
        let broken = self.pipe.broken().cloned();
        self.pipe.resume(stream, received_there).map_err(Unmended::Lost)?;
        let LinkName { group, from, to, .. } = &self.name;
        tracing::info!(group, from, to, cause = broken.map(|broken| broken.cause), "a link was made again");
        Ok(())
    }

    /// Whether it is broken, and not for so long that nobody would make it again.
    pub(super) fn is_being_mended(&self, hub: &Hub) -> bool {
        self.pipe.broken().is_some_and(|broken| broken.since.elapsed() < hub.patience())
    }

    /// Since when, and why, it is broken, in words.
    pub(crate) fn break_text(&self) -> Option<String> {
        let Break { since, cause, .. } = self.pipe.broken()?;
        let seconds = since.elapsed().as_secs_f64();
        Some(format!(
            "its connection broke {seconds:.0} s ago ({cause}) and the other side has not made it again"
        ))
    }

    /// Breaks the connection as a network would; the link is then made again.
    pub(crate) fn break_connection(&mut self) {
        self.pipe.break_connection();
    }

    /// Says that nothing more will be sent, and that the link need not be made again.
    pub(crate) fn say_goodbye(&mut self) {
        let deadline = Instant::now() + FAREWELL;
        let mut said = self.is_mid_frame as usize * HEADER;
        while said < HEADER && !self.is_broken() && Instant::now() < deadline {
            match self.write(&GOODBYE[said..], &[]) {
                0 => std::thread::sleep(Duration::from_millis(1)),
                written => said += written,
            }
        }
        // What was sent goes out before the end is told. Only if the peer sent something that was not read here does the
        // close that follows reset the connection, and what the peer has not read by then may be lost.
        self.pipe.shut();
    }
}

impl Records {
    /// How much proved data there is; reads more if there is none.
    fn data(&mut self, pipe: &mut Pipe) -> Result<usize, String> {
        while self.opener.data().is_empty() {
            if !self.opener.open().map_err(|error| error.to_string())? {
                let read = pipe.read(&mut [IoSliceMut::new(self.opener.room())]);
                if read == 0 {
                    break;
                }
                self.opener.fill(read);
            }
        }
        Ok(self.opener.data().len())
    }
}

/// Reads on in a number of eight bytes; `None` if not all of it has come.
fn read_number(mut stream: &TcpStream, known: &mut Vec<u8>) -> std::io::Result<Option<u64>> {
    let mut bytes = [0; 8];
    match stream.read(&mut bytes[known.len()..]) {
        Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
        Ok(read) => {
            let missing = known.len();
            known.extend_from_slice(&bytes[missing..missing + read]);
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    Ok(known.as_slice().try_into().ok().map(u64::from_le_bytes))
}
