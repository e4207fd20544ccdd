//! Copies between private and shared memory.
//!
//! The C library copies more than a few kilobytes with one string instruction. On some CPUs (AMD Zen 3 and 4) that
//! instruction is several times slower if source and destination are a little apart modulo the page size, which is just how
//! a large allocation and a page-aligned staging buffer lie. Plain vector loads and stores do not have this problem.
//!
//! A result larger than the caches is written past them: a plain store would first fetch the line that it replaces.

use crate::element::Element;

/// Below this the C library does not use the string instruction.
const SMALL: usize = 1024;

/// Copies `from` to `to`, which are equally long.
#[inline]
pub(crate) fn copy<T: Element>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    let bytes = size_of_val(from);
    #[cfg(target_arch = "x86_64")]
    if bytes >= SMALL && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: both slices have `bytes` bytes and, being `&mut` and `&`, do not overlap; the processor has AVX2.
        return unsafe { copy_avx2(to.as_mut_ptr().cast(), from.as_ptr().cast(), bytes) };
    }
    let _ = bytes;
    to.copy_from_slice(from);
}

/// From this many bytes of input and output on, a rank's result is written past the caches.
const PAST_CACHES: usize = 32 << 20;

/// The copy function for a result, when input and output have `bytes` bytes together.
pub(crate) fn copy_for<T: Element>(bytes: usize) -> fn(&mut [T], &[T]) {
    if bytes >= PAST_CACHES { copy_past_caches } else { copy }
}

/// Copies `from` to `to`, which are equally long, without keeping `to` in the caches: for data that is not read soon.
pub fn copy_past_caches<T: Element>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    let bytes = size_of_val(from);
    #[cfg(target_arch = "x86_64")]
    if bytes >= SMALL && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: as in `copy`.
        return unsafe { stream_avx2(to.as_mut_ptr().cast(), from.as_ptr().cast(), bytes) };
    }
    let _ = bytes;
    to.copy_from_slice(from);
}

/// Copies `bytes` bytes, at least 32, without fetching the lines that are overwritten.
///
/// # Safety
/// Both pointers are valid for `bytes` bytes that do not overlap.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const STEP: usize = size_of::<__m256i>();
    // SAFETY: every access is inside `bytes`; from `head` on, `to` is aligned to the step. The fence puts these stores
    // before all later ones, as other stores are anyway.
    unsafe {
        let head = to.align_offset(STEP);
        to.copy_from_nonoverlapping(from, head);
        let mut at = head;
        while at + STEP <= bytes {
            _mm256_stream_si256(to.add(at).cast(), _mm256_loadu_si256(from.add(at).cast()));
            at += STEP;
        }
        to.add(at).copy_from_nonoverlapping(from.add(at), bytes - at);
        _mm_sfence();
    }
}

/// Copies `bytes` bytes, at least 128.
///
/// # Safety
/// Both pointers are valid for `bytes` bytes that do not overlap.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256};
    const STEP: usize = 128;
    // SAFETY: every access is inside `bytes`; the last block may overlap the one before it, with the same data.
    unsafe {
        let block = |at: usize| {
            let (from, to) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
            let data = [0, 1, 2, 3].map(|i| _mm256_loadu_si256(from.add(i)));
            for (i, data) in data.into_iter().enumerate() {
                _mm256_storeu_si256(to.add(i), data);
            }
        };
        let mut at = 0;
        while at + STEP <= bytes {
            block(at);
            at += STEP;
        }
        if at < bytes {
            block(bytes - STEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_offset_is_copied_exactly() {
        let from: Vec<u8> = (0..5000).map(|i| (i * 31 % 253) as u8).collect();
        for len in (0..300).chain(SMALL - 2..SMALL + 300).chain([4096, 4097, 4900]) {
            for start in [0, 1, 16, 63] {
                for copy in [0, PAST_CACHES].map(copy_for) {
                    let mut to = vec![0xaa; len + 2];
                    copy(&mut to[1..=len], &from[start..start + len]);
                    assert_eq!(to[1..=len], from[start..start + len], "{len} from {start}");
                    assert_eq!(
                        (to[0], to[len + 1]),
                        (0xaa, 0xaa),
                        "{len} from {start}: nothing else is written"
                    );
                }
            }
        }
    }
}
