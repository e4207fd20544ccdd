//! What `doctor gpu` tells, as lines for people and as JSON.

use std::fmt;

use drumline_torch::cuda::{Memory, Properties};
use serde::{Deserialize, Serialize};

/// A version as people write it: 13000 is 13.0.
pub(super) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Something that must be there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Found {
    /// Its version.
    Version(String),
    /// What is wrong with it.
    Problem(String),
}

impl From<Result<String, String>> for Found {
    fn from(found: Result<String, String>) -> Self {
        found.map_or_else(Self::Problem, Self::Version)
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

/// What a process finds on its machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Software {
    pub(super) driver: Found,
    pub(super) libraries: Found,
    pub(super) nccl: Found,
}

impl Software {
    /// What is wrong, each cause once: without a driver nothing after it can be there.
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

/// What a rank says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) host: String,
    /// Where its GPU is on the bus.
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

#[derive(Debug, Serialize)]
pub(super) struct NcclAlone {
    pub(super) gpu: usize,
    pub(super) bytes: u64,
    pub(super) milliseconds: f64,
}

/// All that was found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    drumline: &'static str,
    libtorch: &'static str,
    #[serde(flatten)]
    software: Software,
    pub(super) gpus: Vec<Gpu>,
    /// Whether the GPU of the row can read the memory of the column's by itself.
    pub(super) peer_access: Vec<Vec<bool>>,
    pub(super) bandwidths: Vec<Bandwidth>,
    pub(super) nccl_alone: Option<NcclAlone>,
    ranks: Vec<Rank>,
    /// Empty where all is well.
    pub(super) problems: Vec<String>,
}

impl Report {
    /// With the problems of this rank, and how others differ from it.
    pub(super) fn new(software: Software, ranks: Vec<Rank>) -> Self {
        let mut problems = software.problems();
        problems.extend(ranks.iter().filter_map(|rank| difference(&software, rank)));
        let (gpus, peer_access, bandwidths) = (Vec::new(), Vec::new(), Vec::new());
        let (drumline, libtorch) = (env!("CARGO_PKG_VERSION"), drumline::LIBTORCH);
        Self {
            drumline,
            libtorch,
            software,
            gpus,
            peer_access,
            bandwidths,
            nccl_alone: None,
            ranks,
            problems,
        }
    }
}

fn difference(first: &Software, rank: &Rank) -> Option<String> {
    let pairs = [
        ("driver", &first.driver, &rank.software.driver),
        ("libraries", &first.libraries, &rank.software.libraries),
        ("NCCL", &first.nccl, &rank.software.nccl),
    ];
    let (what, first, other) = pairs.into_iter().find(|(_, first, other)| first != other)?;
    let told = match other {
        Found::Problem(problem) => problem.clone(),
        version => format!("{what} {version}, rank 0 has {first}; try the same versions on all hosts"),
    };
    Some(format!("rank {} ({}): {told}", rank.rank, rank.host))
}

const GIB: f64 = (1u64 << 30) as f64;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "drumline    {}, libtorch {}", self.drumline, self.libtorch)?;
        writeln!(f, "driver      {}", self.software.driver)?;
        writeln!(f, "libraries   {}", self.software.libraries)?;
        writeln!(f, "NCCL        {}", self.software.nccl)?;
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
        if let Some(NcclAlone { gpu, bytes, milliseconds }) = &self.nccl_alone {
            writeln!(f, "NCCL alone  GPU {gpu}: all-reduce of {} MiB in {milliseconds:.3} ms", bytes >> 20)?;
        }
        if self.ranks.len() > 1 {
            self.write_ranks(f)?;
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
            let told = if reached.is_empty() { "no other".into() } else { reached.join(", ") };
            writeln!(f, "peers       GPU {gpu} reads by itself: {told}")?;
        }
        Ok(())
    }

    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Rank { rank, host, gpu, software } in &self.ranks {
            let gpu = gpu.as_deref().unwrap_or("none");
            let Software { driver, nccl, .. } = software;
            writeln!(f, "rank {rank:<7}{host}, GPU {gpu}, driver {driver}, NCCL {nccl}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn software(nccl: &str) -> Software {
        let version = |text: &str| Found::Version(text.into());
        Software { driver: version("CUDA 13.0"), libraries: version("CUDA 13.0"), nccl: version(nccl) }
    }

    fn rank(rank: usize, software: Software) -> Rank {
        Rank { rank, host: "node1".into(), gpu: Some("0000:3b:00.0".into()), software }
    }

    #[test]
    fn one_missing_driver_is_one_problem() {
        let missing = || Found::Problem("there is no NVIDIA driver here".into());
        let none = Software { driver: missing(), libraries: missing(), nccl: missing() };
        let report = Report::new(none.clone(), vec![rank(0, none)]);
        assert_eq!(report.problems, ["there is no NVIDIA driver here"]);
        let told = report.to_string();
        assert!(told.contains("driver      cannot be used\n"), "{told}");
        assert!(told.ends_with("problem     there is no NVIDIA driver here\n"), "{told}");
    }

    #[test]
    fn ranks_with_other_versions_are_named() {
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
    fn peers_are_told_where_there_are_some() {
        let mut report = Report::new(software("2.28.9"), Vec::new());
        report.peer_access = vec![vec![true]];
        assert!(!report.to_string().contains("peers"));
        report.peer_access = vec![vec![true, true, false], vec![true, true, false], vec![false, false, true]];
        let told = report.to_string();
        assert!(
            told.contains("GPU 0 reads by itself: 1\n") && told.contains("GPU 2 reads by itself: no other\n"),
            "{told}"
        );
    }

    #[test]
    fn json_names_versions_and_problems() {
        let found = Software { nccl: Found::Problem("gone".into()), ..software("") };
        let json = serde_json::to_value(Report::new(found, Vec::new())).unwrap();
        assert_eq!(
            (&json["driver"]["version"], &json["nccl"]["problem"]),
            (&"CUDA 13.0".into(), &"gone".into())
        );
        assert_eq!(json["problems"], serde_json::json!(["gone"]));
    }
}
