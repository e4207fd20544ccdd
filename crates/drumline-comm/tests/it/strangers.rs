//! Strangers without the job's key, at the port where a rank listens for links: they change nothing and keep nobody out.

use std::io::{BufRead, BufReader, ErrorKind, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use drumline_comm::{GroupOptions, ProcessGroup, ReduceOp, Transport};
use drumline_rendezvous::handshake::{self, ClientHandshake, ClientStep, OPENING, Prover};
use drumline_rendezvous::{Hello, JobKey, Member, MemoryStore, Role, Store};

use crate::numbers::Random;
use crate::threads::{Result, within};

const RANKS: usize = 3;

/// A job over links. The test knows its store and its key.
#[derive(Clone)]
struct Job {
    store: MemoryStore,
    key: JobKey,
}

impl Job {
    fn new() -> Self {
        Self { store: MemoryStore::new(), key: JobKey::random() }
    }

    fn group(&self, rank: usize) -> Result<ProcessGroup> {
        let limit = Duration::from_secs(20);
        let member = Member::in_process(rank, RANKS, Arc::new(self.store.clone()), self.key.clone(), limit);
        let options = GroupOptions { transport: Transport::Tcp, timeout: limit, ..GroupOptions::default() };
        ProcessGroup::new(member, options)
    }

    /// The address on which a rank listens; waits until it does.
    fn address(&self, rank: usize) -> SocketAddr {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let keys = self.store.list("").unwrap();
            if let Some(key) = keys.iter().find(|key| key.ends_with(&format!("hub/{rank}"))) {
                let bytes = self.store.get(key, deadline).unwrap();
                return String::from_utf8(bytes).unwrap().parse().unwrap();
            }
            assert!(Instant::now() < deadline, "rank {rank} does not listen; the store has {keys:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs `body` on every rank while `disturb` is called again and again; returns how often it was called.
    fn disturbed(
        &self,
        body: impl Fn(&ProcessGroup) -> Result + Send + Sync + 'static,
        disturb: impl Fn(&Job, usize) + Send + Sync + 'static,
    ) -> usize {
        let job = self.clone();
        within(Duration::from_secs(60), move || {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let stranger = scope.spawn(|| {
                    let mut turns = 0;
                    while !done.load(Ordering::Acquire) {
                        disturb(&job, turns % RANKS);
                        turns += 1;
                    }
                    turns
                });
                let rank = |rank| {
                    let (job, body) = (&job, &body);
                    scope.spawn(move || job.group(rank).and_then(|group| body(&group)))
                };
                let ranks: Vec<_> = (0..RANKS).map(rank).collect();
                let outcomes: Vec<Result> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
                done.store(true, Ordering::Release);
                let turns = stranger.join().unwrap();
                for outcome in outcomes {
                    outcome.unwrap();
                }
                turns
            })
        })
    }
}

/// New groups, so that links are made all the time, and collectives on them.
fn make_links(group: &ProcessGroup) -> Result {
    for turn in 0..10 {
        let child = group.new_group(&[0, 1, 2])?.expect("all are in it");
        let mut data = vec![group.rank() as u64 + turn; 5_000];
        child.all_reduce(&mut data, ReduceOp::Sum)?;
        assert!(data.iter().all(|&x| x == 3 + 3 * turn));
    }
    Ok(())
}

fn dial(address: SocketAddr) -> Option<TcpStream> {
    // The job may have ended already.
    let stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    Some(stream)
}

/// What the other side sends until it closes the connection.
fn answer(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("not closed: {error}"),
    }
}

#[test]
fn noise_gets_no_answer_and_changes_nothing() {
    let mut tls = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    tls.resize(517, 0x5a);
    let mut magic = b"DRUMLINE\x01\x00".to_vec();
    magic.resize(400, 0xff);
    let mut random = Random::new(3);
    let noises: Vec<Vec<u8>> = vec![
        (0..4096).map(|_| random.next() as u8).collect(),
        b"GET / HTTP/1.1\r\nHost: rank\r\nAccept: */*\r\n\r\n".repeat(4),
        tls,
        magic,
        vec![0; OPENING],
    ];
    let job = Job::new();
    let turns = job.disturbed(make_links, move |job, rank| {
        for noise in &noises {
            let Some(mut stream) = dial(job.address(rank)) else { return };
            let _ = stream.write_all(noise);
            assert!(answer(&mut stream).is_empty());
        }
    });
    assert!(turns > 0);
}

#[test]
fn silent_and_slow_strangers_keep_nobody_out() {
    let job = Job::new();
    let begin = Instant::now();
    job.disturbed(
        |group| {
            group.barrier()?;
            // The strangers take all the room there is.
            std::thread::sleep(Duration::from_millis(200));
            make_links(group)
        },
        |job, rank| {
            let held: Vec<_> = (0..100).filter_map(|_| dial(job.address(rank))).collect();
            for byte in b"DRUM" {
                held.iter().for_each(|mut stream| drop(stream.write(&[*byte])));
                std::thread::sleep(Duration::from_millis(50));
            }
        },
    );
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

/// The note of a link of a group `x`, for collectives, in the first meeting and without protection.
fn note(from: usize, to: usize) -> Vec<u8> {
    let (channel, meeting, received) = ([1, 0, 0], 1u64.to_le_bytes(), [0; 8]);
    let ranks = [from as u32, to as u32].map(u32::to_le_bytes).concat();
    [&channel[..], &meeting, &received, &ranks, b"x"].concat()
}

#[test]
fn another_key_is_refused() {
    let job = Job::new();
    job.disturbed(make_links, |job, rank| {
        let Some(mut stream) = dial(job.address(rank)) else { return };
        let hello = Hello::new(Role::Link).member(0, RANKS).note(&note(0, rank));
        let soon = Instant::now() + Duration::from_secs(5);
        assert!(handshake::connect(&mut stream, &JobKey::random(), &hello, soon).is_err());
        assert!(answer(&mut stream).is_empty());
    });
}

/// A handshake by hand: all bytes the client sent, and the connection.
fn record(job: &Job, rank: usize, hello: &Hello) -> Option<(Vec<u8>, TcpStream)> {
    let mut stream = dial(job.address(rank))?;
    let mut client = ClientHandshake::new(&Prover::from(&job.key), hello).unwrap();
    let mut sent = client.opening().to_vec();
    stream.write_all(&sent).ok()?;
    let mut answer = vec![0; client.want()];
    stream.read_exact(&mut answer).ok()?;
    let ClientStep::Send(proof) = client.receive(&answer).unwrap() else { panic!("no proof was requested") };
    sent.extend_from_slice(&proof[..]);
    stream.write_all(&proof[..]).ok()?;
    Some((sent, stream))
}

#[test]
fn a_recorded_handshake_is_useless() {
    let job = Job::new();
    job.disturbed(make_links, |job, rank| {
        let hello = Hello::new(Role::Link).member(1, RANKS).note(&note(1, rank));
        let Some((recorded, mut stream)) = record(job, rank, &hello) else { return };
        // The control: the recorded handshake itself was accepted.
        let mut verdict = [9];
        if stream.read_exact(&mut verdict).is_err() {
            return;
        }
        assert_eq!(verdict, [0]);
        let Some(mut replay) = dial(job.address(rank)) else { return };
        let _ = replay.write_all(&recorded);
        assert!(answer(&mut replay).len() <= 64, "an answer to the opening, and no welcome");
    });
}

#[test]
fn the_right_key_in_the_wrong_round_role_or_place_is_refused_with_the_reason() {
    let job = Job::new();
    job.disturbed(make_links, |job, rank| {
        let elsewhere = (rank + 1) % RANKS;
        let [mut protected, mut another_meeting, mut resumed] = [(); 3].map(|()| note(1, rank));
        (protected[1], another_meeting[3], resumed[2]) = (2, 9, 1);
        let cases = [
            (Hello::new(Role::Link).member(1, RANKS).round(7), "round 7 met round 0"),
            (Hello::new(Role::Store).member(1, RANKS), "this is a rank, not the store"),
            (Hello::new(Role::Link).member(1, RANKS).note(&note(1, elsewhere)), "came in at rank"),
            (Hello::new(Role::Link).member(1, RANKS).note(&note(2, rank)), "made by rank 1"),
            (Hello::new(Role::Link).member(1, RANKS).note(&protected), "`aead`, rank"),
            (Hello::new(Role::Link).member(1, RANKS).note(&another_meeting), "meeting 9 met meeting 1"),
            (Hello::new(Role::Link).member(1, RANKS).note(&resumed), "has dropped the group"),
        ];
        for (hello, expected) in cases {
            let Some((_, mut stream)) = record(job, rank, &hello) else { return };
            let reason = String::from_utf8_lossy(&answer(&mut stream)).into_owned();
            assert!(reason.is_empty() || reason.contains(expected), "{reason:?}");
        }
    });
}

const CHILD: &str = "DRUMLINE_TEST_RANKS";

/// Not a test by itself: the body of a process with all ranks of a job, each with its own port for links. For each line on
/// standard input they make new groups, and it prints how long that took; at the end of the input it ends.
#[test]
fn ranks_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (job, turn, done) = (Job::new(), Barrier::new(RANKS + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (job, turn, done) = (&job, &turn, &done);
            scope.spawn(move || {
                let group = job.group(rank).unwrap();
                make_links(&group).unwrap();
                turn.wait();
                while {
                    turn.wait();
                    !done.load(Ordering::Acquire)
                } {
                    make_links(&group).unwrap();
                    turn.wait();
                }
            });
        }
        turn.wait();
        println!("\nlistening {}", job.address(0));
        for _ in std::io::stdin().lines().map_while(std::io::Result::ok) {
            let begin = Instant::now();
            turn.wait();
            turn.wait();
            println!("\nlinked {}", begin.elapsed().as_millis());
        }
        done.store(true, Ordering::Release);
        turn.wait();
    });
}

/// That process, seen from outside; ended when dropped.
struct Ranks {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Ranks {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "strangers::ranks_process", "--nocapture"])
            .env(CHILD, "yes")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, output }
    }

    /// The rest of the next line that begins with `prefix`.
    fn wait_for(&mut self, prefix: &str) -> String {
        self.output.find_map(|line| Some(line.unwrap().strip_prefix(prefix)?.trim().to_owned())).unwrap()
    }

    /// Makes the ranks make new groups; returns how long that took.
    fn link(&mut self) -> Duration {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        Duration::from_millis(self.wait_for("linked").parse().unwrap())
    }

    fn count(&self, what: &str) -> usize {
        std::fs::read_dir(format!("/proc/{}/{what}", self.child.id())).unwrap().count()
    }

    fn resident_kib(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_thousand_silent_strangers_cost_no_thread_and_at_most_four_kib_each() {
    within(Duration::from_secs(60), || {
        let mut ranks = Ranks::start();
        let address: SocketAddr = ranks.wait_for("listening").parse().unwrap();
        let alone = ranks.link();
        assert!(alone < Duration::from_secs(5), "control: no strangers, {alone:?}");
        let (threads, open, memory) = (ranks.count("task"), ranks.count("fd"), ranks.resident_kib());
        let silent: Vec<_> = (0..1000).map(|_| dial(address).unwrap()).collect();
        let deadline = Instant::now() + Duration::from_secs(4);
        while ranks.count("fd") < open + 256 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let (held, grown) = (ranks.count("fd") - open, ranks.resident_kib().saturating_sub(memory));
        // 256, and the one that is being refused at this moment.
        assert!((200..=257).contains(&held), "{held} of 1000 are held");
        assert!(grown <= 4 * held, "{grown} KiB for {held} strangers");
        assert_eq!(ranks.count("task"), threads);
        let among_strangers = ranks.link();
        assert!(among_strangers < Duration::from_secs(5), "{among_strangers:?}, alone {alone:?}");
        println!("{held} held, {grown} KiB; linked in {among_strangers:?}, alone in {alone:?}");
        drop(silent);
    });
}
