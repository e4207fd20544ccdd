//! How the ranks of a node get shared memory: the first of them (the leader) passes file descriptors over unix sockets.
//!
//! ```text
//!   leader   listens under a random abstract name ─ puts name and token in the store ─ accepts others ─ sends descriptors
//!   others   read them from the store ─ connect ─ send the token and their rank ─ receive descriptors
//! ```
//! An abstract name leaves no file behind and cannot be reached from another network namespace. Only processes of the same
//! user that know the token are accepted. The sockets stay open for later descriptors.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, SendAncillaryBuffer, SendAncillaryMessage};

/// Random bytes in the name of a socket, so that names do not collide; all users of the machine can see it.
const NAME: usize = 16;

/// Random bytes that only readers of the store know.
const TOKEN: usize = 32;

/// How long a new connection may take to send the token.
const GREETING_TIMEOUT: Duration = Duration::from_millis(500);

/// The leader's socket, and what others must know to connect.
pub(crate) struct DescriptorListener {
    listener: UnixListener,
    invitation: [u8; NAME + TOKEN],
}

impl DescriptorListener {
    pub(crate) fn open() -> io::Result<Self> {
        let mut invitation = [0; NAME + TOKEN];
        getrandom::fill(&mut invitation).map_err(io::Error::other)?;
        let listener = UnixListener::bind_addr(&address(&invitation[..NAME])?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, invitation })
    }

    /// The name and the token that the others need; for the store.
    pub(crate) fn invitation(&self) -> &[u8] {
        &self.invitation
    }

    /// Waits until the others have connected. `check` is called now and then, and its error ends the wait. `ranks` are all of
    /// this node, the leader first, as errors name them.
    pub(crate) fn accept(
        self,
        ranks: &[usize],
        deadline: Instant,
        check: impl Fn() -> io::Result<()>,
    ) -> io::Result<Descriptors> {
        let mut members: Vec<Option<UnixStream>> = (1..ranks.len()).map(|_| None).collect();
        while members.iter().any(Option::is_none) {
            check()?;
            if Instant::now() >= deadline {
                let late = ranks[1..].iter().zip(&members).filter(|(_, member)| member.is_none());
                let late: Vec<String> = late.map(|(rank, _)| format!("rank {rank}")).collect();
                return Err(too_late(format!("{} did not connect in time", late.join(", "))));
            }
            if !poll_readable(self.listener.as_fd(), deadline)? {
                continue;
            }
            let Ok((stream, _)) = self.listener.accept() else { continue };
            // A stranger is rejected and changes nothing.
            if let Ok(rank) = self.read_greeting(&stream, deadline)
                && let Some(place @ None) = rank.checked_sub(1).and_then(|index| members.get_mut(index))
            {
                *place = Some(stream);
            }
        }
        Ok(Descriptors::Leader(members.into_iter().flatten().collect()))
    }

    fn read_greeting(&self, mut stream: &UnixStream, deadline: Instant) -> io::Result<usize> {
        stream.set_nonblocking(false)?;
        set_deadline(stream, deadline.min(Instant::now() + GREETING_TIMEOUT))?;
        check_user(stream)?;
        let mut greeting = [0; TOKEN + 4];
        stream.read_exact(&mut greeting)?;
        if greeting[..TOKEN] != self.invitation[NAME..] {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "wrong token"));
        }
        let rank: [u8; 4] = greeting[TOKEN..].try_into().map_err(io::Error::other)?;
        Ok(u32::from_le_bytes(rank) as usize)
    }
}

/// The sockets between the leader of a node and its other ranks.
#[derive(Debug)]
pub(crate) enum Descriptors {
    /// To each other rank, in order.
    Leader(Vec<UnixStream>),
    /// To the leader.
    Member(UnixStream),
}

impl Descriptors {
    /// Connects to the leader as local rank `me`.
    pub(crate) fn connect(invitation: &[u8], me: usize, deadline: Instant) -> io::Result<Self> {
        let (name, token) = invitation.split_at_checked(NAME).ok_or(io::ErrorKind::InvalidData)?;
        let mut stream = UnixStream::connect_addr(&address(name)?)?;
        set_deadline(&stream, deadline)?;
        check_user(&stream)?;
        stream.write_all(&[token, &(me as u32).to_le_bytes()].concat())?;
        Ok(Self::Member(stream))
    }

    /// The leader calls `make`; all ranks get a descriptor of the same file. If `make` fails, all get the leader's error.
    pub(crate) fn share(
        &self,
        make: impl FnOnce() -> io::Result<OwnedFd>,
        deadline: Instant,
    ) -> io::Result<OwnedFd> {
        match self {
            Descriptors::Leader(members) => {
                let made = make();
                // A rank that has ended must not keep the others waiting.
                let pass = |member| set_deadline(member, deadline).and_then(|()| send(member, &made));
                let outcomes: Vec<io::Result<()>> = members.iter().map(pass).collect();
                outcomes.into_iter().collect::<io::Result<()>>()?;
                made
            }
            Descriptors::Member(leader) => {
                set_deadline(leader, deadline)?;
                receive(leader)
            }
        }
    }
}

fn address(name: &[u8]) -> io::Result<SocketAddr> {
    let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("drumline-{hex}"))
}

/// The other end must be a process of the same user.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let user = rustix::net::sockopt::socket_peercred(stream)?.uid;
    if user == rustix::process::geteuid() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("a process of user {} holds the other end of the socket", user.as_raw()),
    ))
}

/// The longest error text that is sent.
const TEXT: usize = 256;

fn send(stream: &UnixStream, made: &io::Result<OwnedFd>) -> io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: [BorrowedFd<'_>; 1];
    let text = match made {
        Ok(fd) => {
            fds = [fd.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            String::new()
        }
        Err(error) => error.to_string(),
    };
    let mut frame = [0; TEXT];
    let len = text.len().min(TEXT - 1);
    frame[0] = len as u8;
    frame[1..=len].copy_from_slice(&text.as_bytes()[..len]);
    let flags = rustix::net::SendFlags::NOSIGNAL;
    // A stop and continue signal interrupts such calls.
    retry_on_intr(|| rustix::net::sendmsg(stream, &[IoSlice::new(&frame)], &mut control, flags))?;
    Ok(())
}

fn receive(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut frame = [0; TEXT];
    let flags = rustix::net::RecvFlags::CMSG_CLOEXEC | rustix::net::RecvFlags::WAITALL;
    let got = retry_on_intr(|| {
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut frame)], &mut control, flags)
    });
    let got = got.map_err(|error| match error {
        Errno::AGAIN => too_late("the first rank of this node did not share its memory in time".into()),
        other => other.into(),
    })?;
    if got.bytes < TEXT {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the first rank of this node closed the socket",
        ));
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message
            && let Some(fd) = fds.next()
        {
            return Ok(fd);
        }
    }
    let text = String::from_utf8_lossy(&frame[1..=usize::from(frame[0])]).into_owned();
    Err(io::Error::other(format!("the first rank of this node: {text}")))
}

fn set_deadline(stream: &UnixStream, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))
}

fn too_late(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// Whether there is a new connection, after a moment or at the deadline.
fn poll_readable(fd: BorrowedFd<'_>, deadline: Instant) -> io::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    let nap =
        rustix::fs::Timespec { tv_sec: 0, tv_nsec: left.min(Duration::from_millis(20)).as_nanos() as _ };
    match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&nap)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::segment::create;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn all_get_the_same_file() {
        let listener = DescriptorListener::open().unwrap();
        let name = listener.invitation().to_vec();
        let member = std::thread::spawn(move || {
            let descriptors = Descriptors::connect(&name, 1, soon()).unwrap();
            descriptors.share(|| unreachable!("only the leader makes it"), soon()).unwrap()
        });
        let leader = listener.accept(&[0, 1], soon(), || Ok(())).unwrap();
        let mine = leader.share(|| create(4096), soon()).unwrap();
        let theirs = member.join().unwrap();
        assert_eq!(rustix::fs::fstat(&mine).unwrap().st_ino, rustix::fs::fstat(&theirs).unwrap().st_ino);
    }

    #[test]
    fn an_error_of_the_leader_reaches_all() {
        let listener = DescriptorListener::open().unwrap();
        let name = listener.invitation().to_vec();
        let member = std::thread::spawn(move || {
            let descriptors = Descriptors::connect(&name, 1, soon()).unwrap();
            descriptors.share(|| unreachable!("only the leader makes it"), soon()).unwrap_err().to_string()
        });
        let leader = listener.accept(&[0, 1], soon(), || Ok(())).unwrap();
        assert!(leader.share(|| Err(io::Error::other("no memory left")), soon()).is_err());
        assert_eq!(member.join().unwrap(), "the first rank of this node: no memory left");
    }

    #[test]
    fn strangers_are_turned_away() {
        let listener = DescriptorListener::open().unwrap();
        let name = listener.invitation().to_vec();
        let address = address(&name[..NAME]).unwrap();
        let strangers: Vec<UnixStream> =
            (0..3).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
        for (mut stranger, greeting) in
            strangers.iter().zip([&[0u8; 20][..], b"GET / HTTP/1.0\r\n\r\n..", &[7; 20]])
        {
            stranger.write_all(greeting).unwrap();
        }
        let member = std::thread::spawn(move || Descriptors::connect(&name, 1, soon()).unwrap());
        let accepted = listener.accept(&[0, 1], soon(), || Ok(())).unwrap();
        assert!(matches!(accepted, Descriptors::Leader(members) if members.len() == 1));
        drop(member.join());
    }

    #[test]
    fn a_rank_that_does_not_connect_is_an_error_in_time() {
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(50);
        let error = DescriptorListener::open().unwrap().accept(&[4, 6, 8], deadline, || Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "rank 6, rank 8 did not connect in time");
        assert!(begin.elapsed() < Duration::from_secs(2));
    }
}
