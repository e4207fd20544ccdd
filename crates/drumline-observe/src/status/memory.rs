//! Memory of this process, as the kernel counts it.

use std::fs;

/// Memory use in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// In use: resident pages, including those shared with other ranks.
    pub used: u64,
    /// The peak.
    pub peak: u64,
}

impl Memory {
    /// The memory of this process; `None` if there is no `/proc`.
    pub fn of_this_process() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/status").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self { used: bytes(text, "VmRSS:")?, peak: bytes(text, "VmHWM:")? })
    }
}

/// `VmRSS:      1234 kB`
fn bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_read() {
        let text = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        assert_eq!(Memory::parse(text), Some(Memory { used: 1 << 20, peak: 2 << 20 }));
        assert_eq!(Memory::parse("Name:\tx\n"), None);
    }

    #[test]
    fn memory_that_is_touched_is_counted() {
        let before = Memory::of_this_process().unwrap();
        let mut block = vec![0_u8; 32 << 20];
        block.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        let peak = Memory::of_this_process().unwrap().peak;
        assert!(std::hint::black_box(&block).len() == 32 << 20 && peak >= before.used + (30 << 20));
    }
}
