//! Which processes a process can see in `/proc`: those of its machine since it booted, and of its pid namespace.
//!
//! A host name is not enough: two machines may have the same one, and so may containers, whose pids start at 1.

use sha2::{Digest, Sha256};

/// Equal for processes that see each other with the same pids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessSpace(pub(crate) [u8; 8]);

impl ProcessSpace {
    /// For a process that cannot determine its own.
    const UNKNOWN: ProcessSpace = ProcessSpace([0; 8]);

    /// The space of this process.
    pub(crate) fn here() -> ProcessSpace {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        let (Ok(boot), Ok(namespace)) = (boot, namespace) else { return Self::UNKNOWN };
        let hash = Sha256::digest(format!("{}/{}", boot.trim(), namespace.display()));
        hash.first_chunk().map_or(Self::UNKNOWN, |bytes| ProcessSpace(*bytes))
    }

    /// Whether a process there can be found in the `/proc` of a process here.
    pub(crate) fn sees(self, other: ProcessSpace) -> bool {
        self == other && self != Self::UNKNOWN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_the_same_known_space_are_visible() {
        let here = ProcessSpace::here();
        assert!(here.sees(ProcessSpace::here()));
        assert!(!here.sees(ProcessSpace([7; 8])) && !here.sees(ProcessSpace::UNKNOWN));
        assert!(!ProcessSpace::UNKNOWN.sees(ProcessSpace::UNKNOWN));
    }
}
