//! A member that ends without a goodbye is lost, and all that follow the log learn it. One that says goodbye is not.

use crate::process::ServerProcess;
use crate::{Job, after, eventually};
use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::{
    ClientNumber, Hello, InitOptions, JobKey, Line, Role, Store, TcpStore, handshake, init,
};
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "DRUMLINE_TEST_CHILD";

/// Not a test itself: the body of the member process that the tests below start.
#[test]
fn member_process() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let [addr, key, end] = order.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let hello = Hello::new(Role::Store).member(1, 2);
    let store = TcpStore::connect(addr, &JobKey::from_hex(key).unwrap(), hello, after(5000)).unwrap();
    store.set("pid", std::process::id().to_string().as_bytes()).unwrap();
    println!("joined");
    match end {
        "wait" => std::thread::sleep(Duration::from_secs(30)),
        "exit" => std::process::exit(3),
        "panic" => panic!("on purpose"),
        _ => drop(store),
    }
}

fn start(job: &Job, end: &str) -> Child {
    start_at(&job.addr(), &job.key, end)
}

/// A process that joins as rank 1 of 2, and then ends as `end` says.
pub(crate) fn start_at(addr: &str, key: &JobKey, end: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "liveness::member_process", "--nocapture"])
        .env(CHILD, format!("{addr} {} {end}", *key.to_hex()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    assert!(out.lines().any(|line| line.unwrap().contains("joined")));
    child
}

#[test]
fn a_killed_process_is_lost_within_a_moment() {
    let job = Job::start();
    let store = job.member(0, 2);
    let mut child = start(&job, "wait");
    let mut log = events::follow(&store);
    assert!(log.next_batch(after(100)).unwrap().is_empty(), "control: nothing before the kill");
    child.kill().unwrap();
    let killed = Instant::now();
    let events = log.next_batch(after(5000)).unwrap();
    assert!(killed.elapsed() < Duration::from_millis(900), "{:?}", killed.elapsed());
    let host = Hello::new(Role::Store).host;
    assert_eq!(events, [Event::Lost { rank: 1, host, pid: child.id() }]);
    child.wait().unwrap();
}

/// A member's connections, made by hand: its life line and one more, which shows the server that it is alive.
struct ByHand {
    hello: Hello,
    life: TcpStream,
    _calls: TcpStream,
}

impl ByHand {
    /// Joins as rank 1 of 2, from a process that does not exist here; `meddle` changes the process space in its notes.
    fn join(job: &Job, meddle: fn(&mut [u8])) -> ByHand {
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let number = ClientNumber::random();
        let hello = |line| {
            let mut note = number.note(line);
            meddle(&mut note[17..]);
            Hello { pid: ended.id(), ..Hello::new(Role::Store).member(1, 2).note(&note) }
        };
        let connect = |line| connect_by_hand(job, &hello(line));
        ByHand { life: connect(Line::Life), _calls: connect(Line::Calls), hello: hello(Line::Resumed) }
    }
}

fn connect_by_hand(job: &Job, hello: &Hello) -> TcpStream {
    let mut stream = TcpStream::connect(job.addr()).unwrap();
    handshake::connect(&mut stream, &job.key, hello, after(5000)).unwrap();
    stream
}

#[test]
fn an_invisible_process_does_not_count_as_dead() {
    let job = Job::start();
    let store = job.member(0, 2);
    let mut log = events::follow(&store);
    // A container with this host's name, in which the process has a pid that does not exist here.
    let elsewhere = ByHand::join(&job, |space| space.fill(7));
    drop(elsewhere.life);
    let events = log.next_batch(after(1000)).unwrap();
    assert!(events.is_empty(), "its life line broke, and it may resume: {events:?}");
    let _resumed = connect_by_hand(&job, &elsewhere.hello);
    assert!(log.next_batch(after(100)).unwrap().is_empty());

    let job = Job::start();
    let store = job.member(0, 2);
    let here = ByHand::join(&job, |_| {});
    let began = Instant::now();
    drop(here.life);
    let events = events::follow(&store).next_batch(after(5000)).unwrap();
    assert!(
        matches!(events[..], [Event::Lost { rank: 1, .. }]),
        "control: it is seen to have ended: {events:?}"
    );
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[test]
fn exit_and_panic_are_losses_and_a_goodbye_is_not() {
    for (end, is_lost) in [("exit", true), ("panic", true), ("drop", false)] {
        let job = Job::start();
        let store = job.member(0, 2);
        start(&job, end).wait().unwrap();
        let events = events::follow(&store).next_batch(after(900)).unwrap();
        assert_eq!(matches!(events[..], [Event::Lost { rank: 1, .. }]), is_lost, "{end}: {events:?}");
        assert_eq!(events.is_empty(), !is_lost, "{end}: {events:?}");
    }
}

#[test]
fn only_the_life_line_counts() {
    let job = Job::start();
    let (watcher, member) = (job.guest(), job.member(1, 2));
    // Several connections at once, all but one of them idle afterwards.
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| member.get("never", after(50)).unwrap_err());
        }
    });
    drop(job.guest());
    assert!(events::follow(&watcher).next_batch(after(800)).unwrap().is_empty());
    member.bye();
    member.set("after", b"goodbye").unwrap();
    drop(member);
    assert!(events::follow(&watcher).next_batch(after(800)).unwrap().is_empty());
    assert_eq!(watcher.get("after", after(0)).unwrap(), b"goodbye");
}

#[test]
fn a_lost_rank_is_not_replaced_in_the_same_round() {
    let job = Job::start();
    start(&job, "exit").wait().unwrap();
    let store = job.guest();
    events::follow(&store).next_batch(after(5000)).unwrap();
    let hello = Hello::new(Role::Store).member(1, 2);
    let error = TcpStore::connect(&job.addr(), &job.key, hello, after(5000)).unwrap_err().to_string();
    assert!(error.contains("was lost in this round"), "{error}");
}

#[test]
fn the_end_of_the_server_frees_its_port_and_ends_waits() {
    let job = Job::start();
    let (client, addr) = (job.guest(), job.addr());
    let waiter = std::thread::spawn(move || {
        let began = Instant::now();
        (client.get("never", after(30_000)).unwrap_err(), began.elapsed())
    });
    std::thread::sleep(Duration::from_millis(50));
    let key = job.key.clone();
    drop(job);
    let (error, took) = waiter.join().unwrap();
    assert!(
        took < Duration::from_secs(1) && error.to_string().contains("lost the store at 127.0.0.1"),
        "{error}"
    );
    std::net::TcpListener::bind(&addr).expect("the port is free again");
    let hello = Hello::new(Role::Store);
    assert!(TcpStore::connect(&addr, &key, hello, after(100)).is_err());
}

#[test]
fn the_end_of_the_server_leaves_no_thread_and_no_descriptor() {
    let mut job = ServerProcess::start();
    let (threads, descriptors) = (job.num_threads(), job.num_descriptors());
    let clients: Vec<_> = (0..10).map(|_| job.guest()).collect();
    assert_eq!(job.num_descriptors(), descriptors + 10);
    job.drop_server();
    eventually(|| (job.num_threads(), threads - 1));
    // Listener, event queue, waker and all connections.
    assert!(job.num_descriptors() < descriptors, "{} of {descriptors}", job.num_descriptors());
    assert!(clients[0].set("a", b"").is_err());
}

#[test]
fn lingering_waits_for_members_of_other_processes_only() {
    let job = Job::start();
    let own = job.member(0, 2);
    let began = Instant::now();
    job.server.linger(Duration::from_secs(5));
    assert!(began.elapsed() < Duration::from_millis(500), "control: there is no other member");
    drop(own);

    let job = Job::start();
    let mut child = start(&job, "wait");
    let began = Instant::now();
    job.server.linger(Duration::from_millis(200));
    assert!(began.elapsed() >= Duration::from_millis(200), "the child is still there");
    let late = TcpStore::connect(&job.addr(), &job.key, Hello::new(Role::Store).member(0, 2), after(5000));
    assert!(late.unwrap_err().to_string().contains("the job is ending"));
    child.kill().unwrap();
    let began = Instant::now();
    job.server.linger(Duration::from_secs(5));
    assert!(began.elapsed() < Duration::from_secs(1));
    child.wait().unwrap();
}

#[test]
fn calls_to_a_store_that_is_gone_fail_at_once() {
    let job = Job::start();
    let (addr, key) = (job.addr(), job.key.clone());
    let store = job.guest();
    drop(job);
    // The first call finds its connection broken, the second has to open another.
    for _ in 0..2 {
        let began = Instant::now();
        assert!(store.wait(&["never"], after(30_000)).is_err());
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    }
    // The control: the client waits for a store that was never reached.
    let began = Instant::now();
    assert!(TcpStore::connect(&addr, &key, Hello::new(Role::Store), after(300)).is_err());
    assert!(began.elapsed() >= Duration::from_millis(300));
}

#[test]
fn a_goodbye_to_a_frozen_store_does_not_block_and_arrives_later() {
    for frozen in [false, true] {
        let job = ServerProcess::start();
        let watcher = job.guest();
        let key = Some(job.key.clone());
        let options = InitOptions { rank: Some(1), world_size: Some(2), key, ..InitOptions::default() };
        let member = init(&format!("tcp://{}", job.addr), options).unwrap();
        if frozen {
            job.freeze();
            let error = watcher.get("never", after(200)).unwrap_err().to_string();
            assert!(error.contains("timed out"), "it does not answer: {error}");
        }
        let began = Instant::now();
        drop(member);
        assert!(began.elapsed() < Duration::from_millis(500), "frozen {frozen}: {:?}", began.elapsed());
        job.thaw();
        let events = events::follow(&watcher).next_batch(after(800)).unwrap();
        assert!(events.is_empty(), "frozen {frozen}: {events:?}");
    }
}

#[test]
fn a_death_is_reported_even_when_members_have_filled_the_log() {
    let job = Job::start();
    let (store, launcher) = (job.member(0, 2), job.guest());
    let mut child = start(&job, "wait");
    let (line, mut filled) = (vec![b'\n'; 1 << 20], 0);
    let error = loop {
        match store.append(events::LOG, &line) {
            Ok(len) => filled = len,
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("log has 62914560 bytes for members and is full"), "{error}");
    child.kill().unwrap();
    let reported = store.tail(events::LOG, filled, after(5000)).unwrap();
    assert!(String::from_utf8_lossy(&reported).contains("\"event\":\"lost\""), "{reported:?}");
    child.wait().unwrap();
    let exit = Event::Exit { rank: 1, host: "here".into(), pid: child.id(), code: None, signal: Some(9) };
    events::post(&launcher, &exit).expect("there is room for a launcher's event, too");
}
