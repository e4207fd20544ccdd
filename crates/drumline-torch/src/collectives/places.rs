//! Which way collectives of GPUs go: from GPU to GPU, or through the host's memory. A pure choice from what all ranks say of themselves.

use serde::{Deserialize, Serialize};

/// What a rank says of its GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// Equal for processes of one machine.
    pub(super) machine: String,
    /// The GPU's place on that machine's bus.
    pub(super) bus: String,
    /// NCCL's version, or why it cannot be used.
    pub(super) nccl: Result<i32, String>,
}

impl Place {
    /// Of a GPU of this machine.
    pub(super) fn of(bus: String, nccl: Result<i32, String>) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { machine: boot.trim().to_owned(), bus, nccl }
    }
}

/// The way, and for the longer one why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    Nccl,
    ThroughHost(String),
}

/// The same on all ranks, as all have the same list.
pub(super) fn choose(places: &[Place]) -> Way {
    for (rank, place) in places.iter().enumerate() {
        if let Err(why) = &place.nccl {
            return Way::ThroughHost(format!("rank {rank} cannot use NCCL ({why})"));
        }
        let is_same = |other: &&Place| (&other.machine, &other.bus) == (&place.machine, &place.bus);
        if places.iter().filter(is_same).count() > 1 {
            let ranks: Vec<String> = (0..places.len())
                .filter(|other| is_same(&&places[*other]))
                .map(|other| other.to_string())
                .collect();
            return Way::ThroughHost(format!("ranks {} share the GPU {}", ranks.join(", "), place.bus));
        }
        if place.nccl != places[0].nccl {
            let (first, other) = (told(&places[0]), told(place));
            return Way::ThroughHost(format!("rank 0 has NCCL {first}, rank {rank} has {other}"));
        }
    }
    Way::Nccl
}

fn told(place: &Place) -> String {
    let version = place.nccl.as_ref().copied().unwrap_or(0);
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(machine: &str, bus: &str) -> Place {
        Place { machine: machine.into(), bus: bus.into(), nccl: Ok(22_809) }
    }

    fn why(places: &[Place]) -> String {
        match choose(places) {
            Way::Nccl => String::new(),
            Way::ThroughHost(why) => why,
        }
    }

    #[test]
    fn a_gpu_for_each_rank_is_for_nccl() {
        assert_eq!(choose(&[place("a", "0000:3b:00.0")]), Way::Nccl);
        let same_bus_elsewhere =
            [place("a", "0000:3b:00.0"), place("b", "0000:3b:00.0"), place("b", "0000:5e:00.0")];
        assert_eq!(choose(&same_bus_elsewhere), Way::Nccl);
    }

    #[test]
    fn a_shared_gpu_a_missing_library_and_differing_versions_are_not() {
        let shared = [place("a", "0000:01:00.0"), place("a", "0000:3b:00.0"), place("a", "0000:3b:00.0")];
        assert_eq!(why(&shared), "ranks 1, 2 share the GPU 0000:3b:00.0");
        let missing = Place { nccl: Err("cannot open libnccl.so.2".into()), ..place("b", "0000:3b:00.0") };
        assert_eq!(why(&[place("a", "1"), missing]), "rank 1 cannot use NCCL (cannot open libnccl.so.2)");
        let older = Place { nccl: Ok(22_703), ..place("b", "1") };
        assert_eq!(why(&[place("a", "1"), older]), "rank 0 has NCCL 2.28.9, rank 1 has 2.27.3");
    }
}
