//! The CPUs that this launcher may use, and which cores, caches and nodes they share; read from a tree such as `/sys`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::Cores;
use super::gpu::{self, Gpu};

/// One CPU (a hardware thread). A core or a cache is identified by its lowest CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: usize,
    /// Its physical core.
    pub core: usize,
    /// Its last-level cache.
    pub cache: usize,
    /// Its NUMA node.
    pub node: usize,
    /// Its socket.
    pub socket: usize,
}

/// The CPUs and GPUs that a launcher may use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    cpus: Vec<Cpu>,
    gpus: Vec<Gpu>,
}

impl Topology {
    /// A topology of these CPUs and GPUs.
    pub fn new(cpus: Vec<Cpu>, gpus: Vec<Gpu>) -> Self {
        Self { cpus, gpus }
    }

    /// The topology of this machine, with the CPUs that we may use. With more than 1024 CPUs it is empty, and nothing
    /// is bound.
    pub fn here() -> Self {
        let allowed =
            sched_getaffinity(None).map(|set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect());
        Self::read("/".as_ref(), &allowed.unwrap_or_default())
    }

    /// Reads the topology of the `allowed` CPUs from the files below `root`. Missing files mean one socket without
    /// hardware threads.
    pub fn read(root: &Path, allowed: &Cores) -> Self {
        let system = root.join("sys/devices/system");
        let nodes = nodes(&system.join("node"));
        let cpu = |id: usize| {
            let folder = system.join(format!("cpu/cpu{id}"));
            let first = |list: Option<Cores>| list.and_then(|cpus| cpus.first());
            let socket: Option<i64> = number(&folder.join("topology/physical_package_id"));
            let siblings = list(&folder.join("topology/thread_siblings_list"));
            let node = nodes.iter().find(|(_, cpus)| cpus.contains(id)).map_or(0, |(node, _)| *node);
            Cpu {
                id,
                core: first(siblings).unwrap_or(id),
                cache: first(last_cache(&folder.join("cache"))).unwrap_or(0),
                node,
                socket: socket.and_then(|socket| usize::try_from(socket).ok()).unwrap_or(0),
            }
        };
        Self { cpus: allowed.iter().map(cpu).collect(), gpus: gpu::read(root) }
    }

    /// The CPUs that may be used.
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// The GPUs.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The numbers of the CPUs that may be used.
    pub fn allowed(&self) -> Cores {
        self.cpus_where(|_| true)
    }

    pub(super) fn of_node(&self, node: usize) -> Cores {
        self.cpus_where(|cpu| cpu.node == node)
    }

    pub(super) fn of_sockets_of_node(&self, node: usize) -> Cores {
        let has = |socket| self.cpus.iter().any(|cpu| cpu.node == node && cpu.socket == socket);
        self.cpus_where(|cpu| has(cpu.socket))
    }

    fn cpus_where(&self, wanted: impl Fn(&Cpu) -> bool) -> Cores {
        self.cpus.iter().filter(|cpu| wanted(cpu)).map(|cpu| cpu.id).collect()
    }

    /// The CPUs of each physical core; neighbouring cores are adjacent.
    pub(super) fn real_cores(&self, wanted: impl Fn(&Cpu) -> bool) -> Vec<Cores> {
        let mut cores = BTreeMap::<_, Vec<usize>>::new();
        for cpu in self.cpus.iter().filter(|cpu| wanted(cpu)) {
            cores.entry((cpu.socket, cpu.node, cpu.cache, cpu.core)).or_default().push(cpu.id);
        }
        cores.into_values().map(|cpus| cpus.into_iter().collect()).collect()
    }

    /// The CPUs of each last-level cache of a node, the largest first.
    pub(super) fn caches_of_node(&self, node: usize) -> Vec<Cores> {
        let mut caches = BTreeMap::<_, Vec<usize>>::new();
        for cpu in self.cpus.iter().filter(|cpu| cpu.node == node) {
            caches.entry(cpu.cache).or_default().push(cpu.id);
        }
        let mut caches: Vec<Cores> = caches.into_values().map(|cpus| cpus.into_iter().collect()).collect();
        caches.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
        caches
    }
}

/// The number of CPUs of the machine, including those that we may not use; `None` if unknown.
pub fn cpus_of_the_machine() -> Option<usize> {
    list("/sys/devices/system/cpu/online".as_ref()).map(|cpus| cpus.len()).filter(|count| *count > 0)
}

fn list(file: &Path) -> Option<Cores> {
    fs::read_to_string(file).ok()?.parse().ok()
}

fn number<N: std::str::FromStr>(file: &Path) -> Option<N> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The numbers at the end of the names in a folder, such as 1 for `node1`.
fn numbered<'a>(folder: &'a Path, prefix: &'a str) -> impl Iterator<Item = usize> + 'a {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    names.filter_map(move |entry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok())
}

/// The NUMA nodes and all their CPUs.
fn nodes(folder: &Path) -> Vec<(usize, Cores)> {
    let cpus = |node: usize| list(&folder.join(format!("node{node}/cpulist"))).map(|cpus| (node, cpus));
    numbered(folder, "node").filter_map(cpus).collect()
}

/// The CPUs that share the last-level data cache with one CPU.
fn last_cache(folder: &Path) -> Option<Cores> {
    let data = |index: &usize| {
        let kind = fs::read_to_string(folder.join(format!("index{index}/type"))).unwrap_or_default();
        kind.trim() != "Instruction"
    };
    let level = |index: &usize| number::<u32>(&folder.join(format!("index{index}/level")));
    let last = numbered(folder, "index").filter(data).max_by_key(level)?;
    list(&folder.join(format!("index{last}/shared_cpu_list")))
}
