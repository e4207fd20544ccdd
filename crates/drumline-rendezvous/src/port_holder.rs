//! Finds the process that uses a port. It is looked up after a bind failed, for the error's text only.
//!
//! ```text
//!   /proc/net/tcp{,6}: local address, state, owner, inode ─▶ conflicting socket ─┬▶ /proc/*/fd: its processes
//!   /proc/net/unix: name, inode ─▶ the claim on the port (port_claim.rs) ────────┘
//! ```
//!
//! The table shows all sockets of this network namespace. The descriptors of other users' processes, and of processes
//! in other containers, are not accessible. A socket that is bound and does not listen is in no table, unless its port
//! is claimed.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use crate::port_claim::claim_name;

/// Where the system lists its processes.
pub(crate) const PROC: &str = "/proc";

/// How many characters of a command line are shown.
const LONGEST_COMMAND: usize = 80;

/// The state of a listening socket in the table.
const LISTENS: &str = "0A";

/// The owner of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The first of the processes that have the socket open.
    Process { pid: u32, command: String, others: usize },
    /// Its processes are not visible. Their user is, unless there is only a claim.
    Hidden { uid: Option<u32> },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, .. } if *pid == std::process::id() => {
                write!(f, "this process itself (pid {pid}) has it")
            }
            Self::Process { pid, command, others: 0 } => write!(f, "pid {pid} ({command}) has it"),
            Self::Process { pid, command, others } => {
                write!(f, "pid {pid} ({command}) and {others} more have it")
            }
            Self::Hidden { uid: Some(uid) } if *uid != rustix::process::getuid().as_raw() => {
                write!(f, "a process of another user (uid {uid}) has it")
            }
            Self::Hidden { .. } => {
                f.write_str("a process that is not visible here, as in another container, has it")
            }
        }
    }
}

/// Describes the process that uses a port of this machine, on any address, such as
/// `pid 1234 (python3 train.py) has it`; `None` if the system shows no such process.
pub fn port_holder(port: u16) -> Option<String> {
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
    let proc = PROC.as_ref();
    holder_of(any, proc).or_else(|| claimant_of(port, proc)).map(|holder| holder.to_string())
}

/// The holder of a socket that conflicts with a bind to `addr`, from the files in `proc` (usually `/proc`).
pub(crate) fn holder_of(addr: SocketAddr, proc: &Path) -> Option<Holder> {
    let tables = ["net/tcp", "net/tcp6"].map(|name| fs::read_to_string(proc.join(name)).unwrap_or_default());
    let sockets = tables.iter().flat_map(|table| table.lines().filter_map(Socket::parse));
    let mut conflicting: Vec<_> = sockets.filter(|socket| socket.conflicts_with(addr)).collect();
    conflicting.sort_by_key(|socket| !socket.listens);
    let socket = conflicting.first()?;
    Some(holder_of_inode(socket.inode, Some(socket.uid), proc))
}

/// The process that has claimed `port` without listening yet.
fn claimant_of(port: u16, proc: &Path) -> Option<Holder> {
    let table = fs::read_to_string(proc.join("net/unix")).unwrap_or_default();
    // The columns are `address references protocol flags type state inode name`; abstract names begin with @.
    let name = format!("@{}", claim_name(port));
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let claim = lines.into_iter().find(|columns| columns.get(7) == Some(&name.as_str()))?;
    Some(holder_of_inode(claim[6].parse().ok()?, None, proc))
}

fn holder_of_inode(inode: u64, uid: Option<u32>, proc: &Path) -> Holder {
    let mut pids = processes_with(inode, proc);
    pids.sort_unstable();
    match pids.first() {
        Some(&pid) => Holder::Process { pid, command: command_of(pid, proc), others: pids.len() - 1 },
        None => Holder::Hidden { uid },
    }
}

/// A line of the table.
#[derive(Debug)]
struct Socket {
    local: SocketAddr,
    listens: bool,
    uid: u32,
    inode: u64,
}

impl Socket {
    /// Parses `sl local remote state queues timer retransmits uid timeout inode …`; `None` for the heading, and for a
    /// connection that has ended and has no owner any more.
    fn parse(line: &str) -> Option<Self> {
        let columns: Vec<_> = line.split_whitespace().collect();
        let inode = columns.get(9)?.parse().ok().filter(|inode| *inode != 0)?;
        let listens = columns[3] == LISTENS;
        Some(Self { local: address(columns[1])?, listens, uid: columns[7].parse().ok()?, inode })
    }

    fn conflicts_with(&self, addr: SocketAddr) -> bool {
        let held = self.local.ip().to_canonical();
        let wanted = addr.ip().to_canonical();
        let same = held == wanted || held.is_unspecified() || wanted.is_unspecified();
        self.local.port() == addr.port() && same
    }
}

/// Parses `0100007F:1F90`: the words of the address in this machine's byte order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words = (0..ip.len()).step_by(8).map(|at| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<_>>>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let v4 = <[u8; 4]>::try_from(&*bytes).map(|ip| IpAddr::from(Ipv4Addr::from(ip)));
    let v6 = || <[u8; 16]>::try_from(&*bytes).map(|ip| IpAddr::from(Ipv6Addr::from(ip)));
    Some(SocketAddr::new(v4.or_else(|_| v6()).ok()?, u16::from_str_radix(port, 16).ok()?))
}

/// The processes that have the socket open, as far as they are visible.
fn processes_with(inode: u64, proc: &Path) -> Vec<u32> {
    let target = format!("socket:[{inode}]");
    let is_it = |fd: fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == &*target);
    let has_it = |pid: &u32| {
        let open = fs::read_dir(proc.join(pid.to_string()).join("fd"));
        open.into_iter().flatten().flatten().any(is_it)
    };
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(has_it).collect()
}

/// The command line, safe to print, or the program's name if there is none.
fn command_of(pid: u32, proc: &Path) -> String {
    let read = |file: &str| fs::read(proc.join(pid.to_string()).join(file)).unwrap_or_default();
    let words = read("cmdline");
    let words = if words.is_empty() { read("comm") } else { words };
    let text = String::from_utf8_lossy(&words).replace('\0', " ");
    let shown: String = text.trim().chars().filter(|c| !c.is_control()).collect();
    match shown.char_indices().nth(LONGEST_COMMAND) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None if shown.is_empty() => "which has just ended".to_string(),
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

    #[test]
    fn a_listening_process_is_named_and_a_free_port_has_no_holder() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let own = holder_of(addr, PROC.as_ref()).unwrap().to_string();
        assert_eq!(own, format!("this process itself (pid {}) has it", std::process::id()));
        assert_eq!(port_holder(addr.port()), Some(own));
        let theirs = Stdio::from(OwnedFd::from(listener));
        let mut child = Ended(Command::new("sleep").arg("60").stdin(theirs).spawn().unwrap());
        let found = holder_of(addr, PROC.as_ref());
        let expected = Holder::Process { pid: child.0.id(), command: "sleep 60".to_string(), others: 0 };
        assert_eq!(found, Some(expected));
        child.0.kill().and_then(|()| child.0.wait()).unwrap();
        assert_eq!(holder_of(addr, PROC.as_ref()), None, "control: it is free now");
        assert_eq!(port_holder(addr.port()), None);
    }

    #[test]
    fn a_process_that_claims_a_port_is_its_holder() {
        let port = crate::free_port().unwrap();
        assert_eq!(port_holder(port), None, "control: no process has it");
        let claim = crate::PortClaim::take(port).unwrap();
        let own = format!("this process itself (pid {}) has it", std::process::id());
        assert_eq!(port_holder(port), Some(own));
        drop(claim);
        assert_eq!(port_holder(port), None, "control: it is free again");
    }

    #[test]
    fn a_claim_of_an_invisible_process_is_reported() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("net")).unwrap();
        let line = "0000000000000000: 00000002 00000000 00000000 0002 01 77";
        fs::write(proc.path().join("net/unix"), format!("{line}\n{line} @drumline/port/8080\n")).unwrap();
        let text = claimant_of(8080, proc.path()).unwrap().to_string();
        assert!(text.contains("is not visible here"), "{text}");
        assert_eq!(claimant_of(808, proc.path()), None, "control: another port");
        give(proc.path(), 123_456_789, b"drumline\0run\0");
        let text = claimant_of(8080, proc.path()).unwrap().to_string();
        assert_eq!(text, "pid 123456789 (drumline run) has it");
    }

    /// Ended when dropped.
    struct Ended(std::process::Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    /// A `/proc` with one listener on `local` that `uid` owns, in a table of this name.
    fn fake(table: &str, local: &str, uid: u32) -> tempfile::TempDir {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("net")).unwrap();
        let text = format!(
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: {local} 00000000:0000 01 00000000:00000000 00:00000000 00000000 0 0 55 1\n\
             1: {local} 00000000:0000 06 00000000:00000000 00:00000000 00000000 0 0 0 1\n\
             2: {local} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid} 0 77 1\n"
        );
        fs::write(proc.path().join("net").join(table), text).unwrap();
        proc
    }

    fn give(proc: &Path, pid: u32, cmdline: &[u8]) {
        let fd = proc.join(pid.to_string()).join("fd");
        fs::create_dir_all(&fd).unwrap();
        symlink("/dev/null", fd.join("0")).unwrap();
        symlink("socket:[77]", fd.join("3")).unwrap();
        fs::write(proc.join(pid.to_string()).join("cmdline"), cmdline).unwrap();
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn an_invisible_process_is_described_by_its_user() {
        let addr = "127.0.0.1:8080".parse().unwrap();
        let proc = fake("tcp", "0100007F:1F90", 4_000_000_000);
        let text = holder_of(addr, proc.path()).unwrap().to_string();
        assert_eq!(text, "a process of another user (uid 4000000000) has it");
        let ours = fake("tcp", "0100007F:1F90", rustix::process::getuid().as_raw());
        let text = holder_of(addr, ours.path()).unwrap().to_string();
        assert!(text.contains("another container"), "{text}");
        give(proc.path(), 123_456_789, b"python3\0train.py\0\x1b[2J\0");
        let text = holder_of(addr, proc.path()).unwrap().to_string();
        assert_eq!(text, "pid 123456789 (python3 train.py [2J) has it");
        give(proc.path(), 123_456_790, b"");
        let text = holder_of(addr, proc.path()).unwrap().to_string();
        assert_eq!(text, "pid 123456789 (python3 train.py [2J) and 1 more have it");
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn only_an_overlapping_address_conflicts() {
        let any6 = "00000000000000000000000000000000:1F90";
        let mapped = "0000000000000000FFFF00000100007F:1F90";
        for (table, local, wanted, found) in [
            ("tcp", "0100007F:1F90", "127.0.0.1:8080", true),
            ("tcp", "0100007F:1F90", "127.0.0.2:8080", false),
            ("tcp", "0100007F:1F90", "127.0.0.1:8081", false),
            ("tcp", "0100007F:1F90", "0.0.0.0:8080", true),
            ("tcp", "00000000:1F90", "127.0.0.1:8080", true),
            ("tcp6", any6, "127.0.0.1:8080", true),
            ("tcp6", mapped, "127.0.0.1:8080", true),
            ("tcp6", "00000000000000000000000001000000:1F90", "[::1]:8080", true),
            ("tcp6", "00000000000000000000000001000000:1F90", "[::2]:8080", false),
            ("tcp", "nonsense", "127.0.0.1:8080", false),
        ] {
            let proc = fake(table, local, 7);
            let holder = holder_of(wanted.parse().unwrap(), proc.path());
            assert_eq!(holder.is_some(), found, "{local} {wanted}");
        }
        assert_eq!(holder_of("127.0.0.1:1".parse().unwrap(), "/nowhere".as_ref()), None);
    }
}
