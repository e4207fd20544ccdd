//! The error for a GPU that has no memory left: how much was asked for, who holds the memory, and what to try.

use std::fmt;

use super::memory::{Memory, memory};
use super::properties::Properties;

const GIB: f64 = (1u64 << 30) as f64;

/// A GPU has no memory left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuOutOfMemory {
    /// The index of the GPU.
    pub device: usize,
    /// Its name, if it is known.
    pub name: Option<String>,
    /// How much was asked for, in libtorch's words, such as `20.50 GiB`.
    pub requested: Option<String>,
    /// How its memory was used right after the error, if it is known.
    pub memory: Option<Memory>,
}

impl std::error::Error for GpuOutOfMemory {}

impl GpuOutOfMemory {
    /// Reads the text of an error or a panic of libtorch. `None` if it is about something else.
    ///
    /// libtorch has a type for this error, but tch passes on only the text.
    pub fn parse(text: &str) -> Option<Self> {
        if !text.contains("CUDA out of memory") {
            return None;
        }
        let device = number_after(text, "GPU ").and_then(|text| text.parse().ok()).unwrap_or(0);
        let requested = number_after(text, "Tried to allocate ").map(|size| {
            let unit = text.split(&size).nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or("");
            format!("{size} {}", unit.trim_end_matches('.'))
        });
        let name = Properties::of(device).ok().map(|found| found.name);
        Some(Self { device, name, requested, memory: memory(device).ok() })
    }
}

impl fmt::Display for GpuOutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.device)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        let requested = self.requested.as_deref().unwrap_or("more");
        write!(f, " is out of memory: {requested} was asked for")?;
        if let Some(memory) = &self.memory {
            write!(f, ": {}", breakdown(memory))?;
        }
        f.write_str("; try a smaller batch, accumulating gradients over several, or fewer ranks on this GPU")
    }
}

fn breakdown(memory: &Memory) -> String {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB);
    let others = (memory.total - memory.free).saturating_sub(memory.reserved);
    format!(
        "of {} this process's tensors have {} (at most {} so far), {} more are kept for its next ones, \
         {} belong to other processes and to CUDA itself, {} are free",
        gib(memory.total),
        gib(memory.allocated),
        gib(memory.peak_allocated),
        gib(memory.reserved.saturating_sub(memory.allocated)),
        gib(others),
        gib(memory.free),
    )
}

/// The digits of the number that follows `words`.
fn number_after(text: &str, words: &str) -> Option<String> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(rest[..end].trim_end_matches('.').to_owned()).filter(|number| !number.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_message_is_parsed() {
        let text = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 3 has a total capacity of 139.80 GiB of which 1.2 GiB is free.";
        let error = GpuOutOfMemory::parse(text).unwrap().to_string();
        assert!(error.starts_with("GPU 3 is out of memory: 20.50 GiB was asked for; try"), "{error}");
        let short = GpuOutOfMemory::parse("CUDA out of memory").unwrap().to_string();
        assert!(short.starts_with("GPU 0 is out of memory: more was asked for"), "{short}");
        assert_eq!(GpuOutOfMemory::parse("shapes do not fit"), None);
    }

    #[test]
    fn the_breakdown_accounts_for_all_memory() {
        let gib = 1 << 30;
        let memory = Memory {
            allocated: 4 * gib,
            peak_allocated: 5 * gib,
            reserved: 6 * gib,
            peak_reserved: 7 * gib,
            free: gib,
            total: 10 * gib,
            allocations: 1,
        };
        let text = breakdown(&memory);
        for part in [
            "of 10.00 GiB",
            "tensors have 4.00 GiB",
            "2.00 GiB more are kept",
            "3.00 GiB belong",
            "1.00 GiB are free",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
