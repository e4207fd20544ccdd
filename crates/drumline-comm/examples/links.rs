//! What the protection of links costs: all-reduces of two processes over TCP, plain, authenticated and encrypted, with each
//! result checked.
//!
//! ```text
//!   this program ──stdin: bytes, span──▶ two ranks with `none`  ┐ one pair at a time measures,
//!                ◀─────stdout: times──── two ranks with `mac`   │ the others wait for a line
//!                                        two ranks with `aead`  ┘
//! ```
//! The pairs take turns, so that all see the same machine. The ranks are on one machine (`loopback`), on two hosts in network
//! namespaces (`hosts`), or on two such hosts whose cable carries 10 Gbit/s (`10gbit`). Hosts need root and `ip`.
//!
//! `cargo run --release -p drumline-comm --example links -- [TURNS [PLACE …]]`

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use drumline_comm::{LinkSecurity, ProcessGroup, ReduceOp};
use drumline_rendezvous::{JobKey, worker_env};
use rank_test::anyhow::{Context, Result, bail, ensure};
use rank_test::netns::Hosts;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const SIZES: [usize; 5] = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

const MODES: [LinkSecurity; 3] = [LinkSecurity::None, LinkSecurity::Mac, LinkSecurity::Aead];

/// How long one pair measures before it is the next one's turn.
const SPAN: Duration = Duration::from_millis(300);

/// Calls at the begin of each turn that do not count.
const WARM_UP: usize = 3;

fn main() -> Result<()> {
    if std::env::var_os(worker_env::RANK).is_some() {
        return be_a_rank();
    }
    let mut args = std::env::args().skip(1);
    let turns: usize = args.next().map_or(Ok(10), |text| text.parse())?;
    let places: Vec<String> = args.collect();
    let places =
        if places.is_empty() { ["loopback", "hosts", "10gbit"].map(String::from).to_vec() } else { places };
    places.iter().try_for_each(|name| compare(name, turns))
}

/// A rank measures whenever a line asks for it. Rank 0 prints the times in nanoseconds.
fn be_a_rank() -> Result<()> {
    stay_on_one_core(std::env::var(worker_env::RANK)?.parse()?)?;
    let group = ProcessGroup::from_env()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let [bytes, span] = numbers::<u64>(&line)?[..] else { bail!("`{line}` is no order") };
        let times = all_reduces(&group, bytes as usize, Duration::from_millis(span))?;
        if group.rank() == 0 {
            println!("{}", times.iter().map(u64::to_string).collect::<Vec<_>>().join(" "));
        }
    }
    Ok(())
}

/// Each rank has its own core: on a busy machine the scheduler may put both on one.
fn stay_on_one_core(rank: usize) -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    let core =
        (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).nth(rank).context("too few cores")?;
    let mut own = CpuSet::new();
    own.set(core);
    Ok(sched_setaffinity(None, &own)?)
}

fn all_reduces(group: &ProcessGroup, bytes: usize, span: Duration) -> Result<Vec<u64>> {
    let input: Vec<f32> = (0..bytes / 4).map(|i| (i % 97 + group.rank()) as f32).collect();
    let sum: Vec<f32> = (0..bytes / 4).map(|i| (2 * (i % 97) + 1) as f32).collect();
    let (mut data, mut times, mut may_continue) = (input.clone(), Vec::new(), [true]);
    let begin = Instant::now();
    while may_continue[0] {
        data.copy_from_slice(&input);
        group.barrier()?;
        let start = Instant::now();
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        times.push(start.elapsed().as_nanos() as u64);
        ensure!(data == sum, "a wrong sum of {bytes} bytes");
        may_continue[0] = begin.elapsed() < span || times.len() < 2 * WARM_UP;
        group.broadcast(&mut may_continue, 0)?;
    }
    Ok(times.split_off(WARM_UP))
}

/// Prints the table of one place.
fn compare(place: &str, turns: usize) -> Result<()> {
    let hosts = match place {
        "loopback" => None,
        "hosts" | "10gbit" => match Hosts::new(2)? {
            Some(hosts) => Some(hosts),
            None => return Ok(()),
        },
        _ => bail!("no place `{place}`; try loopback, hosts or 10gbit"),
    };
    if let Some(hosts) = hosts.as_ref().filter(|_| place == "10gbit") {
        (0..2).try_for_each(|host| slow_down(hosts, host))?;
    }
    let key = std::env::temp_dir().join(format!("drumline-links-{}", std::process::id()));
    JobKey::new_file(&key)?;
    let pairs = MODES.iter().map(|mode| Pair::start(*mode, hosts.as_ref(), &key)).collect::<Result<Vec<_>>>();
    let outcome = pairs.and_then(|mut pairs| print_table(place, turns, &mut pairs));
    std::fs::remove_file(&key)?;
    outcome
}

/// Limits what a host sends to 10 Gbit/s.
fn slow_down(hosts: &Hosts, host: usize) -> Result<()> {
    let limit =
        ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "10gbit", "burst", "2mb", "latency", "20ms"];
    let status = hosts.command(host, "tc").args(limit).status()?;
    ensure!(status.success(), "`tc` failed");
    Ok(())
}

fn print_table(place: &str, turns: usize, pairs: &mut [Pair]) -> Result<()> {
    println!("\n{place}, load {}\n", load()?);
    println!("| bytes | none us | p90 | mac us | p90 | aead us | p90 | mac / none | aead / none |");
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for bytes in SIZES {
        let mut times = vec![Vec::new(); pairs.len()];
        for turn in 0..turns {
            for place in 0..pairs.len() {
                let mode = (turn + place) % pairs.len();
                times[mode].extend(pairs[mode].measure(bytes)?);
            }
        }
        times.iter_mut().for_each(|times| times.sort_unstable());
        let at = |mode: usize, percent: usize| times[mode][times[mode].len() * percent / 100] as f64 / 1e3;
        let columns: String =
            (0..3).map(|mode| format!(" {:.1} | {:.1} |", at(mode, 50), at(mode, 90))).collect();
        let rate = |mode: usize| at(0, 50) / at(mode, 50);
        println!("| {bytes} |{columns} {:.2} | {:.2} |", rate(1), rate(2));
    }
    println!("\nload afterwards {}", load()?);
    Ok(())
}

/// The load average of the last minute.
fn load() -> Result<String> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().into())
}

/// Two ranks.
struct Pair {
    ranks: Vec<Child>,
    orders: Vec<ChildStdin>,
    times: BufReader<ChildStdout>,
}

impl Pair {
    fn start(mode: LinkSecurity, hosts: Option<&Hosts>, key: &Path) -> Result<Self> {
        let address = hosts.map_or("127.0.0.1".into(), |hosts| hosts.address(0).to_string());
        let port = match hosts {
            Some(_) => 20_000 + mode as u16,
            None => TcpListener::bind("127.0.0.1:0")?.local_addr()?.port(),
        };
        let mut ranks = Vec::new();
        for rank in 0..2 {
            let program = std::env::current_exe()?;
            let program = program.to_str().context("this program's path is no text")?;
            let mut command =
                hosts.map_or_else(|| Command::new(program), |hosts| hosts.command(rank, program));
            let (local_rank, local_size) = if hosts.is_some() { (0, 1) } else { (rank, 2) };
            let variables = [
                (worker_env::RANK, rank.to_string()),
                (worker_env::WORLD_SIZE, "2".into()),
                (worker_env::LOCAL_RANK, local_rank.to_string()),
                (worker_env::LOCAL_WORLD_SIZE, local_size.to_string()),
                (worker_env::MASTER_ADDR, address.clone()),
                (worker_env::MASTER_PORT, port.to_string()),
                (worker_env::DRUMLINE_TRANSPORT, "tcp".into()),
                (worker_env::DRUMLINE_LINK_SECURITY, mode.to_string()),
                (worker_env::DRUMLINE_JOB_KEY_FILE, key.display().to_string()),
            ];
            ranks.push(command.envs(variables).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
        }
        let orders = ranks.iter_mut().filter_map(|rank| rank.stdin.take()).collect();
        let times = BufReader::new(ranks[0].stdout.take().context("rank 0 has an output")?);
        let mut pair = Self { ranks, orders, times };
        // Makes the links.
        pair.measure(1 << 20)?;
        Ok(pair)
    }

    /// Times in nanoseconds of all-reduces of `bytes`.
    fn measure(&mut self, bytes: usize) -> Result<Vec<u64>> {
        for orders in &mut self.orders {
            writeln!(orders, "{bytes} {}", SPAN.as_millis())?;
        }
        let mut line = String::new();
        self.times.read_line(&mut line)?;
        numbers(&line)
    }
}

/// The ranks end with the input that they wait for.
impl Drop for Pair {
    fn drop(&mut self) {
        self.orders.clear();
        self.ranks.iter_mut().for_each(|rank| drop(rank.wait()));
    }
}

fn numbers<N: FromStr<Err: std::error::Error + Send + Sync + 'static>>(line: &str) -> Result<Vec<N>> {
    line.split_whitespace().map(|word| word.parse().with_context(|| format!("`{line}`"))).collect()
}
