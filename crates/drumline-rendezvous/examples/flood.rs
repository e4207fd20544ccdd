//! Measures how long eight ranks take to join while other processes flood the store's port.
//!
//! ```text
//!  flood --kind silent --strangers 8 --seconds 10 ──┬─▶ process `server`: TcpStoreServer
//!                                                   ├─▶ processes `strangers`: connect as fast as they can
//!                                                   └─▶ this process: 8 ranks join, set, wait, leave; repeatedly
//! ```
//! Kinds: `silent` (connections that send nothing and stay open), `noise` (64 bytes and closed). Without strangers it
//! is the control. Prints one JSON line: how often the ranks joined, and the shortest, median and longest time.

use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, Store, TcpStore, TcpStoreServer};
use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const RANKS: usize = 8;
/// How many connections each process of the flood keeps open.
const HELD: usize = 800;
/// Time limit for the ranks to join.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server"] => serve(),
        ["strangers", kind, addr] => flood(kind, addr),
        ["--kind", kind, "--strangers", strangers, "--seconds", seconds] => {
            measure(kind, strangers.parse()?, Duration::from_secs(seconds.parse()?))
        }
        _ => Err("usage: flood --kind silent|noise --strangers N --seconds N".into()),
    }
}

/// Reads the key from stdin, prints the address, and ends when stdin ends.
fn serve() -> Outcome<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let server = TcpStoreServer::bind("127.0.0.1:0", &JobKey::from_hex(&line)?, ServerOptions::default())?;
    println!("{}", server.local_addr());
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

/// Floods until it is killed.
fn flood(kind: &str, addr: &str) -> Outcome<()> {
    let addr = addr.parse()?;
    let mut held = VecDeque::new();
    loop {
        let Ok(mut stream) = TcpStream::connect_timeout(&addr, Duration::from_secs(1)) else { continue };
        if kind == "noise" {
            let _ = stream.write_all(&[0x5a; 64]);
            continue;
        }
        held.push_back(stream);
        if held.len() > HELD {
            held.pop_front();
        }
    }
}

/// Killed when dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(arguments: &[&str]) -> Outcome<Ended> {
    let mut command = Command::new(std::env::current_exe()?);
    Ok(Ended(command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
}

fn measure(kind: &str, strangers: usize, time: Duration) -> Outcome<()> {
    let key = JobKey::random();
    let mut server = start(&["server"])?;
    writeln!(server.0.stdin.as_mut().ok_or("no pipe")?, "{}", *key.to_hex())?;
    let mut addr = String::new();
    BufReader::new(server.0.stdout.take().ok_or("no pipe")?).read_line(&mut addr)?;
    let addr = addr.trim();
    let _strangers: Vec<_> =
        (0..strangers).map(|_| start(&["strangers", kind, addr])).collect::<Outcome<_>>()?;
    std::thread::sleep(Duration::from_secs(1));
    let (end, mut times) = (Instant::now() + time, Vec::new());
    while Instant::now() < end {
        times.push(join_all(addr, &key, times.len())?.as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let (first, middle, last) = (times[0], times[times.len() / 2], times[times.len() - 1]);
    println!(
        r#"{{"kind":"{kind}","strangers":{strangers},"ranks":{RANKS},"joined":{},"least_s":{first:.3},"median_s":{middle:.3},"longest_s":{last:.3}}}"#,
        times.len()
    );
    Ok(())
}

/// The time until all ranks have joined and know it.
fn join_all(addr: &str, key: &JobKey, turn: usize) -> Outcome<Duration> {
    let began = Instant::now();
    let rank = |rank: usize| -> Outcome<()> {
        let hello = Hello::new(Role::Store).member(rank, RANKS);
        let store = TcpStore::connect(addr, key, hello, began + LIMIT)?;
        let keys: Vec<String> = (0..RANKS).map(|rank| format!("{turn}/{rank}")).collect();
        store.set(&keys[rank], b"")?;
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        Ok(store.wait(&keys, began + LIMIT)?)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    })?;
    Ok(began.elapsed())
}
