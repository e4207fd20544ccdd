//! Settings of the process: denormals, determinism, TF32, how freed memory is kept.
#![allow(unsafe_code)]

use crate::error::TorchError;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_flush_denormal(on: bool, supported: *mut bool) -> Message;
    fn drumline_deterministic(on: bool, warn_only: bool) -> Message;
    fn drumline_allow_tf32(on: bool) -> Message;
}

/// Treats denormal numbers as zero on this thread, and on threads that it starts from now on.
///
/// Denormals are many times slower to compute with. Call it before the first tensor operation. Returns whether the CPU
/// supports it.
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

/// Allows TF32, which has a mantissa of 10 bits, in convolutions and matrix products of f32 on GPUs. It is many times
/// as fast. By default libtorch allows it for convolutions, but not for matrix products.
pub fn allow_tf32(on: bool) -> Result<(), TorchError> {
    // SAFETY: takes a plain value.
    check(unsafe { drumline_allow_tf32(on) }, "cannot set whether TF32 is allowed")
}

/// Keeps freed memory in the process instead of returning it to the system, in blocks of up to 1 GiB, and in huge pages
/// if the system allows them.
///
/// A training step frees and allocates the same large tensors again and again. By default malloc returns each of them
/// to the system, and every page must be faulted in again. Call it once, early, on the main thread. It works with glibc
/// only; elsewhere it does nothing.
///
/// ```
/// drumline_torch::keep_freed_memory();
/// let tensor = vec![1u8; 300 << 20];
/// # // A system without huge pages uses plain ones.
/// # let allowed = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or("[never]".into());
/// # let smaps = std::fs::read_to_string("/proc/self/smaps_rollup")?;
/// # let huge = smaps.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap_or("0 kB");
/// # let kibibytes: usize = huge.trim().trim_end_matches("kB").trim().parse()?;
/// # assert!(allowed.contains("[never]") || kibibytes > 200 << 10, "{kibibytes} KiB of {} bytes", tensor.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes plain values and may be called at any time.
    unsafe {
        const REFUSED: i32 = 0;
        if libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30) == REFUSED {
            // The maximum of older versions.
            libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        }
        const NEVER: i32 = -1;
        libc::mallopt(libc::M_TRIM_THRESHOLD, NEVER);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        reserve_huge_pages();
    }
}

/// Lets malloc reserve addresses whose memory comes in huge pages. They cost nothing until they are used.
///
/// # Safety
/// malloc must keep freed memory.
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
