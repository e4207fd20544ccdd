//! Connections without the key change nothing, cost little, and keep no member out.

use crate::process::{Server, ServerProcess};
use crate::{Job, after, eventually};
use drumline_rendezvous::frame::{Call, FRAME_OVERHEAD, Sealer, encode_call};
use drumline_rendezvous::handshake::{ClientHandshake, ClientStep, Prover, Session};
use drumline_rendezvous::{ClientNumber, Hello, JobKey, Line, Request, Role, Store, StoreError, TcpStore};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

fn dial(job: &impl Server) -> TcpStream {
    let stream = TcpStream::connect(job.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// A connection from this address of the loopback network.
fn dial_from(source: Ipv4Addr, job: &impl Server) -> TcpStream {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&socket, &SocketAddrV4::new(source, 0)).unwrap();
    connect(&socket, &job.addr().parse::<SocketAddrV4>().unwrap()).unwrap();
    socket.into()
}

/// Reads to the end, and returns what was received.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("not closed: {error}"),
    }
}

/// A hello of a client that is not a member.
fn guest() -> Hello {
    Hello::new(Role::Store).note(&ClientNumber::random().note(Line::Calls))
}

/// An admitted connection, made by hand, and its keys.
fn proved(job: &impl Server) -> (TcpStream, Session) {
    let mut stream = dial(job);
    let mut client = ClientHandshake::new(&Prover::from(job.key()), &guest()).unwrap();
    stream.write_all(client.opening()).unwrap();
    loop {
        let mut bytes = vec![0; client.want()];
        stream.read_exact(&mut bytes).unwrap();
        match client.receive(&bytes).unwrap() {
            ClientStep::Send(proof) => stream.write_all(&proof[..]).unwrap(),
            ClientStep::More => {}
            ClientStep::Welcome(session) => return (stream, session),
        }
    }
}

/// Requests numbered from 1, sealed for this connection.
fn sealed(session: &Session, requests: impl IntoIterator<Item = Request>) -> Vec<u8> {
    let (mut sealer, mut bytes) = (Sealer::new(session.outgoing()), Vec::new());
    for (id, request) in (1..).zip(requests) {
        sealer.seal(&mut bytes, |out| encode_call(id, id, &Call::Request(request), out));
    }
    bytes
}

#[test]
fn noise_is_closed_without_a_byte() {
    let job = Job::start();
    let store = job.guest();
    store.set("a", b"1").unwrap();
    let mut tls = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    tls.resize(517, 0x5a);
    let mut magic_and_huge_lengths = b"DRUMLINE\x01\x00".to_vec();
    magic_and_huge_lengths.resize(400, 0xff);
    let noises: [&[u8]; 5] = [
        &[0xff; 4096],
        b"GET / HTTP/1.1\r\nHost: drumline.example\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n",
        &tls,
        &magic_and_huge_lengths,
        &[0; 58],
    ];
    for noise in noises {
        let mut stream = dial(&job);
        let _ = stream.write_all(noise);
        assert!(rest(&mut stream).is_empty());
    }
    assert_eq!(store.list("").unwrap(), ["a"]);
}

#[test]
fn ten_thousand_foreign_connections_leave_no_trace() {
    let job = ServerProcess::start();
    let store = job.guest();
    let go = |count: usize| {
        for i in 0..count {
            let _ = dial(&job).write_all(&[i as u8; 64]);
        }
    };
    let open = job.num_descriptors();
    go(500);
    store.set("a", b"1").unwrap();
    let memory = job.resident_kib();
    go(10_000);
    store.set("a", b"2").unwrap();
    eventually(|| (job.num_descriptors(), open));
    let grown = job.resident_kib().saturating_sub(memory);
    assert!(grown <= 1024, "{grown} KiB more");
}

#[test]
fn silent_connections_cost_at_most_four_kib_each_and_256_are_kept() {
    let job = ServerProcess::start();
    let store = job.guest();
    store.set("a", b"1").unwrap();
    let (memory, open) = (job.resident_kib(), job.num_descriptors());
    let silent: Vec<TcpStream> = (0..1000).map(|_| dial(&job)).collect();
    eventually(|| (job.num_descriptors(), open + 256));
    store.set("a", b"2").unwrap();
    let grown = job.resident_kib().saturating_sub(memory);
    assert!(grown <= 256 * 4, "{grown} KiB");
    drop(silent);
    eventually(|| (job.num_descriptors(), open));
}

#[test]
fn a_server_without_descriptors_waits_for_some_and_does_not_spin() {
    let job = ServerProcess::with_descriptors("40");
    let strangers: Vec<TcpStream> = (0..100).map(|_| dial(&job)).collect();
    let mut members: Vec<_> = (0..20).map(|_| job.guest()).collect();
    drop(strangers);
    // All descriptors are in use: others have to wait in the system's queue.
    let full = || TcpStore::connect(&job.addr, &job.key, Hello::new(Role::Store), after(400));
    let error = loop {
        match full() {
            Ok(member) => members.push(member),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    let busy = job.busy();
    std::thread::sleep(Duration::from_secs(1));
    assert!(job.busy() - busy < Duration::from_millis(200), "{:?} in a second", job.busy() - busy);
    members[0].set("members", b"are served").unwrap();
    members.truncate(10);
    job.guest().set("room", b"again").unwrap();
}

#[test]
fn slow_senders_are_dropped_and_members_still_join() {
    let job = Job::start();
    let began = Instant::now();
    let mut slow: Vec<TcpStream> = (0..1000).map(|_| dial(&job)).collect();
    let opening = *ClientHandshake::new(&Prover::from(&job.key), &Hello::new(Role::Store)).unwrap().opening();
    for (turn, byte) in opening[..3].iter().enumerate() {
        for stream in &mut slow {
            let _ = stream.write_all(&[*byte]);
        }
        let joining = Instant::now();
        job.member(turn, 8).set("joined", b"yes").unwrap();
        assert!(joining.elapsed() < Duration::from_secs(1), "turn {turn}: {:?}", joining.elapsed());
    }
    // At most 256 are kept at a time, and none of them longer than five seconds.
    let patience = Duration::from_secs(5).saturating_sub(began.elapsed()) + Duration::from_millis(500);
    std::thread::sleep(patience);
    for stream in &mut slow {
        stream.set_nonblocking(true).unwrap();
        let state = stream.read(&mut [0; 1]);
        assert!(
            !matches!(&state, Err(error) if error.kind() == ErrorKind::WouldBlock),
            "still held: {state:?}"
        );
    }
}

#[test]
fn a_flood_from_one_address_displaces_none_of_another() {
    for (flooder, stays) in [(Ipv4Addr::new(127, 0, 0, 2), true), (Ipv4Addr::LOCALHOST, false)] {
        let job = Job::start();
        let mut early = dial(&job);
        let flood: Vec<TcpStream> = (0..600).map(|_| dial_from(flooder, &job)).collect();
        // All are accepted by now: the last one at most two moments after the first.
        std::thread::sleep(Duration::from_secs(1));
        early.set_nonblocking(true).unwrap();
        let state = early.read(&mut [0; 1]);
        let held = matches!(&state, Err(error) if error.kind() == ErrorKind::WouldBlock);
        assert_eq!(held, stays, "with a flood from {flooder}: {state:?}");
        drop(flood);
    }
}

#[test]
fn a_key_that_is_nearly_right_gets_the_same_answer_as_any_other() {
    let job = Job::start();
    let mut bytes = *job.key.as_bytes();
    bytes[31] ^= 1;
    for key in [JobKey::from_bytes(bytes), JobKey::random()] {
        let mut stream = dial(&job);
        let client = ClientHandshake::new(&Prover::from(&key), &Hello::new(Role::Store)).unwrap();
        stream.write_all(client.opening()).unwrap();
        assert!(rest(&mut stream).is_empty());
    }
    job.guest().set("the right", b"one").unwrap();
}

#[test]
fn a_member_with_a_slow_handshake_is_admitted() {
    let job = Job::start();
    let mut stream = dial(&job);
    let mut client = ClientHandshake::new(&Prover::from(&job.key), &guest()).unwrap();
    for byte in client.opening() {
        stream.write_all(&[*byte]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut answer = vec![0; client.want()];
    stream.read_exact(&mut answer).unwrap();
    let ClientStep::Send(proof) = client.receive(&answer).unwrap() else { panic!() };
    for part in proof.chunks(7) {
        stream.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut verdict = [9];
    stream.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict, [0]);
}

#[test]
fn a_recorded_connection_cannot_be_replayed() {
    let job = Job::start();
    let store = job.guest();
    let mut stream = dial(&job);
    let mut client = ClientHandshake::new(&Prover::from(&job.key), &guest()).unwrap();
    let mut recorded = client.opening().to_vec();
    stream.write_all(&recorded).unwrap();
    let mut answer = vec![0; client.want()];
    stream.read_exact(&mut answer).unwrap();
    let ClientStep::Send(proof) = client.receive(&answer).unwrap() else { panic!() };
    let ClientStep::Welcome(session) = client.receive(&[0]).unwrap() else { panic!() };
    recorded.extend_from_slice(&proof[..]);
    recorded.extend(sealed(&session, [Request::Set { key: "evil".into(), value: Vec::new() }]));
    // Control: the connection it was made for.
    stream.write_all(&recorded[58..]).unwrap();
    store.get("evil", after(5000)).unwrap();
    store.delete("evil").unwrap();
    for _ in 0..1000 {
        let mut replay = dial(&job);
        let _ = replay.write_all(&recorded);
        assert!(rest(&mut replay).len() <= 64, "an answer to the opening, but no welcome");
    }
    assert_eq!(store.num_keys().unwrap(), 0);
}

#[test]
fn a_member_that_violates_the_protocol_only_loses_its_connection() {
    let job = Job::start();
    let store = job.guest();
    let num_keys = |session: &Session| sealed(session, [Request::NumKeys]);
    type Bytes<'a> = &'a dyn Fn(&Session) -> Vec<u8>;
    let twice: Bytes<'_> = &|session| num_keys(session).repeat(2);
    let second_first: Bytes<'_> =
        &|session| sealed(session, [Request::NumKeys, Request::NumKeys]).split_off(FRAME_OVERHEAD + 17);
    let changed: Bytes<'_> = &|session| num_keys(session).iter().map(|byte| byte ^ 1).collect();
    let unsealed: Bytes<'_> = &|_| vec![0; 64];
    let unknown: Bytes<'_> = &|session| {
        let mut bytes = Vec::new();
        Sealer::new(session.outgoing())
            .seal(&mut bytes, |out| out.extend([[0; 8], [77; 8], [0; 8]].concat()));
        bytes
    };
    let many_waits: Bytes<'_> =
        &|session| sealed(session, (1..=100).map(|i| Request::Get { key: format!("never{i}") }));
    let cases: [(Bytes<'_>, &str); 6] = [
        (twice, "expected frame 2 of this connection, got frame 1: frames were repeated"),
        (second_first, "expected frame 1 of this connection, got frame 2"),
        (changed, "frame 1 of this connection was changed on the way"),
        (unsealed, "frame 1 of this connection was changed on the way"),
        (unknown, "unknown frame kind 77"),
        (many_waits, "64 waits open"),
    ];
    for (bytes, part) in cases {
        let (mut stream, session) = proved(&job);
        stream.write_all(&bytes(&session)).unwrap();
        let answer = String::from_utf8_lossy(&rest(&mut stream)).into_owned();
        assert!(answer.contains(part), "{part}: {answer:?}");
    }
    store.set("still", b"here").unwrap();
}

#[test]
fn a_frame_of_one_connection_is_rejected_on_another() {
    let job = Job::start();
    let ((mut one, its), (mut two, others)) = (proved(&job), proved(&job));
    let set = |key: &str| Request::Set { key: key.into(), value: Vec::new() };
    one.write_all(&sealed(&others, [set("swapped")])).unwrap();
    let answer = String::from_utf8_lossy(&rest(&mut one)).into_owned();
    assert!(answer.contains("comes from another connection"), "{answer:?}");
    two.write_all(&sealed(&others, [set("own")])).unwrap();
    job.guest().get("own", after(5000)).expect("control: the connection it was made for");
    assert_eq!(job.guest().list("").unwrap(), ["own"]);
    drop(its);
}

#[test]
fn a_client_that_does_not_read_its_replies_is_delayed() {
    let job = ServerProcess::start();
    let store = job.guest();
    store.set("large", &vec![1; 4 << 20]).unwrap();
    let (mut asker, session) = proved(&job);
    let bytes = sealed(&session, (1..=1000).map(|_| Request::Get { key: "large".into() }));
    let memory = job.resident_kib();
    asker.write_all(&bytes).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    store.set("others", b"continue").unwrap();
    let grown = job.resident_kib().saturating_sub(memory);
    assert!(grown < 32 * 1024, "{grown} KiB more for 4,000,000 KiB asked");
    // When it reads after all, it gets every answer.
    let mut left = 1000u64 * (FRAME_OVERHEAD as u64 + 8 + 1 + 4 + (4 << 20));
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        left -= asker.read(&mut buffer).unwrap() as u64;
    }
}
