//! The report of `doctor gpu`, as lines of text and as JSON.

use std::fmt;

use drumline_torch::cuda::{Memory, Properties};
use serde::{Deserialize, Serialize};

use super::problems::problems;

/// A CUDA version as text: 13000 is 13.0.
pub(super) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// A library or driver that must be present.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Found {
    /// It is present; its version.
    Version(String),
    /// It cannot be used; the reason.
    Problem(String),
}

impl<E: fmt::Display> From<Result<String, E>> for Found {
    fn from(found: Result<String, E>) -> Self {
        found.map_or_else(|error| Self::Problem(error.to_string()), Self::Version)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => f.write_str(version),
            Self::Problem(_) => f.write_str("cannot be used"),
        }
    }
}

/// The versions that a process finds on its machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Software {
    pub(super) drumline: String,
    pub(super) libtorch: String,
    pub(super) driver: Found,
    pub(super) libraries: Found,
    pub(super) nccl: Found,
}

impl Software {
    /// The problems, each cause once: without a driver, the libraries after it cannot work either.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = Vec::new();
        for found in [&self.driver, &self.libraries, &self.nccl] {
            if let Found::Problem(problem) = found
                && !problems.contains(problem)
            {
                problems.push(problem.clone());
            }
        }
        problems
    }
}

/// What a rank reports about itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) host: String,
    /// The number of GPUs that it sees.
    pub(super) num_gpus: usize,
    /// The PCI bus id of its GPU.
    pub(super) gpu: Option<String>,
    #[serde(flatten)]
    pub(super) software: Software,
}

#[derive(Debug, Serialize)]
pub(super) struct Gpu {
    gpu: usize,
    name: String,
    memory_bytes: u64,
    free_bytes: u64,
    capability: String,
    multiprocessors: i32,
    pci_bus_id: String,
}

impl Gpu {
    pub(super) fn new(gpu: usize, properties: Properties, memory: Memory) -> Self {
        let Properties { name, pci_bus_id, capability: (major, minor), multiprocessors, .. } = properties;
        let capability = format!("{major}.{minor}");
        let (memory_bytes, free_bytes) = (memory.total, memory.free);
        Self { gpu, name, memory_bytes, free_bytes, capability, multiprocessors, pci_bus_id }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Bandwidth {
    pub(super) gpu: usize,
    pub(super) way: String,
    pub(super) memory: String,
    pub(super) gb_per_s: f64,
}

/// The bandwidth from one GPU's memory to another's.
#[derive(Debug, Serialize)]
pub(super) struct Between {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) gb_per_s: f64,
    /// The number of bytes that a copy changed.
    pub(super) wrong_bytes: u64,
}

impl Between {
    /// The problem, if the copy changed bytes.
    pub(super) fn problem(&self) -> Option<String> {
        let Self { from, to, wrong_bytes, .. } = self;
        (*wrong_bytes > 0).then(|| {
            format!(
                "{wrong_bytes} bytes of a copy from GPU {from} to GPU {to} arrived changed; try NCCL_P2P_DISABLE=1, and switching off \
                 the IOMMU or PCIe's access control services (ACS)"
            )
        })
    }
}

/// The timing of an all-reduce over all ranks.
#[derive(Debug, Serialize)]
pub(super) struct AllReduce {
    ranks: usize,
    bytes: u64,
    milliseconds: f64,
    /// Bus bandwidth as in nccl-tests: the traffic of each link in a ring, comparable for any number of ranks.
    bus_gb_per_s: f64,
    over_nccl: bool,
    /// Why NCCL was not used.
    why_not: Option<String>,
}

impl AllReduce {
    pub(super) fn new(ranks: usize, bytes: u64, seconds: f64, why_not: Option<String>) -> Self {
        let bus_gb_per_s = bytes as f64 / seconds / 1e9 * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        Self {
            ranks,
            bytes,
            milliseconds: seconds * 1e3,
            bus_gb_per_s,
            over_nccl: why_not.is_none(),
            why_not,
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct NcclAlone {
    pub(super) gpu: usize,
    pub(super) bytes: u64,
    pub(super) milliseconds: f64,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    software: Software,
    pub(super) gpus: Vec<Gpu>,
    /// Whether the GPU of the row can read the memory of the GPU of the column directly.
    pub(super) peer_access: Vec<Vec<bool>>,
    pub(super) bandwidths: Vec<Bandwidth>,
    /// Empty if there is only one GPU.
    pub(super) between: Vec<Between>,
    pub(super) nccl_alone: Option<NcclAlone>,
    /// `None` if there is only one rank.
    all_reduce: Option<AllReduce>,
    ranks: Vec<Rank>,
    /// Empty if nothing is wrong.
    pub(super) problems: Vec<String>,
}

impl Report {
    /// Starts the report of rank 0's machine, with the problems of all ranks.
    pub(super) fn new(software: Software, ranks: Vec<Rank>) -> Self {
        let problems = problems(&ranks);
        Self {
            software,
            gpus: Vec::new(),
            peer_access: Vec::new(),
            bandwidths: Vec::new(),
            between: Vec::new(),
            nccl_alone: None,
            all_reduce: None,
            ranks,
            problems,
        }
    }

    /// Adds the outcome of the all-reduce, if it ran.
    pub(super) fn with_all_reduce(mut self, made: Option<anyhow::Result<AllReduce>>) -> Self {
        match made {
            Some(Ok(all_reduce)) => self.all_reduce = Some(all_reduce),
            Some(Err(error)) => self.problems.push(format!("an all-reduce of all ranks: {error:#}")),
            None => {}
        }
        self
    }
}

impl fmt::Display for AllReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, bytes, milliseconds, bus_gb_per_s, why_not, .. } = self;
        write!(
            f,
            "{ranks} ranks: {} MiB in {milliseconds:.3} ms, bus {bus_gb_per_s:.1} GB/s, ",
            bytes >> 20
        )?;
        match why_not {
            None => f.write_str("over NCCL"),
            Some(why) => write!(f, "not over NCCL: {why}"),
        }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Software { drumline, libtorch, driver, libraries, nccl } = &self.software;
        writeln!(f, "drumline    {drumline}, libtorch {libtorch}")?;
        writeln!(f, "driver      {driver}")?;
        writeln!(f, "libraries   {libraries}")?;
        writeln!(f, "NCCL        {nccl}")?;
        for gpu in &self.gpus {
            let Gpu { gpu: number, name, capability, multiprocessors, pci_bus_id, .. } = gpu;
            let (memory, free) = (gpu.memory_bytes as f64 / GIB, gpu.free_bytes as f64 / GIB);
            writeln!(
                f,
                "GPU {number:<8}{name}, {memory:.1} GiB ({free:.1} free), capability {capability}, {multiprocessors} multiprocessors, {pci_bus_id}"
            )?;
        }
        self.write_peers(f)?;
        for Bandwidth { gpu, way, memory, gb_per_s } in &self.bandwidths {
            writeln!(f, "bandwidth   GPU {gpu}: {way}, {memory} memory: {gb_per_s:.1} GB/s")?;
        }
        self.write_between(f)?;
        if let Some(NcclAlone { gpu, bytes, milliseconds }) = &self.nccl_alone {
            writeln!(f, "NCCL alone  GPU {gpu}: all-reduce of {} MiB in {milliseconds:.3} ms", bytes >> 20)?;
        }
        if self.ranks.len() > 1 {
            self.write_ranks(f)?;
        }
        if let Some(all_reduce) = &self.all_reduce {
            writeln!(f, "all-reduce  {all_reduce}")?;
        }
        self.problems.iter().try_for_each(|problem| writeln!(f, "problem     {problem}"))
    }
}

impl Report {
    fn write_peers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (gpu, row) in self.peer_access.iter().enumerate().filter(|(_, row)| row.len() > 1) {
            let reached: Vec<String> = (0..row.len())
                .filter(|peer| *peer != gpu && row[*peer])
                .map(|peer| peer.to_string())
                .collect();
            let peers = if reached.is_empty() { "no other".into() } else { reached.join(", ") };
            writeln!(f, "peers       GPU {gpu} reads by itself: {peers}")?;
        }
        Ok(())
    }

    /// One line for each source GPU.
    fn write_between(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for from in 0..self.gpus.len() {
            let ways = self.between.iter().filter(|way| way.from == from);
            let bandwidths: Vec<_> = ways.map(|way| format!("{} {:.1}", way.to, way.gb_per_s)).collect();
            if !bandwidths.is_empty() {
                writeln!(f, "bandwidth   GPU {from} to GPU: {} GB/s", bandwidths.join(", "))?;
            }
        }
        Ok(())
    }

    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Rank { rank, host, gpu, software, .. } in &self.ranks {
            let gpu = gpu.as_deref().unwrap_or("none");
            let Software { driver, nccl, .. } = software;
            writeln!(f, "rank {rank:<7}{host}, GPU {gpu}, driver {driver}, NCCL {nccl}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn software(nccl: &str) -> Software {
        let version = |text: &str| Found::Version(text.into());
        Software {
            drumline: env!("CARGO_PKG_VERSION").into(),
            libtorch: "2.11.0".into(),
            driver: version("CUDA 13.0"),
            libraries: version("CUDA 13.0"),
            nccl: version(nccl),
        }
    }

    pub(in super::super) fn rank(rank: usize, software: Software) -> Rank {
        Rank { rank, host: "node1".into(), num_gpus: 8, gpu: Some("0000:3b:00.0".into()), software }
    }

    #[test]
    fn one_missing_driver_is_one_problem() {
        let missing = || Found::Problem("there is no NVIDIA driver here".into());
        let none = Software { driver: missing(), libraries: missing(), nccl: missing(), ..software("") };
        let report = Report::new(none.clone(), vec![rank(0, none)]);
        assert_eq!(report.problems, ["there is no NVIDIA driver here"]);
        let text = report.to_string();
        assert!(text.contains("driver      cannot be used\n"), "{text}");
        assert!(text.ends_with("problem     there is no NVIDIA driver here\n"), "{text}");
    }

    #[test]
    fn a_rank_with_another_version_is_named() {
        let ranks =
            || vec![rank(0, software("2.28.9")), rank(1, software("2.28.9")), rank(2, software("2.27.3"))];
        let report = Report::new(software("2.28.9"), ranks());
        let expected = "rank 2 (node1): NCCL 2.27.3, rank 0 has 2.28.9; try the same versions on all hosts";
        assert_eq!(report.problems, [expected]);
        assert!(
            report
                .to_string()
                .contains("rank 1      node1, GPU 0000:3b:00.0, driver CUDA 13.0, NCCL 2.28.9\n")
        );
        assert!(Report::new(software("2.28.9"), ranks()[..2].to_vec()).problems.is_empty());
    }

    #[test]
    fn peer_access_is_listed_if_there_are_several_gpus() {
        let mut report = Report::new(software("2.28.9"), Vec::new());
        report.peer_access = vec![vec![true]];
        assert!(!report.to_string().contains("peers"));
        report.peer_access = vec![vec![true, true, false], vec![true, true, false], vec![false, false, true]];
        let text = report.to_string();
        assert!(
            text.contains("GPU 0 reads by itself: 1\n") && text.contains("GPU 2 reads by itself: no other\n"),
            "{text}"
        );
    }

    #[test]
    fn each_source_gpu_has_a_line_of_bandwidths() {
        let mut report = Report::new(software("2.28.9"), Vec::new());
        let gpu = |gpu| Gpu {
            gpu,
            name: "H200".into(),
            memory_bytes: 1,
            free_bytes: 1,
            capability: "9.0".into(),
            multiprocessors: 132,
            pci_bus_id: "0000:3b:00.0".into(),
        };
        report.gpus = (0..3).map(gpu).collect();
        let ways = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];
        let way = |(from, to)| Between {
            from,
            to,
            gb_per_s: 100.0 + from as f64 * 10.0 + to as f64,
            wrong_bytes: 0,
        };
        report.between = ways.map(way).into();
        let text = report.to_string();
        assert!(text.contains("bandwidth   GPU 1 to GPU: 0 110.0, 2 112.0 GB/s\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.contains(" to GPU: ")).count(), 3, "{text}");
    }

    #[test]
    fn a_copy_that_changes_bytes_is_a_problem() {
        let way = |wrong_bytes| Between { from: 0, to: 1, gb_per_s: 100.0, wrong_bytes };
        assert_eq!(way(0).problem(), None);
        let problem = way(7).problem().unwrap();
        assert!(
            problem.starts_with("7 bytes of a copy from GPU 0 to GPU 1 arrived changed; try "),
            "{problem}"
        );
    }

    #[test]
    fn the_all_reduce_of_all_ranks_is_reported() {
        let report =
            || Report::new(software("2.28.9"), (0..4).map(|at| rank(at, software("2.28.9"))).collect());
        let made = |why: Option<&str>| Some(Ok(AllReduce::new(4, 64 << 20, 1e-3, why.map(Into::into))));
        let text = report().with_all_reduce(made(None)).to_string();
        // 67.1 MB in a millisecond, of which each link carries 2 · 3/4.
        assert!(
            text.ends_with("all-reduce  4 ranks: 64 MiB in 1.000 ms, bus 100.7 GB/s, over NCCL\n"),
            "{text}"
        );
        let staged = report().with_all_reduce(made(Some("ranks 0, 1 share the GPU")));
        assert!(staged.to_string().contains("GB/s, not over NCCL: ranks 0, 1 share the GPU\n"));
        assert!(staged.problems.is_empty(), "slower, but correct");
        let failed = report().with_all_reduce(Some(Err(anyhow::anyhow!("rank 3: out of memory"))));
        assert_eq!(failed.problems, ["an all-reduce of all ranks: rank 3: out of memory"]);
    }

    #[test]
    fn json_names_versions_and_problems() {
        let found = Software { nccl: Found::Problem("gone".into()), ..software("") };
        let json = serde_json::to_value(Report::new(found.clone(), vec![rank(0, found)])).unwrap();
        assert_eq!(
            (&json["driver"]["version"], &json["nccl"]["problem"]),
            (&"CUDA 13.0".into(), &"gone".into())
        );
        assert_eq!(json["problems"], serde_json::json!(["gone"]));
        assert_eq!((&json["libtorch"], &json["ranks"][0]["libtorch"]), (&"2.11.0".into(), &"2.11.0".into()));
    }
}
