//! A store's server in a process of its own, so that its memory and descriptors can be counted from outside.

use crate::{Job, after};
use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, TcpStore, TcpStoreServer};
use rustix::process::{Pid, Resource, Rlimit, Signal, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const CHILD: &str = "DRUMLINE_TEST_SERVER";

/// Not a test itself: the body of the server process. A byte on its stdin ends the server, the end of stdin ends the
/// process.
#[test]
fn server_process() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let (key, limit) = order.split_once(' ').unwrap();
    if let Ok(limit) = limit.parse() {
        setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    }
    let key = JobKey::from_hex(key).unwrap();
    let server = TcpStoreServer::bind("127.0.0.1:0", &key, ServerOptions::default()).unwrap();
    println!("\nlistening {}", server.local_addr());
    let _ = std::io::stdin().read(&mut [0]);
    drop(server);
    let _ = std::io::stdin().read(&mut [0]);
}

/// The server process, seen from outside; killed when dropped.
pub(crate) struct ServerProcess {
    pub(crate) key: JobKey,
    pub(crate) addr: String,
    child: Child,
}

impl ServerProcess {
    pub(crate) fn start() -> ServerProcess {
        Self::with_descriptors("")
    }

    /// A server process with a limit of open files.
    pub(crate) fn with_descriptors(limit: &str) -> ServerProcess {
        let key = JobKey::random();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::server_process", "--nocapture"])
            .env(CHILD, format!("{} {limit}", *key.to_hex()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let addr = lines.find_map(|line| Some(line.strip_prefix("listening ")?.to_owned())).unwrap();
        ServerProcess { key, addr, child }
    }

    pub(crate) fn guest(&self) -> TcpStore {
        TcpStore::connect(&self.addr, &self.key, Hello::new(Role::Store), after(5000)).unwrap()
    }

    /// Drops the server; its process keeps running.
    pub(crate) fn drop_server(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }

    /// Freezes the process; the system still accepts connections and bytes for it.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// CPU time used so far.
    pub(crate) fn busy(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(1000 * ticks / rustix::param::clock_ticks_per_second())
    }

    pub(crate) fn num_threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    pub(crate) fn num_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Somewhere to connect to.
pub(crate) trait Server {
    fn key(&self) -> &JobKey;
    fn addr(&self) -> String;
}

impl Server for ServerProcess {
    fn key(&self) -> &JobKey {
        &self.key
    }

    fn addr(&self) -> String {
        self.addr.clone()
    }
}

impl Server for Job {
    fn key(&self) -> &JobKey {
        &self.key
    }

    fn addr(&self) -> String {
        self.server.local_addr().to_string()
    }
}
