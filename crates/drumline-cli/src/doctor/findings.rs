//! What is wrong, as a pure function: from hosts and links to problems and hints, each with who has it and what to do.

use std::collections::BTreeMap;

use super::host::{Host, Name};
use super::links::{FailedPair, Link, LinkKind, Measured};

/// The number of files that a rank opens, alone and for each other rank.
const FILES: u64 = 64;
const FILES_OF_RANK: u64 = 4;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Everything that was found.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Findings {
    /// A job fails, or is far slower than it could be.
    pub(super) problems: Vec<String>,
    /// Worth knowing.
    pub(super) hints: Vec<String>,
}

/// One finding of one host.
#[derive(Debug, PartialEq)]
enum Finding {
    Problem(String),
    Hint(String),
}

use Finding::{Hint, Problem};

/// All findings; one that several hosts have appears once.
pub(super) fn findings(hosts: &[Host], measured: &Measured) -> Findings {
    // Ranks of one machine have the same findings.
    let firsts: Vec<&Host> = hosts
        .iter()
        .enumerate()
        .filter(|(at, host)| !hosts[..*at].iter().any(|other| other.machine == host.machine))
        .map(|(_, host)| host)
        .collect();
    let several = firsts.len() > 1;
    let mut by_text: BTreeMap<(bool, String), Vec<&str>> = BTreeMap::new();
    for host in &firsts {
        let ranks = hosts.iter().filter(|other| other.machine == host.machine).count();
        for finding in of_host(host, ranks, hosts.len(), several) {
            let key = match finding {
                Problem(text) => (false, text),
                Hint(text) => (true, text),
            };
            by_text.entry(key).or_default().push(&host.name);
        }
    }
    let mut found = Findings::default();
    for ((is_hint, text), who) in by_text {
        let who = match who.len() {
            _ if !several => String::new(),
            all if all == firsts.len() => "all hosts: ".to_owned(),
            _ => who.join(", ") + ": ",
        };
        if is_hint { &mut found.hints } else { &mut found.problems }.push(who + &text);
    }
    let failed = measured.failed.iter().map(|failed| of_failed(hosts, failed));
    for finding in failed.chain(of_links(hosts, &measured.links)).chain(of_versions(&firsts)) {
        match finding {
            Problem(text) => found.problems.push(text),
            Hint(text) => found.hints.push(text),
        }
    }
    found
}

fn of_host(host: &Host, ranks: usize, world: usize, several: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(of_cores(host, ranks));
    found.extend(of_memory(host, ranks));
    found.extend(of_limits(host, world));
    found.extend(host.names.iter().filter_map(|name| of_name(name, several)));
    if let Some(error) = &host.ports.error {
        found.push(Problem(format!(
            "no port can be listened on: {error}; try another network namespace, or look at its sandbox"
        )));
    }
    if let Some(holder) = &host.ports.default_taken_by {
        found.push(Hint(format!("port 29500, at which jobs of several nodes meet by default, is taken: {holder}; try --rdzv-endpoint HOST:PORT with another")));
    }
    if !host.unknown_hosts.is_empty() {
        let unknown = host.unknown_hosts.join(", ");
        found.push(Hint(format!("cannot resolve the names {unknown}; try addresses in hostfiles and MASTER_ADDR, or entries in /etc/hosts")));
    }
    let ahead = host.clock_ahead_s.unwrap_or(0.0);
    let clock = format!(
        "its clock is {} {:.1} s of rank 0's",
        if ahead < 0.0 { "behind by" } else { "ahead by" },
        ahead.abs()
    );
    match ahead.abs() {
        apart if apart > 5.0 => found.push(Problem(format!(
            "{clock}; try chrony or ntpd: logs and traces do not fit together, and certificates may fail"
        ))),
        apart if apart > 0.1 => {
            found.push(Hint(format!("{clock}; try chrony or ntpd, so that logs and traces fit together")))
        }
        _ => {}
    }
    found
}

fn of_cores(host: &Host, ranks: usize) -> Vec<Finding> {
    let cores = &host.cores;
    let mut found = Vec::new();
    if ranks > cores.usable {
        found.push(Problem(format!(
            "{ranks} ranks share {} of {} cores; try fewer ranks, or more cores for the job (Slurm: --cpus-per-task)",
            cores.usable, cores.machine
        )));
    }
    let allowed = cores.allowed.len();
    if cores.usable < allowed {
        found.push(Hint(format!("a cgroup gives the time of {} of {allowed} cores", cores.usable)));
    }
    if allowed < cores.machine {
        found.push(Hint(format!(
            "{allowed} of {} cores may be used (affinity: taskset, Slurm or a container)",
            cores.machine
        )));
    }
    // The doctor's own ranks are among them.
    let others = cores.load - ranks as f64;
    if others > cores.machine as f64 {
        found.push(Hint(format!(
            "busy: {:.0} processes on average want {} cores; try again when others are done",
            cores.load, cores.machine
        )));
    }
    found
}

fn of_memory(host: &Host, ranks: usize) -> Vec<Finding> {
    let memory = &host.memory;
    let mut found = Vec::new();
    let left = memory.limit.map(|limit| limit.saturating_sub(memory.limit_used.unwrap_or(0)));
    let usable = left.map_or(memory.available, |left| left.min(memory.available));
    let for_each = usable / ranks.max(1) as u64;
    if for_each < 512 * MIB {
        let limit =
            memory.limit.map_or(String::new(), |limit| format!(" (the cgroup's limit is {})", bytes(limit)));
        found.push(Problem(format!("{} of memory are left for each of {ranks} rank(s){limit}; try fewer ranks, or a job with more memory", bytes(for_each))));
    }
    match &host.shm {
        None => found.push(Problem("/dev/shm is missing; PyTorch's data loaders and NCCL need it; try mounting a tmpfs there".into())),
        Some(shm) if !shm.is_writable => found.push(Problem("/dev/shm cannot be written to; try mount -o remount,rw /dev/shm".into())),
        Some(shm) if shm.free < 32 * MIB => found.push(Problem(format!(
            "/dev/shm has {} free of {}; PyTorch's data loaders and NCCL fail there; try docker run --shm-size=8g, or removing old files",
            bytes(shm.free), bytes(shm.total)
        ))),
        Some(shm) if shm.total <= 64 * MIB => found.push(Hint(format!(
            "/dev/shm has {}, the default of containers; Drumline does not use it, PyTorch's data loaders and NCCL do; try docker run --shm-size=8g",
            bytes(shm.total)
        ))),
        Some(_) => {}
    }
    if let Some(temporary) = host.temporary.as_ref().filter(|space| space.free < 256 * MIB) {
        let path = temporary.path.display();
        found.push(Problem(format!("{path} has {} free; try TMPDIR on another disk", bytes(temporary.free))));
    }
    found
}

fn of_limits(host: &Host, world: usize) -> Vec<Finding> {
    let limits = &host.limits;
    let mut found = Vec::new();
    let needed = FILES + FILES_OF_RANK * world as u64;
    if let Some(files) = limits.open_files.filter(|files| *files < needed) {
        found.push(Problem(format!(
            "{files} open files are allowed, {needed} are needed for {world} ranks; try ulimit -n 65536"
        )));
    } else if let Some(files) = limits.open_files.filter(|files| *files < 1024) {
        found.push(Hint(format!(
            "{files} open files are allowed; try ulimit -n 65536 for data sets of many files"
        )));
    }
    if let Some(space) = limits.address_space {
        found.push(Problem(format!(
            "the address space is limited to {}; shared memory and CUDA reserve more than they use; try ulimit -v unlimited",
            bytes(space)
        )));
    }
    if let Some(size) = limits.file_size.filter(|size| *size < GIB) {
        found.push(Problem(format!(
            "files may have {}; checkpoints are larger; try ulimit -f unlimited",
            bytes(size)
        )));
    }
    if let Some(processes) = limits.processes.filter(|processes| *processes < 1024) {
        found.push(Hint(format!("{processes} processes and threads are allowed; try ulimit -u 4096")));
    }
    found
}

fn of_name(name: &Name, several: bool) -> Option<Finding> {
    let Name { name, given_by, addresses, error, seconds } = name;
    let is_master = given_by != "this host";
    if let Some(error) = error {
        let text = format!(
            "the name {name} ({given_by}) cannot be resolved: {error}; try an entry in /etc/hosts, or an address"
        );
        return Some(if is_master || several { Problem(text) } else { Hint(text) });
    }
    if *seconds > 1.0 {
        let text = format!(
            "the name {name} took {seconds:.1} s to resolve; try an entry in /etc/hosts, or look at /etc/resolv.conf"
        );
        return Some(Problem(text));
    }
    let is_loopback = !addresses.is_empty() && addresses.iter().all(std::net::IpAddr::is_loopback);
    (several && is_master && is_loopback).then(|| {
        let address = addresses[0];
        Problem(format!("{given_by}={name} is {address} here, which other hosts cannot reach; try its address in the network"))
    })
}

fn named(hosts: &[Host], rank: usize) -> String {
    format!("rank {rank} ({})", hosts.get(rank).map_or("?", |host| &host.name))
}

/// The problem of a pair that could not be measured.
fn of_failed(hosts: &[Host], failed: &FailedPair) -> Finding {
    let FailedPair { ranks: [a, b], kind, cause, num_left } = failed;
    let left = match num_left {
        0 => String::new(),
        1 => "; 1 more pair was not measured".to_owned(),
        several => format!("; {several} more pairs were not measured"),
    };
    Problem(format!(
        "between {} and {}, over {kind}, messages do not get through: {cause}; try looking at firewalls and routes between the two{left}",
        named(hosts, *a),
        named(hosts, *b)
    ))
}

/// The problems of links that change bytes, or are far slower than others of their kind.
fn of_links(hosts: &[Host], links: &[Link]) -> Vec<Finding> {
    let between =
        |link: &Link| format!("{} and {}", named(hosts, link.ranks[0]), named(hosts, link.ranks[1]));
    let mut found = Vec::new();
    for link in links.iter().filter(|link| link.wrong_bytes > 0) {
        let (bytes, kind) = (link.wrong_bytes, link.kind);
        found.push(Problem(format!(
            "between {}, over {kind}, {bytes} bytes arrived changed; try memtest, and another network card or cable", between(link)
        )));
    }
    for kind in [LinkKind::SharedMemory, LinkKind::Tcp] {
        let mut rates: Vec<f64> =
            links.iter().filter(|link| link.kind == kind).map(|link| link.gb_per_s).collect();
        rates.sort_by(f64::total_cmp);
        let Some(median) = rates.get(rates.len() / 2).copied() else { continue };
        for link in links.iter().filter(|link| link.kind == kind && link.gb_per_s * 4.0 < median) {
            let rate = link.gb_per_s;
            found.push(Problem(format!(
                "between {}, {kind} has {rate:.2} GB/s where most have {median:.2}; try looking at the hosts' load, cables and switches", between(link)
            )));
        }
        if kind == LinkKind::Tcp && median < 0.1 {
            found.push(Hint(format!(
                "TCP between ranks has {median:.3} GB/s, less than gigabit Ethernet; gradients of a large model take long: docs/ddp-hooks.md says how to send fewer bytes"
            )));
        }
    }
    found
}

fn of_versions(hosts: &[&Host]) -> Option<Finding> {
    let other = hosts.iter().find(|host| host.drumline != hosts[0].drumline)?;
    let (first, theirs, name) = (&hosts[0].drumline, &other.drumline, &other.name);
    Some(Problem(format!(
        "{name} has drumline {theirs}, rank 0 has {first}; try the same version on all hosts"
    )))
}

/// A number of bytes such as `1.5 GiB`.
pub(super) fn bytes(number: u64) -> String {
    match number {
        small if small < MIB => format!("{:.0} KiB", small as f64 / 1024.0),
        middle if middle < GIB => format!("{:.0} MiB", middle as f64 / MIB as f64),
        large => format!("{:.1} GiB", large as f64 / GIB as f64),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::host::{Cores, Limits, Memory, Ports, Space};
    use super::*;

    /// A host without any problem.
    pub(in super::super) fn healthy(rank: usize, name: &str) -> Host {
        let space = |path: &str| {
            Some(Space { path: path.into(), total: 16 * GIB, free: 15 * GIB, is_writable: true })
        };
        Host {
            rank,
            name: name.into(),
            machine: format!("{name}/boot"),
            drumline: "0.1.0".into(),
            kernel: "6.1".into(),
            cores: Cores { machine: 8, allowed: (0..8).collect(), usable: 8, load: 0.5 },
            memory: Memory { total: 32 * GIB, available: 30 * GIB, limit: None, limit_used: None },
            shm: space("/dev/shm"),
            temporary: space("/tmp"),
            limits: Limits {
                open_files: Some(65_536),
                open_files_hard: None,
                processes: None,
                address_space: None,
                locked_memory: None,
                file_size: None,
            },
            names: vec![Name {
                name: name.into(),
                given_by: "this host".into(),
                addresses: vec![[10, 0, 0, 7].into()],
                error: None,
                seconds: 0.01,
            }],
            ports: Ports { error: None, default_taken_by: None, range: Some((32768, 60999)) },
            clock_ahead_s: Some(0.001),
            unknown_hosts: Vec::new(),
        }
    }

    pub(in super::super) fn link(ranks: [usize; 2], kind: LinkKind, gb_per_s: f64) -> Link {
        Link { ranks, kind, latency_us: 20.0, gb_per_s, wrong_bytes: 0 }
    }

    fn of(links: &[Link]) -> Measured {
        Measured { links: links.to_vec(), failed: None }
    }

    /// One host, changed.
    fn one(change: impl Fn(&mut Host)) -> Findings {
        let mut host = healthy(0, "n1");
        change(&mut host);
        findings(&[host], &Measured::default())
    }

    #[test]
    fn a_healthy_host_has_no_findings() {
        assert_eq!(one(|_| ()), Findings::default());
        let links = [
            link([0, 1], LinkKind::Tcp, 1.1),
            link([0, 2], LinkKind::Tcp, 1.2),
            link([1, 2], LinkKind::SharedMemory, 9.0),
        ];
        assert_eq!(
            findings(&[healthy(0, "n1"), healthy(1, "n2"), healthy(2, "n2")], &of(&links)),
            Findings::default()
        );
    }

    #[test]
    fn each_lack_is_a_problem_that_says_what_to_do() {
        type Change = fn(&mut Host);
        let cases: [(Change, &str); 12] = [
            (|host| host.memory.available = 100 * MIB, "100 MiB of memory are left"),
            (
                |host| (host.memory.limit, host.memory.limit_used) = (Some(GIB), Some(GIB - 7 * MIB)),
                "7 MiB of memory are left for each of 1 rank(s) (the cgroup's limit is 1.0 GiB)",
            ),
            (|host| host.shm = None, "/dev/shm is missing"),
            (|host| host.shm.as_mut().unwrap().is_writable = false, "/dev/shm cannot be written"),
            (|host| host.shm.as_mut().unwrap().free = MIB, "/dev/shm has 1 MiB free of 16.0 GiB"),
            (|host| host.temporary.as_mut().unwrap().free = MIB, "/tmp has 1 MiB free"),
            (
                |host| host.limits.open_files = Some(64),
                "64 open files are allowed, 68 are needed for 1 ranks; try ulimit -n",
            ),
            (|host| host.limits.address_space = Some(4 * GIB), "limited to 4.0 GiB"),
            (|host| host.limits.file_size = Some(MIB), "files may have 1 MiB"),
            (|host| host.names[0].seconds = 3.0, "took 3.0 s to resolve"),
            (|host| host.ports.error = Some("no".into()), "no port can be listened on"),
            (|host| host.clock_ahead_s = Some(-9.0), "its clock is behind by 9.0 s"),
        ];
        for (change, text) in cases {
            let found = one(change);
            assert_eq!((found.problems.len(), found.hints.len()), (1, 0), "{text}: {found:?}");
            assert!(
                found.problems[0].contains(text) && found.problems[0].contains("; try "),
                "{text}: {found:?}"
            );
        }
    }

    #[test]
    fn more_ranks_than_cores_are_a_problem() {
        let ranks = |num: usize| (0..num).map(|rank| healthy(rank, "n1")).collect::<Vec<_>>();
        assert_eq!(findings(&ranks(8), &Measured::default()), Findings::default());
        let found = findings(&ranks(9), &Measured::default()).problems;
        assert!(
            found.len() == 1 && found[0].starts_with("9 ranks share 8 of 8 cores; try fewer ranks"),
            "{found:?}"
        );
    }

    #[test]
    fn what_does_no_harm_is_a_hint() {
        type Change = fn(&mut Host);
        let cases: [(Change, &str); 8] = [
            (|host| host.cores.usable = 2, "a cgroup gives the time of 2 of 8 cores"),
            (
                |host| (host.cores.allowed, host.cores.usable) = (vec![0, 1, 2, 3], 4),
                "4 of 8 cores may be used",
            ),
            (|host| host.cores.load = 30.0, "busy: 30 processes"),
            (
                |host| {
                    (host.shm.as_mut().unwrap().total, host.shm.as_mut().unwrap().free) = (64 * MIB, 64 * MIB)
                },
                "the default of containers",
            ),
            (|host| host.limits.open_files = Some(256), "256 open files"),
            (|host| host.ports.default_taken_by = Some("pid 7".into()), "is taken: pid 7"),
            (|host| host.clock_ahead_s = Some(0.4), "ahead by 0.4 s"),
            (
                |host| host.names[0].error = Some("unknown".into()),
                "the name n1 (this host) cannot be resolved",
            ),
        ];
        for (change, text) in cases {
            let found = one(change);
            assert_eq!((found.problems.len(), found.hints.len()), (0, 1), "{text}: {found:?}");
            assert!(found.hints[0].contains(text), "{text}: {found:?}");
        }
    }

    #[test]
    fn hosts_are_named_where_there_are_several() {
        let mut hosts = vec![healthy(0, "n1"), healthy(1, "n1"), healthy(2, "n2")];
        hosts[2].clock_ahead_s = Some(60.0);
        hosts.iter_mut().for_each(|host| host.shm = None);
        let found = findings(&hosts, &Measured::default());
        assert_eq!(found.problems.len(), 2, "{found:?}");
        assert!(found.problems[0].starts_with("all hosts: /dev/shm is missing"), "{found:?}");
        assert!(found.problems[1].starts_with("n2: its clock is ahead by 60.0 s"), "{found:?}");
        let mut hosts = vec![healthy(0, "n1"), healthy(1, "n2")];
        hosts[1].names[0].error = Some("unknown".into());
        hosts[1].drumline = "0.0.9".into();
        hosts[0].names.push(Name {
            name: "n1".into(),
            given_by: "MASTER_ADDR".into(),
            addresses: vec![[127, 0, 1, 1].into()],
            error: None,
            seconds: 0.0,
        });
        let found = findings(&hosts, &Measured::default()).problems.join("\n");
        assert!(found.contains("n2: the name n2 (this host) cannot be resolved"), "{found}");
        assert!(
            found.contains("n1: MASTER_ADDR=n1 is 127.0.1.1 here, which other hosts cannot reach"),
            "{found}"
        );
        assert!(found.contains("n2 has drumline 0.0.9, rank 0 has 0.1.0"), "{found}");
    }

    #[test]
    fn links_that_are_slow_or_wrong_are_named() {
        let hosts = [healthy(0, "n1"), healthy(1, "n2"), healthy(2, "n3")];
        let mut links = [
            link([0, 1], LinkKind::Tcp, 1.1),
            link([0, 2], LinkKind::Tcp, 0.2),
            link([1, 2], LinkKind::Tcp, 1.2),
        ];
        let found = findings(&hosts, &of(&links)).problems;
        assert_eq!(
            found,
            [
                "between rank 0 (n1) and rank 2 (n3), TCP has 0.20 GB/s where most have 1.10; try looking at the hosts' load, cables and switches"
            ]
        );
        links[1].gb_per_s = 1.0;
        links[2].wrong_bytes = 3;
        let found = findings(&hosts, &of(&links)).problems;
        assert!(
            found.len() == 1
                && found[0]
                    .starts_with("between rank 1 (n2) and rank 2 (n3), over TCP, 3 bytes arrived changed"),
            "{found:?}"
        );
        let slow = [link([0, 1], LinkKind::Tcp, 0.01)];
        assert!(findings(&hosts, &of(&slow)).hints[0].contains("less than gigabit"));
    }
}
