//! Settings of the process: denormals, determinism, how memory is kept.
#![allow(unsafe_code)]

use crate::error::TorchError;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_flush_denormal(on: bool, supported: *mut bool) -> Message;
    fn drumline_deterministic(on: bool, warn_only: bool) -> Message;
}

/// Whether numbers too small to be normal count as zero on this thread, and on threads it starts from now on.
///
/// Such numbers are many times slower to compute with. Call it before the first tensor operation. Says whether the
/// processor can do it.
pub fn flush_denormals(on: bool) -> Result<bool, TorchError> {
    let mut supported = false;
    // SAFETY: writes one bool.
    check(unsafe { drumline_flush_denormal(on, &mut supported) }, "cannot set how denormals are treated")?;
    Ok(supported)
}

/// What happens when an operation has no deterministic algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// Any algorithm will do.
    Off,
    /// A warning is printed.
    Warn,
    /// It is an error.
    Require,
}

/// Asks for algorithms that give the same bits every time.
pub fn use_deterministic_algorithms(determinism: Determinism) -> Result<(), TorchError> {
    let (on, warn_only) = (determinism != Determinism::Off, determinism == Determinism::Warn);
    // SAFETY: takes plain values.
    check(unsafe { drumline_deterministic(on, warn_only) }, "cannot set determinism")
}

/// Keeps freed memory in the process instead of giving it back to the system, in blocks of up to 1 GiB, and in huge pages where the
/// system allows them.
///
/// A training step frees and takes the same large tensors again and again. By default each of them is given back, and each page
/// of it is faulted in anew. Call it once, early. glibc only; elsewhere nothing happens.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes plain values and may be called at any time.
    unsafe {
        const REFUSED: i32 = 0;
        if libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30) == REFUSED {
            // The most that older versions take.
            libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        }
        const NEVER: i32 = -1;
        libc::mallopt(libc::M_TRIM_THRESHOLD, NEVER);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        reserve_huge_pages();
    }
}

/// Lets malloc have addresses whose memory comes in huge pages; they cost nothing until they are used.
///
/// # Safety
/// malloc keeps what is freed.
#[cfg(target_env = "gnu")]
unsafe fn reserve_huge_pages() {
    // Blocks below the threshold above come from malloc's own memory.
    const BLOCK: usize = 1000 << 20;
    const HUGE_PAGE: usize = 2 << 20;
    // SAFETY: the advice is for whole pages inside a block that is ours, and changes none of its bytes.
    unsafe {
        let blocks: [*mut libc::c_void; 4] = std::array::from_fn(|_| libc::malloc(BLOCK));
        for block in blocks.into_iter().filter(|block| !block.is_null()) {
            let begin = (block as usize).next_multiple_of(HUGE_PAGE);
            let end = (block as usize + BLOCK) / HUGE_PAGE * HUGE_PAGE;
            libc::madvise(begin as *mut libc::c_void, end - begin, libc::MADV_HUGEPAGE);
        }
        blocks.into_iter().for_each(|block| libc::free(block));
    }
}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use super::*;

    /// Bytes of this process in huge pages.
    fn huge_bytes() -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn kept_memory_comes_in_huge_pages() {
        let allowed =
            std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        keep_freed_memory();
        let before = huge_bytes();
        let block = vec![1u8; 300 << 20];
        let gained = huge_bytes().saturating_sub(before);
        // A system without huge pages, or with none left, gives plain ones; nothing is lost then.
        let some = !allowed.is_empty() && !allowed.contains("[never]");
        assert!(!some || gained > 200 << 20, "{gained} of {} bytes", block.len());
    }
}
