//! What a host has, read from the system. `findings` judges it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use drumline_launch::placing::cpus_of_the_machine;
use drumline_launch::{OomSources, OomWatch};
use drumline_rendezvous::{port_holder, worker_env};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

/// How long resolving a name may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The port at which `drumline run` and torchrun meet by default.
const DEFAULT_PORT: u16 = 29_500;

/// One host, as the rank on it sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Host {
    pub(super) rank: usize,
    pub(super) name: String,
    /// Equal for ranks that can share memory.
    pub(super) machine: String,
    pub(super) drumline: String,
    pub(super) kernel: String,
    pub(super) cores: Cores,
    pub(super) memory: Memory,
    pub(super) shm: Option<Space>,
    pub(super) temporary: Option<Space>,
    pub(super) limits: Limits,
    pub(super) names: Vec<Name>,
    pub(super) ports: Ports,
    /// Seconds by which its clock is ahead of rank 0's, as far as the network lets one measure.
    pub(super) clock_ahead_s: Option<f64>,
    /// Hosts of the job whose names it cannot resolve.
    pub(super) unknown_hosts: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Cores {
    pub(super) machine: usize,
    /// By affinity. If a machine has several ranks, those of all of them.
    pub(super) allowed: Vec<usize>,
    /// Also limited by a cgroup's CPU quota.
    pub(super) usable: usize,
    /// The average number of processes that wanted a core, over a minute.
    pub(super) load: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) total: u64,
    pub(super) available: u64,
    /// The limit of the cgroup, if it has one, and what it uses.
    pub(super) limit: Option<u64>,
    pub(super) limit_used: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Space {
    pub(super) path: PathBuf,
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) is_writable: bool,
}

/// Soft limits; `None` is unlimited.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Limits {
    pub(super) open_files: Option<u64>,
    pub(super) open_files_hard: Option<u64>,
    pub(super) processes: Option<u64>,
    pub(super) address_space: Option<u64>,
    pub(super) locked_memory: Option<u64>,
    pub(super) file_size: Option<u64>,
}

/// A name, and the result of resolving it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Name {
    pub(super) name: String,
    /// Where it comes from, such as `MASTER_ADDR`.
    pub(super) given_by: String,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) error: Option<String>,
    pub(super) seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Ports {
    /// Why no port can be listened on, if none can.
    pub(super) error: Option<String>,
    /// Which process has the port at which jobs meet by default, if one has.
    pub(super) default_taken_by: Option<String>,
    /// The range from which the system takes ports of connections.
    pub(super) range: Option<(u16, u16)>,
}

impl Host {
    /// This host.
    pub(super) fn here() -> Self {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let master = std::env::var(worker_env::MASTER_ADDR).ok().filter(|name| !name.is_empty());
        let names = std::iter::once((name.clone(), "this host".to_owned()))
            .chain(master.map(|name| (name, worker_env::MASTER_ADDR.to_owned())));
        Self {
            rank: 0,
            machine: machine(&name),
            drumline: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cores: cores(),
            memory: memory(),
            shm: Space::of(Path::new("/dev/shm")),
            temporary: Space::of(&std::env::temp_dir()),
            limits: limits(),
            names: names.map(|(name, given_by)| resolve(name, given_by)).collect(),
            ports: ports(),
            clock_ahead_s: None,
            unknown_hosts: Vec::new(),
            name,
        }
    }
}

/// Identifies the machine as groups do: ranks in other network namespaces, or of other users, share no memory.
fn machine(name: &str) -> String {
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    format!("{name}/{}/{}/{user}", read("/proc/sys/kernel/random/boot_id"), network.display())
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn cores() -> Cores {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let load = read("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
    Cores { machine: cpus_of_the_machine().unwrap_or(usable), allowed: allowed(), usable, load }
}

/// The CPUs that this process may run on.
fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// A launcher may have bound each rank to its own cores: the ranks of a machine together may use the cores of all of them.
pub(super) fn share_cores(hosts: &mut [Host]) {
    for at in 0..hosts.len() {
        let same = hosts.iter().filter(|other| other.machine == hosts[at].machine);
        let (mut allowed, has_quota): (Vec<usize>, bool) =
            same.fold((Vec::new(), false), |(mut all, quota), host| {
                all.extend(&host.cores.allowed);
                (all, quota || host.cores.usable < host.cores.allowed.len())
            });
        allowed.sort_unstable();
        allowed.dedup();
        if !has_quota {
            hosts[at].cores.usable = allowed.len().max(1);
        }
        hosts[at].cores.allowed = allowed;
    }
}

fn memory() -> Memory {
    let text = read("/proc/meminfo");
    let limit = OomWatch::start(&OomSources::default()).memory_limit();
    Memory {
        total: kibibytes(&text, "MemTotal:"),
        available: kibibytes(&text, "MemAvailable:"),
        limit: limit.map(|(limit, _)| limit),
        limit_used: limit.map(|(_, used)| used),
    }
}

/// An entry of `/proc/meminfo`, in bytes.
fn kibibytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

impl Space {
    fn of(path: &Path) -> Option<Self> {
        let found = rustix::fs::statvfs(path).ok()?;
        let is_writable = rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
        let (total, free) = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize);
        Some(Self { path: path.to_owned(), total, free, is_writable })
    }
}

fn limits() -> Limits {
    let soft = |resource| getrlimit(resource).current;
    Limits {
        open_files: soft(Resource::Nofile),
        open_files_hard: getrlimit(Resource::Nofile).maximum,
        processes: soft(Resource::Nproc),
        address_space: soft(Resource::As),
        locked_memory: soft(Resource::Memlock),
        file_size: soft(Resource::Fsize),
    }
}

/// Resolves a name in a thread of its own. If the resolver does not answer in time, the thread is left behind.
fn resolve(name: String, given_by: String) -> Name {
    let (began, (answer, answered)) = (Instant::now(), channel());
    let asked = name.clone();
    let asking = std::thread::Builder::new().name("resolve".into()).spawn(move || {
        let found = (asked.as_str(), 0).to_socket_addrs();
        let _ = answer.send(found.map(|found| found.map(|addr| addr.ip()).collect::<Vec<_>>()));
    });
    let found = match asking {
        Err(error) => Err(error.to_string()),
        Ok(_) => match answered.recv_timeout(TIMEOUT) {
            Ok(found) => found.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer after {TIMEOUT:?}")),
        },
    };
    let (mut addresses, error) = found.map_or_else(|error| (Vec::new(), Some(error)), |found| (found, None));
    addresses.sort_unstable();
    addresses.dedup();
    Name { name, given_by, addresses, error, seconds: began.elapsed().as_secs_f64() }
}

/// The names that cannot be resolved here.
pub(super) fn unknown_among(names: &[String]) -> Vec<String> {
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| resolve(name.clone(), String::new()).error.is_some());
    names
}

fn ports() -> Ports {
    let any = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0));
    let default = SocketAddr::from((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT));
    let taken =
        TcpListener::bind(default).err().filter(|error| error.kind() == std::io::ErrorKind::AddrInUse);
    let range = read("/proc/sys/net/ipv4/ip_local_port_range");
    let mut range = range.split_whitespace().filter_map(|port| port.parse().ok());
    Ports {
        error: any.err().map(|error| error.to_string()),
        default_taken_by: taken
            .map(|_| port_holder(DEFAULT_PORT).unwrap_or_else(|| "another process".to_owned())),
        range: range.next().zip(range.next()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_found() {
        let host = Host::here();
        assert!(host.cores.usable >= 1 && host.cores.allowed.len() >= host.cores.usable, "{:?}", host.cores);
        assert!(
            host.memory.total > 1 << 20 && host.memory.available <= host.memory.total,
            "{:?}",
            host.memory
        );
        assert!(!host.name.is_empty() && host.names[0].name == host.name);
        assert!(host.temporary.is_some_and(|space| space.total > 0));
        assert!(host.ports.range.is_some_and(|(first, last)| first < last));
    }

    #[test]
    fn ranks_that_are_bound_to_cores_have_those_of_all() {
        let bound = |cpus: &[usize], usable| {
            let mut host = Host::here();
            (host.cores.allowed, host.cores.usable) = (cpus.to_vec(), usable);
            host
        };
        let cores = |hosts: &[Host]| {
            hosts.iter().map(|host| (host.cores.allowed.len(), host.cores.usable)).collect::<Vec<_>>()
        };
        let mut hosts = [bound(&[0], 1), bound(&[1], 1), bound(&[5], 1)];
        hosts[2].machine = "another".into();
        share_cores(&mut hosts);
        assert_eq!(cores(&hosts), [(2, 2), (2, 2), (1, 1)]);
        let mut quota = [bound(&[0, 1, 2, 3], 2), bound(&[0, 1, 2, 3], 2)];
        share_cores(&mut quota);
        assert_eq!(cores(&quota), [(4, 2), (4, 2)], "they share a cgroup's quota");
    }

    #[test]
    fn names_are_resolved_or_reported() {
        let known = resolve("localhost".into(), "a test".into());
        assert!(known.error.is_none() && known.addresses.iter().all(IpAddr::is_loopback), "{known:?}");
        let names = ["localhost", "no.such.host.invalid", "localhost"].map(str::to_owned);
        assert_eq!(unknown_among(&names), ["no.such.host.invalid"]);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       16303028 kB\nMemFree: 1 kB\nMemAvailable:    2 kB";
        assert_eq!((kibibytes(text, "MemTotal:"), kibibytes(text, "MemAvailable:")), (16303028 * 1024, 2048));
        assert_eq!(kibibytes(text, "SwapTotal:"), 0);
    }

    #[test]
    fn the_holder_of_the_port_is_found() {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT));
        // Another test, or program, may have it.
        let found = ports();
        assert!(found.default_taken_by.is_some() && found.error.is_none(), "{found:?}");
        drop(listener);
    }
}
