//! The CPUs that this launcher may use, and what each shares with others; read from a tree such as `/sys`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::Cores;
use super::gpu::{self, Gpu};

/// One CPU (a hardware thread). A core and a cache go by the lowest CPU in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: usize,
    /// Its real core.
    pub core: usize,
    /// Its last-level cache.
    pub cache: usize,
    /// Its NUMA node.
    pub node: usize,
    /// Its socket.
    pub socket: usize,
}

/// What a launcher may use of its machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    cpus: Vec<Cpu>,
    gpus: Vec<Gpu>,
}

impl Topology {
    /// Of these parts.
    pub fn new(cpus: Vec<Cpu>, gpus: Vec<Gpu>) -> Self {
        Self { cpus, gpus }
    }

    /// Of the machine that we run on and the CPUs we may use. With more than 1024 CPUs it is empty: nothing is bound.
    pub fn here() -> Self {
        let allowed =
            sched_getaffinity(None).map(|set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect());
        Self::read("/".as_ref(), &allowed.unwrap_or_default())
    }

    /// Of the CPUs `allowed` by the files below `root`. What they do not say is as in a machine of one socket without
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

    /// Their numbers.
    pub fn allowed(&self) -> Cores {
        self.those(|_| true)
    }

    pub(super) fn of_node(&self, node: usize) -> Cores {
        self.those(|cpu| cpu.node == node)
    }

    pub(super) fn of_sockets_of_node(&self, node: usize) -> Cores {
        let has = |socket| self.cpus.iter().any(|cpu| cpu.node == node && cpu.socket == socket);
        self.those(|cpu| has(cpu.socket))
    }

    fn those(&self, wanted: impl Fn(&Cpu) -> bool) -> Cores {
        self.cpus.iter().filter(|cpu| wanted(cpu)).map(|cpu| cpu.id).collect()
    }

    /// The CPUs of each real core, neighbours in the machine next to each other.
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

/// How many CPUs the machine has, whether we may use them or not, as far as the system says.
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

/// The CPUs that share the last cache for data with one CPU.
fn last_cache(folder: &Path) -> Option<Cores> {
    let data = |index: &usize| {
        let kind = fs::read_to_string(folder.join(format!("index{index}/type"))).unwrap_or_default();
        kind.trim() != "Instruction"
    };
    let level = |index: &usize| number::<u32>(&folder.join(format!("index{index}/level")));
    let last = numbered(folder, "index").filter(data).max_by_key(level)?;
    list(&folder.join(format!("index{last}/shared_cpu_list")))
}
