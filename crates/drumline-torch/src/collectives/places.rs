//! The route of collectives on GPU tensors: NCCL, or host memory. A pure function of what all ranks report about
//! themselves.

use serde::{Deserialize, Serialize};

use crate::recordable::HostRoute;

/// What a rank reports about its GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// Equal for processes of one machine.
    pub(super) machine: String,
    /// The GPU's address on that machine's PCI bus.
    pub(super) bus: String,
    pub(super) nccl: NcclVersion,
}

/// The NCCL of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum NcclVersion {
    /// Its version, as NCCL counts: 22809 is 2.28.9.
    Found(i32),
    /// Why it cannot be used. Errors cross processes as text.
    Missing(String),
}

impl Place {
    /// A GPU of this machine.
    pub(super) fn of(bus: String, nccl: NcclVersion) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { machine: boot.trim().to_owned(), bus, nccl }
    }

    fn is_same_gpu(&self, other: &Self) -> bool {
        (&self.machine, &self.bus) == (&other.machine, &other.bus)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RouteChoice {
    Nccl,
    ThroughHost(HostRoute),
}

/// Chooses the route. All ranks have the same list, and so choose the same.
pub(super) fn choose(places: &[Place]) -> RouteChoice {
    let mut first = None;
    for (rank, place) in places.iter().enumerate() {
        let version = match &place.nccl {
            NcclVersion::Found(version) => *version,
            NcclVersion::Missing(reason) => {
                return RouteChoice::ThroughHost(HostRoute::NoNccl { rank, reason: reason.clone() });
            }
        };
        let ranks: Vec<usize> = (0..places.len()).filter(|other| places[*other].is_same_gpu(place)).collect();
        if ranks.len() > 1 {
            return RouteChoice::ThroughHost(HostRoute::SharedGpu { ranks, bus: place.bus.clone() });
        }
        let first = *first.get_or_insert(version);
        if version != first {
            let (first, version) = (version_text(first), version_text(version));
            return RouteChoice::ThroughHost(HostRoute::NcclVersions { first, rank, version });
        }
    }
    RouteChoice::Nccl
}

/// A version as people write it.
fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(machine: &str, bus: &str) -> Place {
        Place { machine: machine.into(), bus: bus.into(), nccl: NcclVersion::Found(22_809) }
    }

    fn reason(places: &[Place]) -> String {
        match choose(places) {
            RouteChoice::Nccl => String::new(),
            RouteChoice::ThroughHost(reason) => reason.to_string(),
        }
    }

    #[test]
    fn nccl_is_chosen_if_each_rank_has_its_own_gpu() {
        assert_eq!(choose(&[place("a", "0000:3b:00.0")]), RouteChoice::Nccl);
        let same_bus_elsewhere =
            [place("a", "0000:3b:00.0"), place("b", "0000:3b:00.0"), place("b", "0000:5e:00.0")];
        assert_eq!(choose(&same_bus_elsewhere), RouteChoice::Nccl);
    }

    #[test]
    fn a_shared_gpu_a_missing_library_and_different_versions_go_through_the_host() {
        let shared = [place("a", "0000:01:00.0"), place("a", "0000:3b:00.0"), place("a", "0000:3b:00.0")];
        assert_eq!(reason(&shared), "ranks 1, 2 share the GPU 0000:3b:00.0");
        let nccl = NcclVersion::Missing("cannot open libnccl.so.2".into());
        let missing = Place { nccl, ..place("b", "0000:3b:00.0") };
        assert_eq!(reason(&[place("a", "1"), missing]), "rank 1 cannot use NCCL (cannot open libnccl.so.2)");
        let older = Place { nccl: NcclVersion::Found(22_703), ..place("b", "1") };
        assert_eq!(reason(&[place("a", "1"), older]), "rank 0 has NCCL 2.28.9, rank 1 has 2.27.3");
    }
}
