//! What is told when a GPU has no room left: who has its memory, and what to try.

use super::memory::{Memory, memory};
use super::properties::Properties;

const GIB: f64 = (1u64 << 30) as f64;

/// What to tell where libtorch's words, an error's or a panic's, say that a GPU is full: them made short, and a breakdown of the GPU's memory as it is now.
pub fn out_of_memory(words: &str) -> Option<String> {
    words.contains("CUDA out of memory").then(|| told(words))
}

fn told(words: &str) -> String {
    let device = after(words, "GPU ").and_then(|text| text.parse().ok()).unwrap_or(0);
    let wanted = after(words, "Tried to allocate ").map_or_else(
        || "more".to_owned(),
        |size| {
            let unit =
                words.split(&size).nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or("");
            format!("{size} {}", unit.trim_end_matches('.'))
        },
    );
    let name = Properties::of(device).map_or_else(|_| String::new(), |found| format!(" ({})", found.name));
    let shares = memory(device).map_or_else(|_| String::new(), |memory| format!(": {}", breakdown(&memory)));
    format!(
        "GPU {device}{name} is out of memory: {wanted} was asked for{shares}; \
         try a smaller batch, accumulating gradients over several, or fewer ranks on this GPU"
    )
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

/// The number that follows these words.
fn after(text: &str, words: &str) -> Option<String> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(rest[..end].trim_end_matches('.').to_owned()).filter(|number| !number.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_words_are_understood() {
        let words = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 3 has a total capacity of 139.80 GiB of which 1.2 GiB is free.";
        let told = out_of_memory(words).unwrap();
        assert!(told.starts_with("GPU 3 is out of memory: 20.50 GiB was asked for; try"), "{told}");
        let short = out_of_memory("CUDA out of memory").unwrap();
        assert!(short.starts_with("GPU 0 is out of memory: more was asked for"), "{short}");
        assert_eq!(out_of_memory("shapes do not fit"), None);
    }

    #[test]
    fn every_byte_is_somebodys() {
        let gib = 1 << 30;
        let memory = Memory {
            allocated: 4 * gib,
            peak_allocated: 5 * gib,
            reserved: 6 * gib,
            peak_reserved: 7 * gib,
            free: gib,
            total: 10 * gib,
        };
        let told = breakdown(&memory);
        for part in [
            "of 10.00 GiB",
            "tensors have 4.00 GiB",
            "2.00 GiB more are kept",
            "3.00 GiB belong",
            "1.00 GiB are free",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }
}
