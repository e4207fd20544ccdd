//! What the protection of links costs: all-reduces of two ranks over TCP on this machine, plain, authenticated and
//! encrypted, next to a bare pair of sockets that moves as many bytes. They take turns, so that all see the same machine.
//!
//! `cargo run --release -p drumline-comm --example links -- [TURNS]`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use drumline_comm::{CommError, GroupOptions, LinkSecurity, LocalGroup, ReduceOp, Transport};

const SIZES: [usize; 5] = [16, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// How long one measurement may take.
const UNIT: Duration = Duration::from_millis(300);

/// The median time of one all-reduce of `bytes`.
fn all_reduce(security: LinkSecurity, bytes: usize) -> Result<f64, CommError> {
    let options =
        GroupOptions { transport: Transport::Tcp, link_security: Some(security), ..GroupOptions::default() };
    let times = LocalGroup::run_with(2, &options, |group| {
        let mut data = vec![1f32; bytes / 4];
        let mut times = Vec::new();
        let begin = Instant::now();
        let mut may_continue = [true];
        while may_continue[0] {
            data.fill(1.0);
            group.barrier()?;
            let start = Instant::now();
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            times.push(start.elapsed().as_secs_f64());
            may_continue[0] = begin.elapsed() < UNIT;
            group.broadcast(&mut may_continue, 0)?;
        }
        Ok(times)
    })?;
    Ok(median(times.into_iter().flatten().collect()))
}

/// The median time in which two sockets, each written to and read at once, exchange `bytes` each way.
fn sockets(bytes: usize) -> std::io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    let exchange = |stream: &TcpStream, count: usize| -> std::io::Result<Vec<f64>> {
        stream.set_nodelay(true)?;
        let (out, mut into) = (vec![1u8; bytes], vec![0u8; bytes]);
        let mut times = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            std::thread::scope(|scope| {
                if bytes <= 64 << 10 {
                    (&mut &*stream).write_all(&out)?;
                    return (&mut &*stream).read_exact(&mut into);
                }
                let writer = scope.spawn(|| (&mut &*stream).write_all(&out));
                (&mut &*stream).read_exact(&mut into)?;
                writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(times)
    };
    let count = (64 << 20 >> 3) / bytes.max(16 << 10) + 3;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| exchange(&far, count));
        let times = exchange(&near, count)?;
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(median(times))
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let turns: usize = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    let modes = [LinkSecurity::None, LinkSecurity::Mac, LinkSecurity::Aead];
    println!("| bytes | sockets us | none us | mac us | aead us | mac / none | aead / none |");
    println!("|---:|---:|---:|---:|---:|---:|---:|");
    for bytes in SIZES {
        let mut times = vec![Vec::new(); 4];
        for _ in 0..turns {
            times[0].push(sockets(bytes)?);
            for (row, mode) in times[1..].iter_mut().zip(modes) {
                row.push(all_reduce(mode, bytes)?);
            }
        }
        let [sockets, none, mac, aead] = [0, 1, 2, 3].map(|row| 1e6 * median(times[row].clone()));
        let (mac_rate, aead_rate) = (none / mac, none / aead);
        println!(
            "| {bytes} | {sockets:.1} | {none:.1} | {mac:.1} | {aead:.1} | {mac_rate:.2} | {aead_rate:.2} |"
        );
    }
    Ok(())
}
