//! A relay between two ranks: what it changes, repeats, reorders or swaps is noticed on protected links, and a connection that it
//! cuts is reconnected. The ranks are threads; the relay listens at the address that the store has for rank 0. A relay on a host
//! of its own is in `relay_host`.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, LinkSecurity, ProcessGroup, ReduceOp, Source, Transport};
use drumline_rendezvous::handshake::{ANSWER, OPENING, PROOF};
use drumline_rendezvous::{JobKey, Member, MemoryStore, Reply, Request, Store, StoreError};

use crate::threads::{Result, within};

const SOON: Duration = Duration::from_secs(30);

/// Elements of each all-reduce: 1 MiB, so that each rank sends the other half of it, in several records.
const LEN: usize = 1 << 18;

/// The length of a full record of the shorter kind. What follows it is in the next record of either kind.
pub(crate) const RECORD: usize = 8 + (64 << 10) + 16;

/// The length of a full record of the longer kind.
pub(crate) const LONG_RECORD: usize = RECORD + 16;

/// What the relay does to the data for rank 0, once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tampering {
    Nothing,
    /// Changes a bit of the byte with this number.
    Flip(usize),
    /// Sends this many bytes from this number on twice.
    Repeat(usize, usize),
    /// Sends this many bytes from this number on after as many that follow them.
    Reorder(usize, usize),
    /// Swaps the data of the first two links.
    Swap,
    /// Resets the connection after this many bytes, this often.
    Cut(usize, usize),
    /// Resets the connection after this many bytes and accepts no other.
    Vanish(usize),
    /// Resets the connection after this many bytes, and changes a bit of the answer to the next one: how many bytes rank 0 has
    /// received.
    Answer(usize),
}

/// Makes a connection to the rank for which the relay listens.
type Dial = Box<dyn Fn() -> std::io::Result<TcpStream> + Send + Sync>;

pub(crate) struct Relay {
    tampering: Tampering,
    dial: Dial,
    /// How often it has tampered.
    pub(crate) count: AtomicUsize,
    /// The first link, to be swapped with the second.
    first: Mutex<Option<(TcpStream, TcpStream)>>,
    is_over: AtomicBool,
}

impl Relay {
    /// Accepts connections, and forwards what comes over them.
    pub(crate) fn open(listener: TcpListener, tampering: Tampering, dial: Dial) -> Arc<Self> {
        let (count, first, is_over) = (AtomicUsize::new(0), Mutex::new(None), AtomicBool::new(false));
        let relay = Arc::new(Self { tampering, dial, count, first, is_over });
        listener.set_nonblocking(true).unwrap();
        let host = relay.clone();
        std::thread::spawn(move || {
            while !host.is_over.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((near, _)) => host.clone().admit(near),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        relay
    }

    fn admit(self: Arc<Self>, near: TcpStream) {
        let has_vanished =
            matches!(self.tampering, Tampering::Vanish(_)) && self.count.load(Ordering::Acquire) > 0;
        if has_vanished {
            return reset(&near);
        }
        near.set_nonblocking(false).unwrap();
        std::thread::spawn(move || {
            let Ok(far) = (self.dial)() else { return };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            // The handshake is not tampered with: it proves itself.
            let passed = pass(&near, &far, OPENING)
                .and_then(|()| pass(&far, &near, ANSWER))
                .and_then(|()| pass(&near, &far, PROOF))
                .and_then(|()| pass(&far, &near, 1))
                .and_then(|()| self.change_answer(&near, &far));
            if passed.is_err() {
                return;
            }
            if self.tampering == Tampering::Swap {
                let mut first = self.first.lock().unwrap();
                match first.take() {
                    None => return *first = Some((near, far)),
                    Some((near_1, far_1)) => {
                        self.count.fetch_add(1, Ordering::AcqRel);
                        carry(&self, near_1, far);
                        return carry(&self, near, far_1);
                    }
                }
            }
            carry(&self, near, far);
        });
    }

    /// Changes a bit of the first byte that comes back over the connection that follows a cut one.
    fn change_answer(&self, mut near: &TcpStream, mut far: &TcpStream) -> std::io::Result<()> {
        let is_next = || self.count.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if matches!(self.tampering, Tampering::Answer(_)) && is_next() {
            let mut byte = [0];
            far.read_exact(&mut byte)?;
            near.write_all(&[byte[0] ^ 0x10])?;
        }
        Ok(())
    }

    /// What is sent for `bytes`, whose first has the number `at`; `None` cuts the connection.
    fn change(&self, at: usize, mut bytes: Vec<u8>, held: &[u8]) -> Option<Vec<u8>> {
        let contains = |number: usize| (at..at + bytes.len()).contains(&number);
        let is_first = || self.count.fetch_add(1, Ordering::AcqRel) == 0;
        match self.tampering {
            Tampering::Flip(number) if contains(number) && is_first() => bytes[number - at] ^= 0x10,
            Tampering::Repeat(begin, len) if contains(begin + len) && is_first() => {
                let known: Vec<u8> = held.iter().chain(&bytes).copied().collect();
                let begin = known.len() - (at + bytes.len() - begin);
                bytes.extend_from_slice(&known[begin..][..len]);
            }
            Tampering::Cut(number, times)
                if at + bytes.len() > number && self.count.load(Ordering::Acquire) < times =>
            {
                self.count.fetch_add(1, Ordering::AcqRel);
                return None;
            }
            Tampering::Answer(number)
                if at + bytes.len() > number && self.count.load(Ordering::Acquire) == 0 =>
            {
                self.count.fetch_add(1, Ordering::AcqRel);
                return None;
            }
            Tampering::Vanish(number) if at + bytes.len() > number => {
                self.count.fetch_add(1, Ordering::AcqRel);
                return None;
            }
            _ => {}
        }
        Some(bytes)
    }
}

/// Copies exactly `len` bytes from one side to the other.
fn pass(mut from: &TcpStream, mut to: &TcpStream, len: usize) -> std::io::Result<()> {
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    to.write_all(&bytes)
}

/// A connection through the relay: two sockets, each read by one thread and written to by the other.
#[derive(Debug)]
struct Pair {
    near: TcpStream,
    far: TcpStream,
    is_cut: AtomicBool,
}

impl Pair {
    /// Ends both connections as a firewall does: once both threads have dropped them.
    fn reset(&self) {
        self.is_cut.store(true, Ordering::Release);
        for stream in [&self.near, &self.far] {
            reset(stream);
            let _ = stream.shutdown(Shutdown::Read);
        }
    }
}

/// Forwards both directions; tampers from near to far.
fn carry(relay: &Arc<Relay>, near: TcpStream, far: TcpStream) {
    let pair = Arc::new(Pair { near, far, is_cut: AtomicBool::new(false) });
    let (there, back) = ((relay.clone(), pair.clone()), (relay.clone(), pair));
    std::thread::spawn(move || forward(&there.0, &there.1, true));
    std::thread::spawn(move || forward(&back.0, &back.1, false));
}

fn forward(relay: &Relay, pair: &Pair, is_changed: bool) {
    let (mut from, mut to) = if is_changed { (&pair.near, &pair.far) } else { (&pair.far, &pair.near) };
    let (mut at, mut held, mut waiting) = (0, Vec::new(), Vec::new());
    let mut buffer = vec![0; 30_000];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) if pair.is_cut.load(Ordering::Acquire) => return,
            Ok(0) => return drop(to.shutdown(Shutdown::Write)),
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return pair.reset(),
        };
        let mut bytes = buffer[..read].to_vec();
        if is_changed {
            bytes = match relay.change(at, bytes, &held) {
                Some(bytes) => bytes,
                None => return pair.reset(),
            };
            held.extend_from_slice(&buffer[..read]);
            if let Tampering::Reorder(begin, len) = relay.tampering {
                waiting.extend_from_slice(&bytes);
                bytes = reordered(relay, &mut waiting, at + read, begin, len);
            }
        }
        at += read;
        if to.write_all(&bytes).is_err() {
            return pair.reset();
        }
    }
}

/// The bytes of `waiting` to be sent now; it ends with the byte before number `end`.
fn reordered(relay: &Relay, waiting: &mut Vec<u8>, end: usize, begin: usize, len: usize) -> Vec<u8> {
    let first = end - waiting.len();
    if first > begin || end <= begin {
        return std::mem::take(waiting);
    }
    let place = begin - first;
    if waiting.len() < place + 2 * len {
        return waiting.drain(..place).collect();
    }
    relay.count.fetch_add(1, Ordering::AcqRel);
    waiting[place..place + 2 * len].rotate_left(len);
    std::mem::take(waiting)
}

/// Makes the connection end with a reset when it is closed.
fn reset(stream: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// A store in which rank 0's address is that of the relay.
#[derive(Debug)]
struct Misleading {
    store: MemoryStore,
    tampering: Tampering,
    relay: Mutex<Option<Arc<Relay>>>,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Relay({:?}, {:?} times)", self.tampering, self.count)
    }
}

impl Store for Misleading {
    fn call(&self, request: Request, deadline: Option<Instant>) -> std::result::Result<Reply, StoreError> {
        let request = match request {
            Request::Set { key, value } if key.ends_with("hub/0") => {
                let target: SocketAddr = String::from_utf8_lossy(&value).parse().unwrap();
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = listener.local_addr().unwrap();
                let relay =
                    Relay::open(listener, self.tampering, Box::new(move || TcpStream::connect(target)));
                *self.relay.lock().unwrap() = Some(relay);
                Request::Set { key, value: address.to_string().into() }
            }
            other => other,
        };
        self.store.call(request, deadline)
    }
}

/// A rank's outcome: whether its results were right, or its error.
type Verdict = std::result::Result<bool, String>;

/// Three ranks run `body`, which returns whether all results were right, with the relay before rank 0.
fn relayed(
    tampering: Tampering,
    options: GroupOptions,
    body: impl Fn(&ProcessGroup) -> Result<bool> + Send + Sync + 'static,
) -> Vec<Verdict> {
    within(Duration::from_secs(60), move || {
        let (store, relay) = (MemoryStore::new(), Mutex::new(None));
        let (store, key) = (Arc::new(Misleading { store, tampering, relay }), JobKey::random());
        let rank = &|rank| {
            let member = Member::in_process(rank, 3, store.clone(), key.clone(), SOON);
            body(&ProcessGroup::new(member, options.clone())?)
        };
        let verdicts = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().map_err(|error| error.to_string())).collect()
        });
        let relay = store.relay.lock().unwrap().take().expect("rank 0 has listened");
        relay.is_over.store(true, Ordering::Release);
        let count = relay.count.load(Ordering::Acquire);
        assert_eq!(count > 0, tampering != Tampering::Nothing, "{tampering:?} happened {count} times");
        if let Tampering::Cut(_, times) = tampering {
            assert_eq!(count, times);
        }
        verdicts
    })
}

fn options(security: LinkSecurity) -> GroupOptions {
    GroupOptions {
        transport: Transport::Tcp,
        timeout: SOON,
        link_security: Some(security),
        ..GroupOptions::default()
    }
}

/// Sums with known results.
pub(crate) fn sums(group: &ProcessGroup) -> Result<bool> {
    let mut is_right = true;
    for turn in 0..6u32 {
        let mut data: Vec<u32> = (0..LEN as u32).map(|i| i * (group.rank() as u32 + 1) + turn).collect();
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        is_right &= (0..LEN as u32).zip(&data).all(|(i, &sum)| sum == 6 * i + 3 * turn);
    }
    Ok(is_right)
}

/// Messages to rank 0, long and short, and back.
fn messages(group: &ProcessGroup) -> Result<bool> {
    let mut is_right = true;
    for turn in 0..8u64 {
        let expected: Vec<u64> = (0..20_000).map(|i| i * turn).collect();
        let mut got = vec![0; 20_000];
        if group.rank() == 0 {
            for from in [1, 2] {
                group.recv(&mut got, Source::Rank(from), turn)?;
                is_right &= got == expected;
                group.send(&expected[..5], from, turn)?;
            }
        } else {
            group.send(&expected, 0, turn)?;
            group.recv(&mut got[..5], Source::Rank(0), turn)?;
            is_right &= got[..5] == expected[..5];
        }
    }
    Ok(is_right)
}

const PROTECTED: [LinkSecurity; 2] = [LinkSecurity::Mac, LinkSecurity::Aead];

/// An error that names the link, and says that what came over it does not prove its origin.
fn is_noticed(verdict: &Verdict) -> bool {
    verdict.as_ref().is_err_and(|error| error.contains("record ") && error.contains("rank "))
}

#[test]
fn tampering_with_protected_data_is_noticed_and_named() {
    let all = [
        Tampering::Flip(3),
        Tampering::Flip(20),
        Tampering::Flip(RECORD - 1),
        Tampering::Flip(5 * RECORD + 777),
        Tampering::Repeat(RECORD, RECORD),
        Tampering::Reorder(RECORD, RECORD),
        Tampering::Repeat(LONG_RECORD, LONG_RECORD),
        Tampering::Reorder(LONG_RECORD, LONG_RECORD),
        Tampering::Swap,
    ];
    for security in PROTECTED {
        for tampering in all {
            let verdicts = relayed(tampering, options(security), sums);
            assert!(verdicts.iter().all(is_noticed), "{security} and {tampering:?}: {verdicts:#?}");
        }
        let control = relayed(Tampering::Nothing, options(security), sums);
        assert_eq!(control, vec![Ok(true); 3], "{security} undisturbed");
    }
}

#[test]
fn tampering_with_plain_data_is_not_noticed() {
    // The control of the test above: the tampering is real, and only the protection notices it.
    let verdicts = relayed(Tampering::Flip(RECORD + 777), options(LinkSecurity::None), sums);
    assert!(verdicts.iter().all(|verdict| verdict.is_ok()) && verdicts.contains(&Ok(false)), "{verdicts:#?}");
}

#[test]
fn a_changed_answer_to_a_new_connection_is_noticed_and_named() {
    // By then all links are made.
    let (cut, changed) = (Tampering::Cut(800_000, 1), Tampering::Answer(800_000));
    for security in PROTECTED {
        let verdicts = relayed(changed, options(security), sums);
        let names = |verdict: &Verdict| {
            let text = verdict.as_ref().err().map_or("", String::as_str);
            text.contains("how many bytes were received does not prove its origin") && text.contains("rank ")
        };
        assert!(verdicts.iter().all(names), "{security}: {verdicts:#?}");
        assert_eq!(relayed(cut, options(security), sums), vec![Ok(true); 3], "{security}: control");
    }
}

#[test]
fn a_protected_connection_that_is_reset_is_reconnected_and_nothing_is_lost() {
    for security in PROTECTED {
        for cut in [Tampering::Cut(10, 1), Tampering::Cut(100_001, 3), Tampering::Cut(350_000, 5)] {
            assert_eq!(relayed(cut, options(security), sums), vec![Ok(true); 3], "{security} and {cut:?}");
        }
        let cut = Tampering::Cut(100_001, 4);
        assert_eq!(relayed(cut, options(security), messages), vec![Ok(true); 3], "{security}: messages");
    }
}

/// The relay acknowledges bytes that it has not forwarded, and that nobody keeps. They may be lost, and then that is an error.
/// Without such a proxy a plain connection is reconnected: see `two_hosts`.
#[test]
fn plain_data_that_a_proxy_loses_is_an_error_and_never_wrong() {
    for body in [sums, messages] {
        let verdicts = relayed(Tampering::Cut(100_001, 1), options(LinkSecurity::None), body);
        let is_honest = |verdict: &Verdict| match verdict {
            Ok(is_right) => *is_right,
            Err(error) => error.contains("is no longer kept"),
        };
        assert!(verdicts.iter().all(is_honest), "{verdicts:#?}");
    }
}

#[test]
fn a_connection_that_cannot_be_reconnected_is_an_error_with_the_reason() {
    let patient = options(LinkSecurity::None);
    let options = GroupOptions { host_timeout: Duration::from_secs(1), ..patient };
    for body in [sums, messages] {
        let verdicts = relayed(Tampering::Vanish(100_001), options.clone(), body);
        let names = |verdict: &Verdict| {
            let text = verdict.as_ref().err().map_or("", String::as_str);
            text.contains("could not be made again for 1 s") && text.contains("link to rank 0")
        };
        assert!(verdicts.iter().all(names), "{verdicts:#?}");
    }
}
