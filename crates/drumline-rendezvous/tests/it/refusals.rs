//! Clients that hold the key but do not belong to the job get the reason, with both values, within a second.

use crate::{Job, after};
use drumline_rendezvous::events::{self, Event};
use drumline_rendezvous::handshake::{self, ClientHandshake, Prover, Session};
use drumline_rendezvous::{
    Cause, Gate, HandshakeError, Hello, Host, JobKey, Refusal, Role, ServerOptions, Store, StoreError,
    TcpStore, TcpStoreServer, free_port,
};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// The error of a client that is not admitted; it must come within a second.
fn refused(job: &Job, key: &JobKey, hello: Hello) -> StoreError {
    let began = Instant::now();
    let error = TcpStore::connect(&job.addr(), key, hello, after(30_000)).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}: {error}", began.elapsed());
    error
}

fn member(rank: usize, world_size: usize) -> Hello {
    Hello::new(Role::Store).member(rank, world_size)
}

#[test]
fn duplicate_rank() {
    let job = Job::start();
    let first = job.member(1, 4);
    let error = refused(&job, &job.key, member(1, 4)).to_string();
    assert!(error.contains("rank 1") && error.contains("is already a member"), "{error}");
    first.set("still", b"here").unwrap();
    drop(first);
    job.member(1, 4);
}

#[test]
fn world_size_round_and_rank() {
    let job = Job::with(ServerOptions { world_size: Some(4), round: 3 });
    let error = refused(&job, &job.key, member(1, 8).round(3)).to_string();
    assert!(error.contains("world size differs: 4 according to the store, 8 according to rank 1"), "{error}");
    let error = refused(&job, &job.key, member(1, 4).round(2)).to_string();
    assert!(error.contains("the store is in round 3") && error.contains("in round 2"), "{error}");
    let error = refused(&job, &job.key, member(4, 4).round(3)).to_string();
    assert!(error.contains("rank 4") && error.contains("outside the world of 4 ranks"), "{error}");
    let error = refused(&job, &job.key, Hello::new(Role::Link)).to_string();
    assert!(error.contains("not a link"), "{error}");
    let hello = member(1, 4).round(3);
    TcpStore::connect(&job.addr(), &job.key, hello, after(5000)).expect("control: this one belongs");
}

#[test]
fn the_others_learn_of_a_refusal_but_not_of_other_programs() {
    let job = Job::with(ServerOptions { world_size: Some(4), round: 0 });
    let waiting = job.member(0, 4);
    let mut log = events::follow_in(&waiting, 1);
    refused(&job, &JobKey::random(), member(1, 8));
    refused(&job, &job.key, member(1, 4).round(7));
    assert!(log.next_batch(after(100)).unwrap().is_empty(), "control: no rank waits for those");
    for (hello, part) in [
        (member(1, 8), "world size differs: 4 according to the store, 8 according to rank 1"),
        (member(0, 4), "is already a member"),
    ] {
        let rank = hello.rank.map(|rank| rank as usize);
        refused(&job, &job.key, hello);
        let began = Instant::now();
        match &log.next_batch(after(5000)).unwrap()[..] {
            [Event::Refused { rank: refused, reason }] if *refused == rank => {
                assert!(reason.contains(part), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert!(began.elapsed() < Duration::from_millis(500));
    }
    refused(&job, &job.key, member(1, 8));
    assert!(log.next_batch(after(100)).unwrap().is_empty(), "announced once");
}

#[test]
fn other_job() {
    let job = Job::start();
    let error = refused(&job, &JobKey::random(), member(0, 2));
    assert!(matches!(&error, StoreError::Handshake { source: HandshakeError::Closed, .. }), "{error}");
    assert!(error.to_string().contains("belongs to another job or is another program"), "{error}");
    assert!(error.to_string().contains(&job.addr()), "{error}");
}

#[test]
fn other_version() {
    let job = Job::start();
    let waiting = job.member(1, 2);
    let mut stream = TcpStream::connect(job.addr()).unwrap();
    let mut client =
        ClientHandshake::with_version(&Prover::from(&job.key), &member(0, 2), handshake::VERSION + 1)
            .unwrap();
    stream.write_all(client.opening()).unwrap();
    let error = loop {
        let mut bytes = vec![0; client.want()];
        stream.read_exact(&mut bytes).unwrap();
        match client.receive(&bytes) {
            Ok(handshake::ClientStep::Send(proof)) => stream.write_all(&proof[..]).unwrap(),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, HandshakeError::Refused(refusal) if refusal.cause == Cause::Version));
    assert!(error.to_string().contains("has version 2, this rank version 3"), "{error}");
    let events = events::follow_in(&waiting, 1).next_batch(after(5000)).unwrap();
    assert!(matches!(&events[..], [Event::Refused { rank: None, .. }]), "{events:?}");
}

#[test]
fn another_program_on_the_port_is_noticed_and_learns_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let other_program = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut opening = [0; handshake::OPENING];
        stream.read_exact(&mut opening).unwrap();
        stream.write_all(&[7; handshake::ANSWER]).unwrap();
        let mut more = Vec::new();
        let _ = stream.read_to_end(&mut more);
        more.len()
    });
    let began = Instant::now();
    let error = TcpStore::connect(&addr, &JobKey::random(), member(0, 2), after(30_000)).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(1));
    assert!(matches!(&error, StoreError::Handshake { source: HandshakeError::NotProved, .. }), "{error}");
    assert_eq!(other_program.join().unwrap(), 0, "nothing more was sent to it");
}

#[test]
fn no_server() {
    let addr = format!("127.0.0.1:{}", free_port().unwrap());
    let error = TcpStore::connect(&addr, &JobKey::random(), member(0, 2), after(200)).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }));
    let text = error.to_string();
    assert!(
        text.contains(&format!("{addr} refused (no server listens there)")) && text.contains("try checking"),
        "{text}"
    );
    let error =
        TcpStore::connect("no.such.host.invalid:1", &JobKey::random(), member(0, 2), after(100)).unwrap_err();
    assert!(error.to_string().contains("cannot be resolved"), "{error}");
}

#[test]
fn a_server_that_accepts_connections_and_does_not_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let began = Instant::now();
    let error =
        TcpStore::connect(&addr, &JobKey::random(), member(0, 2), after(300)).unwrap_err().to_string();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(error.contains("accepted the connection, then: the other side was silent"), "{error}");
}

#[test]
fn the_server_may_start_later() {
    let port = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port().unwrap()));
    let key = JobKey::random();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect(&port.to_string(), &key, member(0, 1), after(10_000)));
        std::thread::sleep(Duration::from_millis(300));
        let server = TcpStoreServer::bind(port, &key, ServerOptions::default()).unwrap();
        client.join().unwrap().unwrap().set("a", b"b").unwrap();
        drop(server);
    });
}

#[test]
fn without_a_secret_only_loopback() {
    let open = JobKey::open();
    let error = TcpStoreServer::bind("0.0.0.0:0", &open, ServerOptions::default()).unwrap_err();
    assert!(
        matches!(&error, StoreError::NeedsSecret { .. })
            && error.to_string().contains("try `drumline key new job.key`")
    );
    let error = TcpStore::connect("192.0.2.1:9", &open, member(0, 2), after(1000)).unwrap_err();
    assert!(matches!(error, StoreError::NeedsSecret { .. }), "{error}");
    let server =
        TcpStoreServer::bind("127.0.0.1:0", &open, ServerOptions::default()).expect("control: loopback");
    TcpStore::connect(&server.local_addr().to_string(), &open, member(0, 2), after(5000)).unwrap();
}

#[test]
fn a_port_in_use() {
    let job = Job::start();
    let error = TcpStoreServer::bind(job.addr(), &job.key, ServerOptions::default()).unwrap_err().to_string();
    assert!(error.contains(&job.addr()) && error.contains("try another port"), "{error}");
    assert!(error.contains(&format!("this process itself (pid {}) has it", std::process::id())), "{error}");
}

/// Admits only group 7.
struct GroupSeven(Sender<(Hello, TcpStream)>);

impl Host for GroupSeven {
    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal> {
        match &hello.note[..] {
            b"group 7" => Ok(()),
            _ => Err(Refusal::new(Cause::Other, "group 7 expected, got another")),
        }
    }

    fn receive(&mut self, hello: Hello, stream: TcpStream, _: Session) {
        self.0.send((hello, stream)).unwrap();
    }
}

#[test]
fn a_link_between_two_ranks() {
    let (key, (sender, came)) = (JobKey::random(), channel());
    let gate = Gate::open("127.0.0.1:0", &key, GroupSeven(sender)).unwrap();
    let mut stream = TcpStream::connect(gate.local_addr()).unwrap();
    let hello = Hello::new(Role::Link).member(1, 2).note(b"group 7");
    handshake::connect(&mut stream, &key, &hello, after(5000)).unwrap();
    assert_eq!(stream.read_timeout().unwrap(), None, "its timeout is unchanged");
    let (who, mut here) = came.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(who, hello);
    // After the handshake, there is no time limit on the connection.
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        stream.write_all(b"later").unwrap();
    });
    let mut text = String::new();
    here.read_to_string(&mut text).unwrap();
    assert_eq!(text, "later");

    let mut stream = TcpStream::connect(gate.local_addr()).unwrap();
    let error = handshake::connect(&mut stream, &key, &hello.note(b"group 8"), after(5000)).unwrap_err();
    assert_eq!(error.to_string(), "refused: group 7 expected, got another");
    drop(gate);
    assert!(came.try_recv().is_err(), "no other was admitted");
}
