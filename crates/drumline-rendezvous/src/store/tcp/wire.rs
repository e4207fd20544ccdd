//! One connection of a store's client: it sends a request and receives its reply.
//!
//! A wait whose deadline passes is cancelled with `Cancel`, and the one reply it gets is still read. So the connection
//! stays in order and can be used again. If that reply is late too, its number distinguishes it from the next one.
//!
//! A connection can be dead without either end knowing: packets are lost, and after an outage TCP's retransmissions may
//! come many seconds late. So a reply that does not come soon breaks the connection, and the request is sent again over
//! a new one. During a long wait, pings show whether the connection is alive.

use super::life_line::LifeLineControl;
use crate::frame::{Call, Frame, FrameError, Opener, Sealer, encode_call};
use crate::handshake::Session;
use crate::store::request::Reply;
use crate::worker_env::host_timeout;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time limit for the reply to a `Cancel`.
const GRACE: Duration = Duration::from_millis(500);
/// Time limit for sending a goodbye, which must not delay the program's end.
const SEND_BYE: Duration = Duration::from_secs(1);
/// Silence after which a request that does not wait for other ranks is sent again; twice as long after each attempt.
const RESEND: Duration = Duration::from_millis(1500);
/// Bytes per second of a slow network: large requests get more time.
const SLOW: u64 = 1024 * 1024;
/// Silence after which a waiting call sends a ping, and then silence after which the connection counts as dead. Shorter
/// if the host timeout is short.
const PULSE: Duration = Duration::from_secs(2);
const CHUNK: usize = 32 * 1024;
/// The number of pings, whose replies are not matched to a request.
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
    /// Nothing was received in time.
    Silent,
    Frame(FrameError),
    /// The server closed it and said why.
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

/// A request to send, for the first time or again.
#[derive(Debug)]
pub(super) struct Outgoing<'a> {
    pub(super) id: u64,
    pub(super) oldest: u64,
    pub(super) call: &'a Call,
    /// How often it was sent before.
    pub(super) tries: u32,
}

/// The result of waiting for bytes.
#[derive(Debug, PartialEq, Eq)]
enum Received {
    Bytes,
    Nothing,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, session: &Session) -> Wire {
        let sealer = Sealer::new(session.outgoing());
        let opener = Opener::new(session.incoming());
        Wire { stream, sealer, opener, input: Vec::new(), pulse: PULSE.min(host_timeout() / 4) }
    }

    /// Our address and the server's.
    pub(super) fn ends(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.stream.local_addr()?, self.stream.peer_addr()?))
    }

    /// Lets the holder of `control` [`wake`] a thread that waits here.
    pub(super) fn attach_to(&self, control: &LifeLineControl) {
        control.attach(&self.stream);
    }

    /// The reply, or `None` if the deadline passed first.
    pub(super) fn call(
        &mut self,
        outgoing: &Outgoing<'_>,
        deadline: Instant,
    ) -> Result<Option<Reply>, Broken> {
        let Outgoing { id, oldest, call, tries } = *outgoing;
        let waits = matches!(call, Call::Request(request) if request.waits());
        let began = Instant::now();
        let resend = RESEND * 2u32.saturating_pow(tries.min(8));
        let sent = self.send(outgoing, resend)?;
        let silence = resend + Duration::from_secs(sent as u64 / SLOW);
        if !waits {
            // It gets a little time even if the deadline has passed.
            let reply = self.reply(id, deadline.max(began + GRACE), OnSilence::Fail(silence))?;
            return Ok(reply);
        }
        if let Some(reply) = self.reply(id, deadline, OnSilence::Ping(self.pulse))? {
            return Ok(Some(reply));
        }
        self.send(&Outgoing { id, oldest, call: &Call::Cancel(id), tries }, GRACE)?;
        match self.reply(id, Instant::now() + GRACE, OnSilence::Fail(GRACE))? {
            Some(Reply::Cancelled) => Ok(None),
            Some(late) => Ok(Some(late)),
            None => Err(Broken::Silent),
        }
    }

    /// Pings regularly, and returns when the connection is broken.
    pub(super) fn watch(&mut self, mut on_reply: impl FnMut()) -> Broken {
        loop {
            let ping = Outgoing { id: PING, oldest: 0, call: &Call::Ping, tries: 0 };
            if let Err(broken) = self.send(&ping, self.pulse) {
                return broken;
            }
            match self.reply(PING, Instant::now() + self.pulse, OnSilence::Fail(self.pulse)) {
                Ok(Some(_)) => on_reply(),
                Ok(None) => return Broken::Silent,
                Err(broken) => return broken,
            }
            // Until the next ping, only the end of the connection is expected.
            match self.reply(u64::MAX, Instant::now() + self.pulse, OnSilence::Ping(self.pulse * 2)) {
                Ok(_) => {}
                Err(broken) => return broken,
            }
        }
    }

    pub(super) fn say_bye(&mut self) -> Result<(), Broken> {
        self.send(&Outgoing { id: PING, oldest: 0, call: &Call::Bye, tries: 0 }, SEND_BYE).map(drop)
    }

    /// Sends a call; the system must accept each part of it within `limit`. Returns the number of bytes sent.
    fn send(&mut self, outgoing: &Outgoing<'_>, limit: Duration) -> Result<usize, Broken> {
        let mut bytes = Vec::new();
        self.sealer.seal(&mut bytes, |out| encode_call(outgoing.id, outgoing.oldest, outgoing.call, out));
        self.stream.set_write_timeout(Some(limit))?;
        self.stream.write_all(&bytes)?;
        Ok(bytes.len())
    }

    /// Reads until the reply with this number; earlier ones are late and dropped.
    fn reply(&mut self, id: u64, deadline: Instant, on_silence: OnSilence) -> Result<Option<Reply>, Broken> {
        let mut has_pinged = false;
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
            let limit = on_silence.limit();
            match (self.fill(left.min(limit))?, on_silence) {
                (Received::Bytes, _) => has_pinged = false,
                (Received::Nothing, _) if left <= limit => {}
                (Received::Nothing, OnSilence::Fail(_)) => return Err(Broken::Silent),
                (Received::Nothing, OnSilence::Ping(_)) if has_pinged => return Err(Broken::Silent),
                (Received::Nothing, OnSilence::Ping(_)) => {
                    self.send(&Outgoing { id: PING, oldest: 0, call: &Call::Ping, tries: 0 }, limit)?;
                    has_pinged = true;
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

    /// Reads once, for at most `timeout`.
    fn fill(&mut self, timeout: Duration) -> Result<Received, Broken> {
        let mut chunk = [0; CHUNK];
        self.stream.set_read_timeout(Some(timeout))?;
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(Broken::Io(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.extend_from_slice(&chunk[..len]);
                Ok(Received::Bytes)
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Received::Nothing),
                ErrorKind::Interrupted => Ok(Received::Bytes),
                _ => Err(Broken::Io(error)),
            },
        }
    }
}

/// What to do when nothing is received for this long.
#[derive(Debug, Clone, Copy)]
enum OnSilence {
    /// Treat the connection as dead.
    Fail(Duration),
    /// Send a ping first, to find out whether it is dead.
    Ping(Duration),
}

impl OnSilence {
    fn limit(self) -> Duration {
        match self {
            OnSilence::Fail(limit) | OnSilence::Ping(limit) => limit,
        }
    }
}

/// Wakes a thread that reads from the connection; it can still be written to.
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

    struct Accept(Sender<TcpStream>);

    impl Host for Accept {
        fn admit(&mut self, _: &Hello) -> Result<(), Refusal> {
            Ok(())
        }

        fn receive(&mut self, _: Hello, stream: TcpStream, _: Session) {
            self.0.send(stream).unwrap();
        }
    }

    /// A wire to a server that accepts the connection and never reads from it.
    fn to_a_server_that_never_reads() -> (Wire, Receiver<TcpStream>) {
        let (key, (sender, taken)) = (JobKey::random(), channel());
        let gate = crate::Gate::open("127.0.0.1:0", &key, Accept(sender)).unwrap();
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
    fn a_goodbye_is_bounded_even_if_the_send_buffer_is_full() {
        let (mut wire, taken) = to_a_server_that_never_reads();
        let _silent = taken.recv_timeout(Duration::from_secs(5)).unwrap();
        let (is_sent, took) = time_of_bye(&mut wire);
        assert!(is_sent && took < Duration::from_millis(500), "control: room enough, {took:?}");
        wire.stream.set_nonblocking(true).unwrap();
        while (&wire.stream).write(&[0; CHUNK]).is_ok() {}
        wire.stream.set_nonblocking(false).unwrap();
        let (is_sent, took) = time_of_bye(&mut wire);
        assert!(!is_sent && took < SEND_BYE + Duration::from_secs(2), "{took:?}");
    }
}
