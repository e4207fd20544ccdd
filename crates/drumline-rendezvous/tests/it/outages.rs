//! A network that fails for a while, resets connections or changes data: short outages only cost time, and changed data
//! is noticed and reported.

use crate::relay::{Relay, Way};
use crate::{Job, after, eventually};
use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::frame::{Call, Sealer, encode_call};
use drumline_rendezvous::handshake;
use drumline_rendezvous::{ClientNumber, Hello, Line, Request, Role, Store, TcpStore};
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A job whose members connect through a relay.
struct Disturbed {
    job: Job,
    relay: Relay,
}

impl Disturbed {
    fn start() -> Disturbed {
        let job = Job::start();
        let relay = Relay::to(job.server.local_addr());
        Disturbed { job, relay }
    }

    fn connect(&self, hello: Hello) -> TcpStore {
        TcpStore::connect(&self.relay.addr.to_string(), &self.job.key, hello, after(5000)).unwrap()
    }

    fn guest(&self) -> TcpStore {
        self.connect(Hello::new(Role::Store))
    }

    fn member(&self) -> TcpStore {
        self.connect(Hello::new(Role::Store).member(1, 2))
    }

    /// Existing connections carry nothing any more, new ones do.
    fn lose(&self, way: Option<Way>) {
        let dead = self.relay.num_connections();
        self.relay.meddle(move |number, its, chunk| {
            let is_lost = number < dead && way.is_none_or(|way| way == its);
            if is_lost { Vec::new() } else { chunk }
        });
    }
}

#[test]
fn a_request_is_carried_out_once_even_if_it_or_its_reply_is_lost() {
    std::thread::scope(|scope| {
        for way in [None, Some(Way::ToServer), Some(Way::ToClient)] {
            scope.spawn(move || once_though_lost(way));
        }
    });
}

fn once_though_lost(way: Option<Way>) {
    let net = Disturbed::start();
    let store = net.guest();
    store.set("word", b"a").unwrap();
    net.lose(way);
    let began = Instant::now();
    assert_eq!(store.add("number", 1).unwrap(), 1, "{way:?}");
    assert!(began.elapsed() >= Duration::from_secs(1), "control: the first attempt failed");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!(store.add("number", 1).unwrap(), 2, "{way:?}");
    net.lose(way);
    assert_eq!(store.append("word", b"b").unwrap(), 2, "{way:?}");
    assert_eq!(store.get("word", after(5000)).unwrap(), b"ab", "{way:?}");
    net.lose(way);
    let swapped = store.compare_set("word", Some(b"ab"), b"ab again").unwrap();
    assert_eq!(swapped, b"ab again", "{way:?}");
    net.lose(way);
    assert!(store.delete("word").unwrap(), "{way:?}: it existed at the first attempt");
}

/// Sends `add` as request 1 of the client with this number, over its own connection.
fn add_by_hand(job: &Job, number: ClientNumber) {
    let mut stream = TcpStream::connect(job.addr()).unwrap();
    let hello = Hello::new(Role::Store).note(&number.note(Line::Calls));
    let session = handshake::connect(&mut stream, &job.key, &hello, after(5000)).unwrap();
    let (mut bytes, add) = (Vec::new(), Call::Request(Request::Add { key: "n".into(), delta: 1 }));
    Sealer::new(session.outgoing()).seal(&mut bytes, |out| encode_call(1, 1, &add, out));
    stream.write_all(&bytes).unwrap();
    // The connection ends with the reply unread.
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
fn a_request_is_identified_by_client_and_number() {
    let job = Job::start();
    let (store, number) = (job.guest(), ClientNumber::random());
    for _ in 0..3 {
        add_by_hand(&job, number);
    }
    assert_eq!(store.add("n", 0).unwrap(), 1);
    for _ in 0..3 {
        add_by_hand(&job, ClientNumber::random());
    }
    assert_eq!(store.add("n", 0).unwrap(), 4, "control: other clients' requests with the same number");
}

#[test]
fn a_wait_outlives_its_connection() {
    type Disturb = fn(&Disturbed);
    let disturbances: [(&str, Disturb, u64); 2] =
        [("reset", |net| net.relay.reset_all(), 2), ("silent", |net| net.lose(None), 12)];
    for (name, disturb, limit) in disturbances {
        let net = Disturbed::start();
        let store = Arc::new(net.guest());
        let waiter = {
            let store = store.clone();
            std::thread::spawn(move || store.get("later", after(30_000)).map(|value| (value, Instant::now())))
        };
        std::thread::sleep(Duration::from_millis(200));
        disturb(&net);
        std::thread::sleep(Duration::from_millis(200));
        net.job.guest().set("later", b"came").unwrap();
        let set = Instant::now();
        let (value, came) = waiter.join().unwrap().unwrap();
        assert_eq!(value, b"came");
        assert!(came - set < Duration::from_secs(limit), "{name}: {:?}", came - set);
    }
}

#[test]
fn a_reset_by_the_network_is_not_a_loss() {
    let net = Disturbed::start();
    let (watcher, member) = (net.job.guest(), net.member());
    for turn in 0..3 {
        net.relay.reset_all();
        std::thread::sleep(Duration::from_millis(1200));
        member.set("turn", &[turn]).unwrap();
        let news = events::follow(&watcher).next_batch(after(100)).unwrap();
        assert!(news.is_empty(), "turn {turn}: {news:?}");
    }
    drop(member);
    assert!(events::follow(&watcher).next_batch(after(800)).unwrap().is_empty(), "it has said goodbye");
}

#[test]
fn a_member_that_cannot_resume_in_time_is_lost_and_learns_it() {
    let net = Disturbed::start();
    let (watcher, member) = (net.job.guest(), net.member());
    member.set("a", b"control: it is present").unwrap();
    let mut log = events::follow(&watcher);
    net.relay.set_up(false);
    net.relay.reset_all();
    let began = Instant::now();
    let events = log.next_batch(after(5000)).unwrap();
    assert!(matches!(events[..], [Event::Lost { rank: 1, .. }]), "{events:?}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    net.relay.set_up(true);
    let error = member.set("a", b"b").unwrap_err().to_string();
    assert!(error.contains("was reported as lost") && error.contains("DRUMLINE_HOST_TIMEOUT"), "{error}");
}

#[test]
fn changed_or_repeated_frames_are_reported() {
    type Change = fn(Vec<u8>) -> Vec<u8>;
    let flip: Change = |mut chunk| {
        let middle = chunk.len() / 2;
        chunk[middle] ^= 0x10;
        chunk
    };
    let flip_length: Change = |mut chunk| {
        chunk[3] ^= 1;
        chunk
    };
    let cases: [(&str, Change, &str); 4] = [
        ("flip", flip, "was changed on the way"),
        ("flip length", flip_length, "was changed on the way"),
        ("repeat", |chunk| chunk.repeat(2), "frames were repeated, dropped"),
        ("control", |chunk| chunk, ""),
    ];
    for way in [Way::ToServer, Way::ToClient] {
        for (name, change, expected) in cases {
            let net = Disturbed::start();
            let store = net.guest();
            store.set("a", b"1").unwrap();
            net.relay.meddle(move |_, its, chunk| if its == way { change(chunk) } else { chunk });
            // A repeated frame is noticed when it is read, which may be during the next call.
            let began = Instant::now();
            let result = (0..3).try_for_each(|_| {
                std::thread::sleep(Duration::from_millis(50));
                store.set("a", b"2")
            });
            match result {
                Ok(()) => assert_eq!(name, "control", "{way:?}"),
                Err(error) => assert!(
                    !expected.is_empty() && error.to_string().contains(expected),
                    "{way:?} {name}: {error}"
                ),
            }
            assert!(began.elapsed() < Duration::from_secs(1), "{way:?} {name}: {:?}", began.elapsed());
            eventually(|| (net.job.guest().num_keys().unwrap(), 1));
        }
    }
}
