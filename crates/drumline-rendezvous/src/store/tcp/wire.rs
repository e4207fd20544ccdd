//! One connection of a store's client: a request out, its reply in.
//!
//! A wait whose deadline passes is called off with `Cancel`, and the one reply it gets is still read: the connection
//! stays in order and can be used again. Should that reply be late as well, its number tells it from the next.
//!
//! A connection can be dead without either end knowing: packets are lost, and after an outage TCP's retransmissions may
//! come many seconds late. So a reply that does not come soon breaks the connection, and the request is sent again over
//! a new one. A reply that may rightly take long is waited for with a ping now and then.

use super::life_line::Reins;
use crate::frame::{Call, Frame, FrameError, Opener, Sealer, encode_call};
use crate::handshake::Session;
use crate::store::request::Reply;
use crate::worker_env::host_timeout;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time for the reply to a `Cancel`.
const GRACE: Duration = Duration::from_millis(500);
/// Time for a goodbye to leave, for which nobody should have to wait.
const SEND_BYE: Duration = Duration::from_secs(1);
/// Silence after which a request that waits for nobody is sent again, the first time; then twice as long each time.
const RESEND: Duration = Duration::from_millis(1500);
/// What a slow network carries in a second: large requests have more time.
const SLOW: u64 = 1024 * 1024;
/// Silence after which a wait asks whether anybody is there, and then silence after which nobody is. Shorter where hosts are
/// given up soon.
const PULSE: Duration = Duration::from_secs(2);
const CHUNK: usize = 32 * 1024;
/// A request of its own number, which nobody looks at.
const PING: u64 = 0;

#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    sealer: Sealer,
    opener: Opener,
    input: Vec<u8>,
    pulse: Duration,
}

/// Why a connection cannot be used any more.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    /// Nothing came though something should have.
    Silent,
    Frame(FrameError),
    /// The server ended it and said why.
    Closed(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Broken::Silent,
            _ => Broken::Io(error),
        }
    }
}

/// A request as it is sent, the first time or again.
#[derive(Debug)]
pub(super) struct Ask<'a> {
    pub(super) id: u64,
    pub(super) oldest: u64,
    pub(super) call: &'a Call,
    /// How often it was sent before.
    pub(super) tries: u32,
}

/// What a wait for bytes has brought.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Bytes,
    Nothing,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, session: &Session) -> Wire {
        let (sealer, opener) = (Sealer::new(session.outgoing()), Opener::new(session.incoming()));
        Wire { stream, sealer, opener, input: Vec::new(), pulse: PULSE.min(host_timeout() / 4) }
    }

    /// Our address and the server's.
    pub(super) fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.stream.local_addr()?, self.stream.peer_addr()?))
    }

    /// Whoever holds the reins can [`wake`] whoever waits here.
    pub(super) fn attach_to(&self, reins: &Reins) {
        reins.attach(&self.stream);
    }

    /// The reply, or `None` if the deadline passed first.
    pub(super) fn call(&mut self, ask: &Ask<'_>, deadline: Instant) -> Result<Option<Reply>, Broken> {
        let Ask { id, oldest, call, tries } = *ask;
        let waits = matches!(call, Call::Request(request) if request.waits());
        let began = Instant::now();
        let resend = RESEND * 2u32.saturating_pow(tries.min(8));
        let sent = self.send(ask, resend)?;
        let silence = resend + Duration::from_secs(sent as u64 / SLOW);
        if !waits {
            // It has a little time even if the deadline has passed.
            let reply = self.reply(id, deadline.max(began + GRACE), Quiet::IsTheEnd(silence))?;
            return Ok(reply);
        }
        if let Some(reply) = self.reply(id, deadline, Quiet::Asks(self.pulse))? {
            return Ok(Some(reply));
        }
        self.send(&Ask { id, oldest, call: &Call::Cancel(id), tries }, GRACE)?;
        match self.reply(id, Instant::now() + GRACE, Quiet::IsTheEnd(GRACE))? {
            Some(Reply::Cancelled) => Ok(None),
            Some(late) => Ok(Some(late)),
            None => Err(Broken::Silent),
        }
    }

    /// Pings now and then, and returns when the connection is of no more use.
    pub(super) fn watch(&mut self, mut heard: impl FnMut()) -> Broken {
        loop {
            let ping = Ask { id: PING, oldest: 0, call: &Call::Ping, tries: 0 };
            if let Err(broken) = self.send(&ping, self.pulse) {
                return broken;
            }
            match self.reply(PING, Instant::now() + self.pulse, Quiet::IsTheEnd(self.pulse)) {
                Ok(Some(_)) => heard(),
                Ok(None) => return Broken::Silent,
                Err(broken) => return broken,
            }
            // Until the next ping nothing is to come, except the end.
            match self.reply(u64::MAX, Instant::now() + self.pulse, Quiet::Asks(self.pulse * 2)) {
                Ok(_) => {}
                Err(broken) => return broken,
            }
        }
    }

    pub(super) fn say_bye(&mut self) -> Result<(), Broken> {
        self.send(&Ask { id: PING, oldest: 0, call: &Call::Bye, tries: 0 }, SEND_BYE).map(drop)
    }

    /// Sends a call; each part of it must be taken by the system within `limit`. The bytes sent.
    fn send(&mut self, ask: &Ask<'_>, limit: Duration) -> Result<usize, Broken> {
        let mut bytes = Vec::new();
        self.sealer.seal(&mut bytes, |out| encode_call(ask.id, ask.oldest, ask.call, out));
        self.stream.set_write_timeout(Some(limit))?;
        self.stream.write_all(&bytes)?;
        Ok(bytes.len())
    }

    /// Reads until the reply with this number; earlier ones are late and wanted by nobody.
    fn reply(&mut self, id: u64, deadline: Instant, quiet: Quiet) -> Result<Option<Reply>, Broken> {
        let mut asked = false;
        loop {
            while let Some((number, reply)) = self.next_reply()? {
                match reply {
                    Reply::Failed(reason) if number == 0 => return Err(Broken::Closed(reason)),
                    reply if number == id => return Ok(Some(reply)),
                    _ => {}
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let limit = quiet.limit();
            match (self.fill(left.min(limit))?, quiet) {
                (Heard::Bytes, _) => asked = false,
                (Heard::Nothing, _) if left <= limit => {}
                (Heard::Nothing, Quiet::IsTheEnd(_)) => return Err(Broken::Silent),
                (Heard::Nothing, Quiet::Asks(_)) if asked => return Err(Broken::Silent),
                (Heard::Nothing, Quiet::Asks(_)) => {
                    self.send(&Ask { id: PING, oldest: 0, call: &Call::Ping, tries: 0 }, limit)?;
                    asked = true;
                }
            }
        }
    }

    fn next_reply(&mut self) -> Result<Option<(u64, Reply)>, Broken> {
        let Some((message, used)) = self.opener.open(&self.input).map_err(Broken::Frame)? else {
            return Ok(None);
        };
        let frame = Frame::read(message).map_err(Broken::Frame)?;
        let reply = (frame.id, frame.reply().map_err(Broken::Frame)?);
        self.input.drain(..used);
        Ok(Some(reply))
    }

    /// Reads once, for at most `patience`.
    fn fill(&mut self, patience: Duration) -> Result<Heard, Broken> {
        let mut chunk = [0; CHUNK];
        self.stream.set_read_timeout(Some(patience))?;
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(Broken::Io(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.extend_from_slice(&chunk[..len]);
                Ok(Heard::Bytes)
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Heard::Nothing),
                ErrorKind::Interrupted => Ok(Heard::Bytes),
                _ => Err(Broken::Io(error)),
            },
        }
    }
}

/// What it means that nothing comes for a while.
#[derive(Debug, Clone, Copy)]
enum Quiet {
    /// The connection is dead.
    IsTheEnd(Duration),
    /// Nothing yet; a ping shows whether it is dead.
    Asks(Duration),
}

impl Quiet {
    fn limit(self) -> Duration {
        match self {
            Quiet::IsTheEnd(limit) | Quiet::Asks(limit) => limit,
        }
    }
}

/// Ends the wait of whoever reads from the connection; it can still be written to.
pub(super) fn wake(handle: &TcpStream) {
    let _ = handle.shutdown(Shutdown::Read);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;
    use crate::JobKey;
    use crate::handshake::{self, Hello, Refusal, Role};
    use std::sync::mpsc::{Receiver, Sender, channel};

    struct Taker(Sender<TcpStream>);

    impl Host for Taker {
        fn admit(&mut self, _: &Hello) -> Result<(), Refusal> {
            Ok(())
        }

        fn receive(&mut self, _: Hello, stream: TcpStream, _: Session) {
            self.0.send(stream).unwrap();
        }
    }

    /// A wire to somebody who takes the connection and never reads from it.
    fn to_one_who_never_reads() -> (Wire, Receiver<TcpStream>) {
        let (key, (sender, taken)) = (JobKey::random(), channel());
        let gate = crate::Gate::open("127.0.0.1:0", &key, Taker(sender)).unwrap();
        let mut stream = TcpStream::connect(gate.local_addr()).unwrap();
        let soon = Instant::now() + Duration::from_secs(5);
        let session = handshake::connect(&mut stream, &key, &Hello::new(Role::Store), soon).unwrap();
        (Wire::new(stream, &session), taken)
    }

    fn time_of_bye(wire: &mut Wire) -> (bool, Duration) {
        let began = Instant::now();
        (wire.say_bye().is_ok(), began.elapsed())
    }

    #[test]
    fn a_goodbye_waits_for_nobody_even_if_the_system_has_no_room_for_it() {
        let (mut wire, taken) = to_one_who_never_reads();
        let _silent = taken.recv_timeout(Duration::from_secs(5)).unwrap();
        let (said, took) = time_of_bye(&mut wire);
        assert!(said && took < Duration::from_millis(500), "control: room enough, {took:?}");
        wire.stream.set_nonblocking(true).unwrap();
        while (&wire.stream).write(&[0; CHUNK]).is_ok() {}
        wire.stream.set_nonblocking(false).unwrap();
        let (said, took) = time_of_bye(&mut wire);
        assert!(!said && took < SEND_BYE + Duration::from_secs(2), "{took:?}");
    }
}
