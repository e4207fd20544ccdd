//! Many simulated ranks join: full handshake, set, get of another rank's key, barrier.
//!
//! ```text
//!  meet --ranks 10000 ──┬─▶ process `server`: TcpStoreServer
//!                       └─▶ this process: one socket per rank, one event loop
//! ```
//! Prints one JSON line: `{"ranks":..,"connect_s":..,"total_s":..}`. Each run listens on its own loopback address, so
//! that ports of an earlier run do not conflict.

use drumline_rendezvous::frame::{Call, Frame, Opener, Sealer, encode_call};
use drumline_rendezvous::handshake::{ClientHandshake, ClientStep, Prover};
use drumline_rendezvous::{
    ClientNumber, Hello, JobKey, Line, Reply, Request, Role, ServerOptions, TcpStoreServer,
};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::error::Error;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server"] => serve(),
        ["--ranks", ranks] => meet(ranks.parse()?),
        _ => Err("usage: meet --ranks N".into()),
    }
}

/// Reads the key from stdin, prints the address, and ends when stdin ends.
fn serve() -> Outcome<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let [.., high, low] = std::process::id().to_be_bytes();
    let ip = Ipv4Addr::new(127, 1, high, low.clamp(1, 254));
    let server = TcpStoreServer::bind((ip, 0), &JobKey::from_hex(&line)?, ServerOptions::default())?;
    println!("{}", server.local_addr());
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

fn meet(num_ranks: usize) -> Outcome<()> {
    let key = JobKey::random();
    let mut server = Command::new(std::env::current_exe()?)
        .arg("server")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut to_server = server.stdin.take().ok_or("no pipe")?;
    writeln!(to_server, "{}", *key.to_hex())?;
    let mut addr = String::new();
    BufReader::new(server.stdout.take().ok_or("no pipe")?).read_line(&mut addr)?;
    let result = SimulatedRanks::new(&key, addr.trim().parse()?, num_ranks)?.run();
    drop(to_server);
    server.wait()?;
    let (connected, total) = result?;
    println!(
        r#"{{"ranks":{num_ranks},"connect_s":{:.3},"total_s":{:.3}}}"#,
        connected.as_secs_f64(),
        total.as_secs_f64()
    );
    Ok(())
}

/// All simulated ranks.
struct SimulatedRanks {
    poll: Poll,
    prover: Prover,
    addr: SocketAddr,
    ranks: Vec<Rank>,
    num_connected: usize,
    num_done: usize,
}

/// One simulated rank: its socket and its progress.
struct Rank {
    stream: TcpStream,
    /// `None` once admitted.
    handshake: Option<ClientHandshake>,
    /// Set once admitted.
    seals: Option<(Sealer, Opener)>,
    input: Vec<u8>,
    step: u64,
}

/// How many ranks start in one turn; all of them start without waiting for others, as real ranks do.
const START: usize = 32;

impl SimulatedRanks {
    fn new(key: &JobKey, addr: SocketAddr, num_ranks: usize) -> Outcome<SimulatedRanks> {
        let (poll, prover, ranks) = (Poll::new()?, Prover::from(key), Vec::with_capacity(num_ranks));
        Ok(SimulatedRanks { poll, prover, addr, ranks, num_connected: 0, num_done: 0 })
    }

    /// The time until all were admitted, and until all had passed the barrier.
    fn run(&mut self) -> Outcome<(Duration, Duration)> {
        let began = Instant::now();
        let mut connected = None;
        let mut events = Events::with_capacity(1024);
        let world_size = self.ranks.capacity();
        while self.num_done < world_size {
            for _ in 0..START.min(world_size - self.ranks.len()) {
                self.start(world_size)?;
            }
            let all_started = self.ranks.len() == world_size;
            let timeout = if all_started { Duration::from_secs(10) } else { Duration::ZERO };
            self.poll.poll(&mut events, Some(timeout))?;
            if events.is_empty() && all_started {
                return Err(format!("stuck: {} of {world_size} connected", self.num_connected).into());
            }
            for event in &events {
                self.advance(event.token().0, world_size)?;
            }
            if self.num_connected == world_size && connected.is_none() {
                connected = Some(began.elapsed());
            }
        }
        Ok((connected.unwrap_or_default(), began.elapsed()))
    }

    fn start(&mut self, world_size: usize) -> Outcome<()> {
        let rank = self.ranks.len();
        let note = ClientNumber::random().note(Line::Life);
        let hello = Hello::new(Role::Store).member(rank, world_size).note(&note);
        let handshake = Some(ClientHandshake::new(&self.prover, &hello)?);
        let mut stream = TcpStream::connect(self.addr)?;
        stream.set_nodelay(true)?;
        self.poll.registry().register(&mut stream, Token(rank), Interest::READABLE | Interest::WRITABLE)?;
        self.ranks.push(Rank { stream, handshake, seals: None, input: Vec::new(), step: 0 });
        Ok(())
    }

    fn advance(&mut self, index: usize, world_size: usize) -> Outcome<()> {
        let rank = &mut self.ranks[index];
        if rank.step == 0 {
            let Some(handshake) = &rank.handshake else { return Ok(()) };
            match rank.stream.write(handshake.opening()) {
                Ok(_) => rank.step = 1,
                Err(error) if error.kind() == ErrorKind::NotConnected => return Ok(()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            return Ok(());
        }
        rank.read()?;
        if rank.handshake.is_some() && rank.shake_hands()? {
            self.num_connected += 1;
            rank.ask(&Request::Set { key: format!("rank/{index}"), value: index.to_string().into() })?;
        }
        while let Some(reply) = rank.next_reply()? {
            self.num_done += usize::from(rank.next_step(reply, index, world_size)?);
        }
        Ok(())
    }
}

impl Rank {
    fn read(&mut self) -> Outcome<()> {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err("the server closed a connection".into()),
            Ok(len) => {
                self.input.extend_from_slice(&chunk[..len]);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// `true` when the server has admitted it.
    fn shake_hands(&mut self) -> Outcome<bool> {
        while let Some(handshake) = &mut self.handshake
            && self.input.len() >= handshake.want()
        {
            let bytes: Vec<u8> = self.input.drain(..handshake.want()).collect();
            match handshake.receive(&bytes)? {
                ClientStep::Send(proof) => self.stream.write_all(&proof[..])?,
                ClientStep::More => {}
                ClientStep::Welcome(session) => {
                    self.handshake = None;
                    self.seals = Some((Sealer::new(session.outgoing()), Opener::new(session.incoming())));
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn ask(&mut self, request: &Request) -> Outcome<()> {
        let (sealer, _) = self.seals.as_mut().ok_or("not admitted yet")?;
        let mut bytes = Vec::new();
        sealer.seal(&mut bytes, |out| {
            encode_call(self.step, self.step, &Call::Request(request.clone()), out);
        });
        self.step += 1;
        Ok(self.stream.write_all(&bytes)?)
    }

    fn next_reply(&mut self) -> Outcome<Option<Reply>> {
        let Some((_, opener)) = &mut self.seals else { return Ok(None) };
        let Some((message, used)) = opener.open(&self.input)? else { return Ok(None) };
        let reply = Frame::read(message)?.reply()?;
        self.input.drain(..used);
        Ok(Some(reply))
    }

    /// The sequence: set, get, add, wait (the last rank ends the barrier with a set instead). `true` when done.
    fn next_step(&mut self, reply: Reply, index: usize, world_size: usize) -> Outcome<bool> {
        let other = (index + world_size / 2 + 1) % world_size;
        let wait_for_all = Request::Wait { keys: vec!["barrier/all".into()] };
        match (self.step, reply) {
            (2, Reply::Done) => self.ask(&Request::Get { key: format!("rank/{other}") })?,
            (3, Reply::Bytes(value)) if value == other.to_string().as_bytes() => {
                self.ask(&Request::Add { key: "barrier".into(), delta: 1 })?;
            }
            (4, Reply::Number(count)) if count == world_size as i64 => {
                self.ask(&Request::Set { key: "barrier/all".into(), value: Vec::new() })?;
            }
            (4, Reply::Number(_)) => self.ask(&wait_for_all)?,
            (5, Reply::Done) => return Ok(true),
            (step, reply) => return Err(format!("rank {index}, step {step}: {reply:?}").into()),
        }
        Ok(false)
    }
}
