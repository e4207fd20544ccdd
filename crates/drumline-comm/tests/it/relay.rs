//! Somebody between two ranks: what it changes, repeats, reorders or swaps is noticed where links are protected, and a
//! connection that it cuts is made again. The ranks are threads; the relay stands where rank 0 is thought to listen.

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

/// Elements of each all-reduce: 1 MiB, so that a rank sends the other half of it, in several records.
const LEN: usize = 1 << 18;

/// A whole record of the shorter kind, so that what follows it lies in the next one of either kind.
const RECORD: usize = 8 + (64 << 10) + 16;

/// The same of the longer kind.
const LONG_RECORD: usize = RECORD + 16;

/// What the relay does to what ranks send to rank 0, once.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mischief {
    Nothing,
    /// Changes a bit of the byte with this number.
    Flip(usize),
    /// Sends so many bytes from this number on twice.
    Repeat(usize, usize),
    /// Sends so many bytes from this number on after as many that follow them.
    Reorder(usize, usize),
    /// Gives what the first link sends to the end of the second, and the other way round.
    Swap,
    /// Resets the connection after so many bytes, this often.
    Cut(usize, usize),
    /// Resets the connection after so many bytes and lets nobody in again.
    Vanish(usize),
}

#[derive(Debug)]
struct Relay {
    mischief: Mischief,
    target: SocketAddr,
    /// How often something was done.
    deeds: AtomicUsize,
    /// The first link's receiving end, for one to swap with.
    first: Mutex<Option<(TcpStream, TcpStream)>>,
    is_over: AtomicBool,
}

impl Relay {
    /// Listens for one that wants to go to `target`.
    fn open(mischief: Mischief, target: SocketAddr) -> (Arc<Self>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (deeds, first, is_over) = (AtomicUsize::new(0), Mutex::new(None), AtomicBool::new(false));
        let relay = Arc::new(Self { mischief, target, deeds, first, is_over });
        listener.set_nonblocking(true).unwrap();
        let porter = relay.clone();
        std::thread::spawn(move || {
            while !porter.is_over.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((near, _)) => porter.clone().admit(near),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        (relay, address)
    }

    fn admit(self: Arc<Self>, near: TcpStream) {
        let has_vanished =
            matches!(self.mischief, Mischief::Vanish(_)) && self.deeds.load(Ordering::Acquire) > 0;
        if has_vanished {
            return reset(&near);
        }
        near.set_nonblocking(false).unwrap();
        std::thread::spawn(move || {
            let Ok(far) = TcpStream::connect(self.target) else { return };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            // The handshake passes: it proves itself.
            let passed = pass(&near, &far, OPENING)
                .and_then(|()| pass(&far, &near, ANSWER))
                .and_then(|()| pass(&near, &far, PROOF))
                .and_then(|()| pass(&far, &near, 1));
            if passed.is_err() {
                return;
            }
            if self.mischief == Mischief::Swap {
                let mut first = self.first.lock().unwrap();
                match first.take() {
                    None => return *first = Some((near, far)),
                    Some((near_1, far_1)) => {
                        self.deeds.fetch_add(1, Ordering::AcqRel);
                        carry(&self, near_1, far);
                        return carry(&self, near, far_1);
                    }
                }
            }
            carry(&self, near, far);
        });
    }

    /// What becomes of `bytes`, whose first has the number `at`; `None` cuts the connection.
    fn change(&self, at: usize, mut bytes: Vec<u8>, held: &[u8]) -> Option<Vec<u8>> {
        let contains = |number: usize| (at..at + bytes.len()).contains(&number);
        let is_first = || self.deeds.fetch_add(1, Ordering::AcqRel) == 0;
        match self.mischief {
            Mischief::Flip(number) if contains(number) && is_first() => bytes[number - at] ^= 0x10,
            Mischief::Repeat(begin, len) if contains(begin + len) && is_first() => {
                let known: Vec<u8> = held.iter().chain(&bytes).copied().collect();
                let begin = known.len() - (at + bytes.len() - begin);
                bytes.extend_from_slice(&known[begin..][..len]);
            }
            Mischief::Cut(number, times)
                if at + bytes.len() > number && self.deeds.load(Ordering::Acquire) < times =>
            {
                self.deeds.fetch_add(1, Ordering::AcqRel);
                return None;
            }
            Mischief::Vanish(number) if at + bytes.len() > number => {
                self.deeds.fetch_add(1, Ordering::AcqRel);
                return None;
            }
            _ => {}
        }
        Some(bytes)
    }
}

/// Bytes from one side to the other, neither more nor fewer.
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
    /// Ends both connections as a firewall does: when both threads have let go of them.
    fn reset(&self) {
        self.is_cut.store(true, Ordering::Release);
        for stream in [&self.near, &self.far] {
            reset(stream);
            let _ = stream.shutdown(Shutdown::Read);
        }
    }
}

/// Both directions, with mischief from near to far.
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
            if let Mischief::Reorder(begin, len) = relay.mischief {
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

/// What goes out of `waiting`, which ends with the byte before number `end`.
fn reordered(relay: &Relay, waiting: &mut Vec<u8>, end: usize, begin: usize, len: usize) -> Vec<u8> {
    let first = end - waiting.len();
    if first > begin || end <= begin {
        return std::mem::take(waiting);
    }
    let place = begin - first;
    if waiting.len() < place + 2 * len {
        return waiting.drain(..place).collect();
    }
    relay.deeds.fetch_add(1, Ordering::AcqRel);
    waiting[place..place + 2 * len].rotate_left(len);
    std::mem::take(waiting)
}

/// Has the connection end with a reset when it is closed.
fn reset(stream: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// A store in which rank 0 listens at the relay.
#[derive(Debug)]
struct Misleading {
    store: MemoryStore,
    mischief: Mischief,
    relay: Mutex<Option<Arc<Relay>>>,
}

impl Store for Misleading {
    fn call(&self, request: Request, deadline: Option<Instant>) -> std::result::Result<Reply, StoreError> {
        let request = match request {
            Request::Set { key, value } if key.ends_with("hub/0") => {
                let target = String::from_utf8_lossy(&value).parse().unwrap();
                let (relay, address) = Relay::open(self.mischief, target);
                *self.relay.lock().unwrap() = Some(relay);
                Request::Set { key, value: address.to_string().into() }
            }
            other => other,
        };
        self.store.call(request, deadline)
    }
}

/// What a rank makes of it.
type Verdict = std::result::Result<bool, String>;

/// Three ranks run `body`, which says whether all was right, with the relay before rank 0.
fn relayed(
    mischief: Mischief,
    options: GroupOptions,
    body: impl Fn(&ProcessGroup) -> Result<bool> + Send + Sync + 'static,
) -> Vec<Verdict> {
    within(Duration::from_secs(60), move || {
        let (store, relay) = (MemoryStore::new(), Mutex::new(None));
        let (store, key) = (Arc::new(Misleading { store, mischief, relay }), JobKey::random());
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
        let deeds = relay.deeds.load(Ordering::Acquire);
        assert_eq!(deeds > 0, mischief != Mischief::Nothing, "{mischief:?} happened {deeds} times");
        if let Mischief::Cut(_, times) = mischief {
            assert_eq!(deeds, times);
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

/// Sums with a known answer.
fn sums(group: &ProcessGroup) -> Result<bool> {
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

fn is_noticed(verdict: &Verdict) -> bool {
    verdict.as_ref().is_err_and(|error| error.contains("record ") && error.contains("rank "))
}

#[test]
fn whatever_is_done_to_protected_data_is_noticed_and_named() {
    let mischiefs = [
        Mischief::Flip(3),
        Mischief::Flip(20),
        Mischief::Flip(RECORD - 1),
        Mischief::Flip(5 * RECORD + 777),
        Mischief::Repeat(RECORD, RECORD),
        Mischief::Reorder(RECORD, RECORD),
        Mischief::Repeat(LONG_RECORD, LONG_RECORD),
        Mischief::Reorder(LONG_RECORD, LONG_RECORD),
        Mischief::Swap,
    ];
    for security in PROTECTED {
        for mischief in mischiefs {
            let verdicts = relayed(mischief, options(security), sums);
            assert!(verdicts.iter().all(is_noticed), "{security} and {mischief:?}: {verdicts:#?}");
        }
        let control = relayed(Mischief::Nothing, options(security), sums);
        assert_eq!(control, vec![Ok(true); 3], "{security} undisturbed");
    }
}

#[test]
fn what_is_done_to_plain_data_is_believed() {
    // The control of the test above: the mischief is real, and nothing but the protection notices it.
    let verdicts = relayed(Mischief::Flip(RECORD + 777), options(LinkSecurity::None), sums);
    assert!(verdicts.iter().all(|verdict| verdict.is_ok()) && verdicts.contains(&Ok(false)), "{verdicts:#?}");
}

#[test]
fn a_protected_connection_that_is_reset_is_made_again_and_nothing_is_lost() {
    for security in PROTECTED {
        for cut in [Mischief::Cut(10, 1), Mischief::Cut(100_001, 3), Mischief::Cut(350_000, 5)] {
            assert_eq!(relayed(cut, options(security), sums), vec![Ok(true); 3], "{security} and {cut:?}");
        }
        let cut = Mischief::Cut(100_001, 4);
        assert_eq!(relayed(cut, options(security), messages), vec![Ok(true); 3], "{security}: messages");
    }
}

/// The relay acknowledges what it has not passed on, which nobody keeps: it may be lost, and then that is said. That a plain
/// connection is made again where no such proxy stands between is shown in `two_hosts`.
#[test]
fn what_a_proxy_loses_of_plain_data_is_an_error_and_never_wrong() {
    for body in [sums, messages] {
        let verdicts = relayed(Mischief::Cut(100_001, 1), options(LinkSecurity::None), body);
        let is_honest = |verdict: &Verdict| match verdict {
            Ok(is_right) => *is_right,
            Err(error) => error.contains("is no longer kept"),
        };
        assert!(verdicts.iter().all(is_honest), "{verdicts:#?}");
    }
}

#[test]
fn a_connection_that_cannot_be_made_again_is_an_error_with_the_reason() {
    let patient = options(LinkSecurity::None);
    let options = GroupOptions { host_timeout: Duration::from_secs(1), ..patient };
    for body in [sums, messages] {
        let verdicts = relayed(Mischief::Vanish(100_001), options.clone(), body);
        let names = |verdict: &Verdict| {
            let text = verdict.as_ref().err().map_or("", String::as_str);
            text.contains("could not be made again for 1 s") && text.contains("link to rank 0")
        };
        assert!(verdicts.iter().all(names), "{verdicts:#?}");
    }
}
