//! Finds what a job leaves behind: processes, the sockets they hold, names in /dev/shm.
//!
//! A process belongs to the job if it has the job's mark in its environment, or is in the session of one of its ranks
//! (each rank leads one). Sockets, memfds and mappings end with the last process that holds them, so they are listed
//! with the process. Only a name in /dev/shm can outlive them all.
//!
//! Every run of [`Ranks`](crate::Ranks) is checked like this; [`Watch`] is for tests that start processes themselves.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The variable that marks the processes of a job.
pub const MARK: &str = "RANK_TEST_MARK";

/// Names in /dev/shm that contain this are ours.
const OUR_NAME: &str = "drumline";

/// Something that should be gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leftover {
    /// A process, with the listening and the abstract unix sockets it holds.
    Process {
        /// Its process id.
        pid: u32,
        /// Its command line.
        command: String,
        /// Addresses it listens on, and abstract names.
        sockets: Vec<String>,
    },
    /// A file in /dev/shm.
    SharedMemory {
        /// Its name.
        name: String,
    },
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leftover::Process { pid, command, sockets } => write!(f, "process {pid} `{command}` {sockets:?}"),
            Leftover::SharedMemory { name } => write!(f, "/dev/shm/{name}"),
        }
    }
}

/// Looks for what a job leaves behind. Create it before the job.
#[derive(Debug, Clone)]
pub struct Watch {
    mark: String,
    sessions: Vec<u32>,
    shm_before: BTreeSet<String>,
}

impl Default for Watch {
    fn default() -> Self {
        Self::new()
    }
}

impl Watch {
    /// A watch with its own mark.
    pub fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", std::process::id());
        Self { mark, sessions: Vec::new(), shm_before: our_shared_memory() }
    }

    /// The variable that each process of the job must have, and its value.
    pub fn mark(&self) -> (&'static str, &str) {
        (MARK, &self.mark)
    }

    /// Also counts every process in the session led by `pid` as part of the job.
    pub fn add_session(&mut self, pid: u32) {
        self.sessions.push(pid);
    }

    /// What exists at this moment.
    pub fn now(&self) -> Vec<Leftover> {
        let processes = pids().filter(|pid| self.is_ours(*pid)).map(|pid| {
            let command = read(pid, "cmdline").replace('\0', " ").trim_end().to_string();
            Leftover::Process { pid, command, sockets: sockets(pid) }
        });
        let new = our_shared_memory().difference(&self.shm_before).cloned().collect::<Vec<_>>();
        processes.chain(new.into_iter().map(|name| Leftover::SharedMemory { name })).collect()
    }

    /// Waits until nothing is left; an error that lists what still exists after `within`.
    pub fn none_within(&self, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let left = self.now();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let list: Vec<_> = left.iter().map(Leftover::to_string).collect();
                bail!("left behind {within:?} after the end:\n  {}", list.join("\n  "));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A zombie counts only if it is our own child: other zombies wait for another parent.
    fn is_ours(&self, pid: u32) -> bool {
        let Some(stat) = Stat::of(pid) else { return false };
        if stat.state == "Z" && stat.parent != std::process::id() {
            return false;
        }
        let mark = format!("{MARK}={}", self.mark);
        self.sessions.contains(&stat.session) || read(pid, "environ").split('\0').any(|entry| entry == mark)
    }
}

/// The fields of /proc/PID/stat that matter here.
struct Stat {
    state: String,
    parent: u32,
    session: u32,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        let stat = read(pid, "stat");
        // The name, in parentheses, may contain anything; the fields after it are plain: state, parent, group, session.
        let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let number = |index: usize| fields.get(index)?.parse().ok();
        Some(Self { state: fields.first()?.to_string(), parent: number(1)?, session: number(3)? })
    }
}

/// Whether a process is stopped by SIGSTOP.
pub(crate) fn is_stopped(pid: u32) -> bool {
    Stat::of(pid).is_some_and(|stat| stat.state == "T")
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A file of /proc/PID; empty if it is gone or not readable for us.
fn read(pid: u32, file: &str) -> String {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn our_shared_memory() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(OUR_NAME)).collect()
}

/// The listening TCP sockets and abstract unix sockets that a process holds, as its own network namespace lists them.
fn sockets(pid: u32) -> Vec<String> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    let held: BTreeSet<String> = links
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string()))
        .collect();
    let tcp = ["net/tcp", "net/tcp6"].map(|table| listening(&read(pid, table))).concat();
    let all = tcp.into_iter().chain(abstract_names(&read(pid, "net/unix")));
    all.filter(|(inode, _)| held.contains(inode)).map(|(_, name)| name).collect()
}

/// (inode, "tcp port N") of each listening socket in a table in the format of /proc/net/tcp.
pub(crate) fn listening(table: &str) -> Vec<(String, String)> {
    const LISTEN: &str = "0A";
    let line = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let port = u16::from_str_radix(fields.get(1)?.rsplit_once(':')?.1, 16).ok()?;
        (*fields.get(3)? == LISTEN).then_some((fields.get(9)?.to_string(), format!("tcp port {port}")))
    };
    table.lines().filter_map(line).collect()
}

/// (inode, "@name") of each abstract socket in a table in the format of /proc/net/unix.
fn abstract_names(table: &str) -> Vec<(String, String)> {
    let line = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields
            .get(7)
            .filter(|name| name.starts_with('@'))
            .map(|name| (fields[6].to_string(), name.to_string()))
    };
    table.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::process::Command;

    #[test]
    fn a_marked_process_is_found_until_it_ends() {
        let watch = Watch::new();
        assert_eq!(watch.now(), []);
        let (name, mark) = watch.mark();
        let mut child = Command::new("sleep").arg("60").env(name, mark).spawn().unwrap();
        // During exec its environment cannot be read.
        let start = Instant::now();
        while watch.now().is_empty() && start.elapsed() < Duration::from_secs(10) {}
        let found = watch.none_within(Duration::from_millis(50));
        child.kill().unwrap();
        child.wait().unwrap();
        let error = found.unwrap_err().to_string();
        assert!(error.contains(&format!("process {} `sleep 60`", child.id())), "{error}");
        watch.none_within(Duration::from_secs(1)).unwrap();
        a_name_in_shared_memory_outlives_its_creator(&watch);
    }

    // Part of the test above, because tests run in parallel and all see the machine's /dev/shm.
    fn a_name_in_shared_memory_outlives_its_creator(watch: &Watch) {
        let path = format!("/dev/shm/drumline-leftover-test-{}", std::process::id());
        fs::write(&path, b"x").unwrap();
        let error = watch.none_within(Duration::ZERO).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert!(error.contains(&path), "{error}");
        watch.none_within(Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn own_listening_and_abstract_sockets_are_seen() {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixListener};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("rank-test-{}", std::process::id());
        let unix = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let held = sockets(std::process::id());
        let port = format!("tcp port {}", listener.local_addr().unwrap().port());
        assert!(held.contains(&port) && held.contains(&format!("@{name}")), "{held:?}");
        drop((listener, unix));
        assert!(!sockets(std::process::id()).contains(&format!("@{name}")));
    }
}
