//! Tests the placement on simulated machines.

use std::fs;
use std::path::Path;

use super::*;
use crate::Program;

fn plan(nproc: usize, numa: Option<NumaBinding>) -> LaunchPlan {
    LaunchPlan { nproc, numa, ..LaunchPlan::new(Program::Executable("a".into())) }
}

fn nothing_set(_: &str) -> Option<OsString> {
    None
}

/// The lists of all ranks; `-` for one that is not bound.
fn shown(bound: &[Option<Cores>]) -> Vec<String> {
    bound.iter().map(|cores| cores.as_ref().map_or_else(|| "-".to_string(), Cores::to_string)).collect()
}

fn lists(plan: &LaunchPlan, topology: &Topology) -> Vec<String> {
    shown(&cores(plan, topology, &nothing_set).unwrap())
}

/// A machine with cores in order; second hardware threads, if any, have the numbers after all first ones.
#[derive(Clone, Copy)]
struct Machine {
    sockets: usize,
    nodes_per_socket: usize,
    cores_per_node: usize,
    threads: usize,
    cores_per_cache: usize,
}

const LAPTOP: Machine =
    Machine { sockets: 1, nodes_per_socket: 1, cores_per_node: 8, threads: 1, cores_per_cache: 8 };
const SERVER: Machine = Machine { sockets: 2, nodes_per_socket: 2, cores_per_node: 4, ..LAPTOP };

impl Machine {
    fn topology(self, allowed: &str, gpu_nodes: &[usize]) -> Topology {
        let num_cores = self.sockets * self.nodes_per_socket * self.cores_per_node;
        let cpu = |id: usize| {
            let core = id % num_cores;
            let node = core / self.cores_per_node;
            let cache = core / self.cores_per_cache * self.cores_per_cache;
            Cpu { id, core, cache, node, socket: node / self.nodes_per_socket }
        };
        let allowed: Cores = match allowed {
            "all" => (0..num_cores * self.threads).collect(),
            list => list.parse().unwrap(),
        };
        let gpus = gpu_nodes.iter().map(|node| Gpu { uuid: None, node: *node }).collect();
        Topology::new(allowed.iter().map(cpu).collect(), gpus)
    }
}

#[test]
fn a_single_rank_or_too_many_ranks_are_not_bound() {
    let laptop = LAPTOP.topology("all", &[]);
    assert_eq!(lists(&plan(1, None), &laptop), ["-"]);
    assert_eq!(lists(&plan(9, None), &laptop), ["-"; 9]);
    assert_eq!(lists(&plan(2, None), &Topology::default()), ["-"; 2], "the topology is unknown");
    assert_eq!(lists(&plan(2, Some(NumaBinding::None)), &laptop), ["-"; 2]);
    assert_eq!(lists(&plan(8, None), &laptop)[7], "7", "control: as many as there are cores");
}

#[test]
fn every_rank_gets_an_equal_share_with_both_threads_of_its_cores() {
    assert_eq!(lists(&plan(2, None), &LAPTOP.topology("all", &[])), ["0-3", "4-7"]);
    assert_eq!(lists(&plan(3, None), &LAPTOP.topology("all", &[])), ["0-2", "3-5", "6-7"]);
    let threaded = Machine { threads: 2, ..LAPTOP };
    assert_eq!(lists(&plan(2, None), &threaded.topology("all", &[])), ["0-3,8-11", "4-7,12-15"]);
    assert_eq!(lists(&plan(9, None), &threaded.topology("all", &[])), ["-"; 9], "8 real cores");
}

#[test]
fn only_allowed_cpus_are_shared() {
    assert_eq!(lists(&plan(2, None), &SERVER.topology("2-3,12-15", &[])), ["2-3,12", "13-15"]);
    assert_eq!(lists(&plan(3, None), &SERVER.topology("4-5", &[])), ["-"; 3]);
    let threaded = Machine { threads: 2, ..LAPTOP };
    assert_eq!(lists(&plan(2, None), &threaded.topology("0,1,8", &[])), ["0,8", "1"]);
    assert_eq!(lists(&plan(2, None), &threaded.topology("0,8", &[])), ["-"; 2], "one core's two threads");
    let node = lists(&plan(4, Some(NumaBinding::Node)), &SERVER.topology("2-5", &[]));
    assert_eq!(node, ["2-3", "2-3", "4-5", "4-5"]);
}

#[test]
fn ranks_are_not_bound_if_their_threads_do_not_fit() {
    let laptop = LAPTOP.topology("all", &[]);
    let omp = |threads| lists(&LaunchPlan { omp: Some(threads), ..plan(2, None) }, &laptop);
    assert_eq!((omp(4), omp(5)), (vec!["0-3".into(), "4-7".into()], vec!["-".to_string(); 2]));
    let set = |name: &'static str, value: &'static str| {
        let env = move |wanted: &str| (wanted == name).then(|| OsString::from(value));
        shown(&cores(&plan(2, None), &laptop, &env).unwrap())[0].clone()
    };
    assert_eq!((set("OMP_NUM_THREADS", "4"), set("OMP_NUM_THREADS", "8,2")), ("0-3".into(), "-".into()));
    assert_eq!((set("OMP_PLACES", "cores"), set("HOME", "/")), ("-".into(), "0-3".into()));
    let explicit = LaunchPlan { omp: Some(99), ..plan(2, Some(NumaBinding::Exclusive)) };
    assert_eq!(lists(&explicit, &laptop), ["0-3", "4-7"], "an explicit binding is applied");
}

#[test]
fn without_gpus_ranks_are_distributed_over_the_nodes_in_blocks() {
    let server = SERVER.topology("all", &[]);
    let binding = |nproc, numa| lists(&plan(nproc, Some(numa)), &server);
    assert_eq!(binding(4, NumaBinding::Node), ["0-3", "4-7", "8-11", "12-15"]);
    assert_eq!(binding(2, NumaBinding::Node), ["0-3", "8-11"]);
    assert_eq!(binding(1, NumaBinding::Node), ["0-3"]);
    assert_eq!(binding(2, NumaBinding::Socket), ["0-7", "8-15"]);
    assert_eq!(binding(8, NumaBinding::Exclusive)[..3], ["0-1", "2-3", "4-5"]);
    assert_eq!(binding(32, NumaBinding::Node)[7..9], ["0-3", "4-7"]);
    let error = cores(&plan(20, Some(NumaBinding::Exclusive)), &server, &nothing_set).unwrap_err();
    assert_eq!(error, PlacingError::TooFewCores { node: 0, cores: 4, ranks: 5 });
}

#[test]
fn ranks_are_bound_near_their_gpus() {
    let server = SERVER.topology("all", &[3, 3, 0, 0]);
    let binding = |nproc, numa| lists(&plan(nproc, numa), &server);
    assert_eq!(binding(3, Some(NumaBinding::Node)), ["12-15", "12-15", "0-3"]);
    assert_eq!(binding(4, Some(NumaBinding::Socket)), ["8-15", "8-15", "0-7", "0-7"]);
    assert_eq!(binding(4, Some(NumaBinding::Exclusive)), ["12-13", "14-15", "0-1", "2-3"]);
    assert_eq!(binding(4, None), ["8-11", "12-15", "0-3", "4-7"], "equal shares, as near as possible");
    assert_eq!(binding(5, Some(NumaBinding::Node))[4], "12-15", "not each has a GPU: blocks");
    let visible = |list: &'static str| {
        let env = move |wanted: &str| (wanted == "CUDA_VISIBLE_DEVICES").then(|| OsString::from(list));
        shown(&cores(&plan(2, Some(NumaBinding::Node)), &server, &env).unwrap())
    };
    assert_eq!(
        (visible("2,0"), visible("")),
        (vec!["0-3".into(), "12-15".into()], vec!["0-3".into(), "8-11".into()])
    );
    let chosen =
        LaunchPlan { devices: Some(vec!["2".into(), "1".into()]), ..plan(2, Some(NumaBinding::Node)) };
    assert_eq!(lists(&chosen, &server), ["0-3", "12-15"]);
}

#[test]
fn a_gpu_without_usable_cores_is_an_error() {
    let narrowed = SERVER.topology("0-3", &[0, 3]);
    let error = cores(&plan(2, Some(NumaBinding::Node)), &narrowed, &nothing_set).unwrap_err().to_string();
    assert!(error.contains("local rank 1 is on NUMA node 3, and only the cores 0-3"), "{error}");
    assert_eq!(
        lists(&plan(2, None), &narrowed),
        ["0-1", "2-3"],
        "without a binding: shares of what is allowed"
    );
}

#[test]
fn caches_are_assigned_largest_first_and_reused() {
    let epyc = Machine { cores_per_node: 8, cores_per_cache: 2, ..SERVER };
    let binding = |allowed, nproc, gpus: &[usize]| {
        lists(&plan(nproc, Some(NumaBinding::CoreComplex)), &epyc.topology(allowed, gpus))
    };
    assert_eq!(binding("all", 4, &[]), ["0-1", "8-9", "16-17", "24-25"]);
    assert_eq!(binding("all", 3, &[1, 1, 1]), ["8-9", "10-11", "12-13"]);
    assert_eq!(binding("1-5", 3, &[0, 0, 0]), ["2-3", "4-5", "1"]);
    assert_eq!(binding("0-3", 3, &[0, 0, 0]), ["0-1", "2-3", "0-1"]);
}

/// Writes a file of a fake `/sys` or `/proc`.
fn put(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("{text}\n")).unwrap();
}

#[test]
fn a_topology_is_read_from_a_tree() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    for (cpu, sibling, node, socket) in
        [(0, "0,2", 0, 0), (1, "1,3", 1, 1), (2, "0,2", 0, 0), (3, "1,3", 1, 1)]
    {
        let at = format!("sys/devices/system/cpu/cpu{cpu}");
        put(root, &format!("{at}/topology/thread_siblings_list"), sibling);
        put(root, &format!("{at}/topology/physical_package_id"), &socket.to_string());
        for (index, kind, level, shared) in
            [(0, "Data", 1, sibling), (1, "Instruction", 9, "0-3"), (2, "Unified", 3, sibling)]
        {
            put(root, &format!("{at}/cache/index{index}/type"), kind);
            put(root, &format!("{at}/cache/index{index}/level"), &level.to_string());
            put(root, &format!("{at}/cache/index{index}/shared_cpu_list"), shared);
        }
        put(root, &format!("sys/devices/system/node/node{node}/cpulist"), sibling);
    }
    put(root, "sys/devices/system/node/possible", "0-1");
    let topology = Topology::read(root, &"0-1,3".parse().unwrap());
    let cpu = |id, core, node| Cpu { id, core, cache: core, node, socket: node };
    assert_eq!(topology, Topology::new(vec![cpu(0, 0, 0), cpu(1, 1, 1), cpu(3, 1, 1)], Vec::new()));
    let bare = Topology::read("/nowhere".as_ref(), &"5-6".parse().unwrap());
    let plain = |id| Cpu { id, core: id, cache: 0, node: 0, socket: 0 };
    assert_eq!(bare, Topology::new(vec![plain(5), plain(6)], Vec::new()));
}

#[test]
fn gpus_are_read_from_the_driver_or_from_the_bus() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let read = || Topology::read(root, &Cores::default()).gpus().to_vec();
    let gpu = |node| Gpu { uuid: None, node };
    for (address, vendor, class, node) in [
        ("0000:c1:00.0", "0x10de", "0x030200", "1"),
        ("0000:41:00.0", "0x10de", "0x030000", "-1"),
        ("0000:42:00.0", "0x10de", "0x060400", "0"),
        ("0000:05:00.0", "0x1a03", "0x030000", "0"),
    ] {
        for (file, text) in [("vendor", vendor), ("class", class), ("numa_node", node)] {
            put(root, &format!("sys/bus/pci/devices/{address}/{file}"), text);
        }
    }
    assert_eq!(read(), [gpu(0), gpu(1)]);
    let information = "Model: \t\t H200\nGPU UUID: \t GPU-5EBE-77\nDevice Minor: \t 0";
    put(root, "proc/driver/nvidia/gpus/0000:c1:00.0/information", information);
    assert_eq!(read(), [Gpu { uuid: Some("GPU-5EBE-77".to_string()), node: 1 }]);
    let found = &read()[0];
    let named = ["0", "1", "GPU-5ebe", "GPU-6"].map(|name| found.node_if_named(name, 0));
    assert_eq!(named, [Some(1), None, Some(1), None]);
}
