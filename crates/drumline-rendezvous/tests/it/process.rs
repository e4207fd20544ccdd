//! A store's server in a process of its own, so that its memory and descriptors can be counted from outside.

use crate::{Job, after};
use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, TcpStore, TcpStoreServer};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

const CHILD: &str = "DRUMLINE_TEST_SERVER";

/// Not a test by itself: the body of the server process. Ends when its standard input does.
#[test]
fn server_process() {
    let Ok(key) = std::env::var(CHILD) else { return };
    let key = JobKey::from_hex(&key).unwrap();
    let server = TcpStoreServer::bind("127.0.0.1:0", &key, ServerOptions::default()).unwrap();
    println!("\nlistening {}", server.local_addr());
    let _ = std::io::stdin().read(&mut [0]);
}

/// The server process, seen from outside; ended when dropped.
pub(crate) struct ServerProcess {
    pub(crate) key: JobKey,
    pub(crate) addr: String,
    child: Child,
}

impl ServerProcess {
    pub(crate) fn start() -> ServerProcess {
        let key = JobKey::random();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::server_process", "--nocapture"])
            .env(CHILD, key.to_hex().as_str())
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

    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
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
