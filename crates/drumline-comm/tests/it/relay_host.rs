//! A relay on a host of its own, between two hosts: what it changes, repeats, reorders or swaps on links and in the store's
//! frames is noticed and named.
//!
//! ```text
//!   host 0: rank 0 ──── host 2: the last rank, the relay ──── host 1: the other ranks
//! ```
//! All connections are made by ranks on host 1, to ports of rank 0. The relay listens on the same ports of the same address;
//! the test finds out which, and writes them to a file.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use drumline_comm::ProcessGroup;
use drumline_rendezvous::frame::{Call, FRAME_OVERHEAD, Sealer, encode_call};
use drumline_rendezvous::{
    ClientNumber, Hello, JobKey, Line, Request, Role, ServerOptions, Store, TcpStore, TcpStoreServer,
    handshake, worker_env,
};
use rank_test::anyhow::{Context, Result, anyhow, ensure};
use rank_test::netns::Hosts;
use rank_test::{Ranks, ranks_test};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use crate::relay::{LONG_RECORD, RECORD, Relay, Tampering, sums};

const HOST_0: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const HOST_1: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

const SOON: Duration = Duration::from_secs(20);

/// The number of the case in its list.
const CASE: &str = "RELAY_CASE";

/// The file with rank 0's ports.
const PORTS: &str = "RELAY_PORTS";

/// How links are protected, and what is done to them. The first one is the control: the change is real, and only the
/// protection notices it.
const LINKS: [(&str, Tampering); 11] = [
    ("none", Tampering::Flip(RECORD + 777)),
    ("mac", Tampering::Nothing),
    ("mac", Tampering::Flip(RECORD + 777)),
    ("mac", Tampering::Repeat(LONG_RECORD, LONG_RECORD)),
    ("mac", Tampering::Reorder(LONG_RECORD, LONG_RECORD)),
    ("mac", Tampering::Swap),
    ("aead", Tampering::Flip(RECORD + 777)),
    ("aead", Tampering::Repeat(RECORD, RECORD)),
    ("aead", Tampering::Reorder(RECORD, RECORD)),
    ("aead", Tampering::Swap),
    ("aead", Tampering::Answer(800_000)),
];

/// What is done to the frames of a store's clients, and what the error says. All frames have the same length.
const FRAMES: [(Tampering, &str); 5] = [
    (Tampering::Nothing, "all went well"),
    (Tampering::Flip(FRAME + FRAME_OVERHEAD - 10), "was changed on the way"),
    (Tampering::Repeat(FRAME, FRAME), "frames were repeated, dropped or reordered"),
    (Tampering::Reorder(FRAME, FRAME), "frames were repeated, dropped or reordered"),
    (Tampering::Swap, "comes from another connection"),
];

/// The length of a frame with [`request`].
const FRAME: usize = FRAME_OVERHEAD + 27;

fn request() -> Request {
    Request::Set { key: "a".into(), value: b"1".to_vec() }
}

fn variable(name: &str) -> Result<usize> {
    Ok(std::env::var(name)?.parse()?)
}

/// A connection to rank 0, as if host 1 made it.
fn dial_as_host_1(port: u16) -> std::io::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrV4::new(HOST_1, 0))?;
    connect(&socket, &SocketAddrV4::new(HOST_0, port))?;
    Ok(socket.into())
}

/// Relays, until it is killed, and prints when it has tampered. The store's port is the job's, links have others.
fn be_the_relay(on_store: Tampering, on_links: Tampering) -> Result<()> {
    let (file, store) = (std::env::var(PORTS)?, variable(worker_env::MASTER_PORT)? as u16);
    let mut relays: Vec<(u16, Arc<Relay>)> = Vec::new();
    let mut has_told = false;
    loop {
        for port in std::fs::read_to_string(&file).unwrap_or_default().lines() {
            let port = port.parse()?;
            if relays.iter().all(|(known, _)| *known != port) {
                let tampering = if port == store { on_store } else { on_links };
                let listener = TcpListener::bind((HOST_0, port))?;
                relays.push((port, Relay::open(listener, tampering, Box::new(move || dial_as_host_1(port)))));
            }
        }
        if !has_told && relays.iter().any(|(_, relay)| relay.count.load(Ordering::Acquire) > 0) {
            println!("tampered");
            has_told = true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs one case, and returns what the ranks on host 1 report.
fn verdicts(
    ranks: &Ranks,
    hosts: &Hosts,
    case: usize,
    members: &[usize],
    tampering: Tampering,
) -> Result<Vec<String>> {
    let file =
        std::env::temp_dir().join(format!("relay-ports-{}-{case}-{}", std::process::id(), members.len()));
    let relay = members.len() + 1;
    let variables = [(CASE, case.to_string()), (PORTS, file.display().to_string())];
    let running = ranks.clone().env(variables).on_hosts(hosts, &[&[0], members, &[relay]]).start()?;
    let is_over = AtomicBool::new(false);
    let verdicts = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) && write_ports(hosts, &file).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let verdict = |rank: &usize| running.wait_for_line(*rank, "verdict: ", SOON);
        let verdicts = members.iter().map(verdict).collect::<Result<Vec<_>>>();
        is_over.store(true, Ordering::Release);
        verdicts
    });
    let _ = std::fs::remove_file(&file);
    let verdicts = verdicts.with_context(|| format!("the relay printed: {}", running.printed(relay)))?;
    if tampering != Tampering::Nothing {
        running.wait_for_line(relay, "tampered", SOON)?;
    }
    Ok(verdicts)
}

/// Writes the ports on which rank 0 listens, one per line, all at once.
fn write_ports(hosts: &Hosts, file: &Path) -> Result<()> {
    let ports: Vec<_> = hosts.listening(0).iter().map(|port| port.replace("tcp port ", "")).collect();
    let new = file.with_extension("new");
    std::fs::write(&new, ports.join("\n"))?;
    Ok(std::fs::rename(&new, file)?)
}

/// Three members of a group reduce; the fourth process is the relay.
fn reduce_through_the_relay() -> Result<()> {
    let (rank, (_, tampering)) = (variable(worker_env::RANK)?, LINKS[variable(CASE)?]);
    if rank == 3 {
        return be_the_relay(Tampering::Nothing, tampering);
    }
    let outcome = ProcessGroup::init("env://", rank, 3).and_then(|group| sums(&group));
    match outcome {
        Ok(is_right) => println!("verdict: all right: {is_right}"),
        Err(error) => println!("verdict: {}", error.to_string().replace('\n', " | ")),
    }
    Ok(())
}

ranks_test!(tampering_by_a_host_between_is_noticed_on_links, 4, { reduce_through_the_relay()? }, |ranks| {
    let Some(hosts) = Hosts::with_one_between()? else { return Ok(()) };
    for (case, (security, tampering)) in LINKS.into_iter().enumerate() {
        let variables = [("DRUMLINE_LINK_SECURITY", security), ("DRUMLINE_TRANSPORT", "tcp")];
        let verdicts = verdicts(&ranks.clone().env(variables), &hosts, case, &[1, 2], tampering)?;
        let what = || format!("{security} and {tampering:?}: {verdicts:#?}");
        let expected = |verdict: &String| match (security, tampering) {
            ("none", _) => verdict.contains("all right"),
            (_, Tampering::Nothing) => verdict.contains("all right: true"),
            _ => verdict.contains("does not prove its origin") && verdict.contains("rank "),
        };
        ensure!(verdicts.iter().all(expected), "{}", what());
        ensure!(security != "none" || verdicts.iter().any(|verdict| verdict.contains("false")), "{}", what());
    }
});

/// Rank 0 hosts a store, rank 1 uses it over two connections; the third process is the relay.
fn use_the_store_through_the_relay() -> Result<()> {
    let (tampering, _) = FRAMES[variable(CASE)?];
    let port = variable(worker_env::MASTER_PORT)?;
    let (address, key) = (format!("{HOST_0}:{port}"), JobKey::from_env()?);
    match variable(worker_env::RANK)? {
        0 => {
            let _server = TcpStoreServer::bind(&address, &key, ServerOptions::default())?;
            std::thread::sleep(SOON);
        }
        1 => match set_again_and_again(&address, &key, tampering) {
            Ok(()) => println!("verdict: all went well"),
            Err(error) => println!("verdict: {error}"),
        },
        _ => be_the_relay(tampering, Tampering::Nothing)?,
    }
    Ok(())
}

fn set_again_and_again(address: &str, key: &JobKey, tampering: Tampering) -> Result<()> {
    let connect = || TcpStore::connect(address, key, Hello::new(Role::Store), Instant::now() + SOON);
    if matches!(tampering, Tampering::Reorder(..)) {
        // The relay listens now.
        drop(connect()?);
        return send_at_once(address, key);
    }
    let stores = [connect()?, connect()?];
    for _ in 0..4 {
        stores.iter().try_for_each(|store| store.call(request(), None).map(drop))?;
        // A frame that comes twice is noticed in the next call.
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A client sends a request when it has the reply to the one before, so its frames cannot be reordered. This one does not wait.
fn send_at_once(address: &str, key: &JobKey) -> Result<()> {
    let mut stream = TcpStream::connect(address)?;
    let hello = Hello::new(Role::Store).note(&ClientNumber::random().note(Line::Calls));
    let session = handshake::connect(&mut stream, key, &hello, Instant::now() + SOON)?;
    let (mut sealer, mut bytes, mut reply) = (Sealer::new(session.outgoing()), Vec::new(), Vec::new());
    for id in 1..=4 {
        sealer.seal(&mut bytes, |out| encode_call(id, id, &Call::Request(request()), out));
    }
    ensure!(bytes.len() == 4 * FRAME, "a frame has {} bytes, not {FRAME}", bytes.len() / 4);
    stream.write_all(&bytes)?;
    match stream.read_to_end(&mut reply) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => return Err(error.into()),
        _ => {}
    }
    Err(anyhow!("the server closed it after {}", String::from_utf8_lossy(&reply).escape_default()))
}

ranks_test!(
    tampering_by_a_host_between_is_noticed_in_frames,
    3,
    { use_the_store_through_the_relay()? },
    |ranks| {
        let Some(hosts) = Hosts::with_one_between()? else { return Ok(()) };
        for (case, (tampering, expected)) in FRAMES.into_iter().enumerate() {
            let verdicts = verdicts(&ranks, &hosts, case, &[1], tampering)?;
            ensure!(verdicts[0].contains(expected), "{tampering:?}: {verdicts:?}");
        }
    }
);
