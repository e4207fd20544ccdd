//! Slices of elements as bytes.
//!
//! All elements but `bool` are valid for any bytes. Bytes that become `bool`s come from an authenticated rank with the same
//! version of the library, and their header or fingerprint says that they were `bool`s there, so they are 0 or 1. Bytes that
//! were read before the header turned out to be of another call are set to zero.

use crate::element::Element;

/// The bytes of a slice.
pub(crate) fn of<T: Element>(slice: &[T]) -> &[u8] {
    bytemuck::cast_slice(slice)
}

/// The bytes of a slice, to be overwritten by the bytes of another slice of the same type.
pub(crate) fn of_mut<T: Element>(slice: &mut [T]) -> &mut [u8] {
    // SAFETY: same address and extent; u8 has no alignment; what is written comes from a `[T]` (see above).
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), size_of_val(slice)) }
}

/// The first `len` elements in `words`, which hold the bytes of a slice of the same type.
pub(crate) fn view<T: Element>(words: &[u64], len: usize) -> &[T] {
    assert!(len * size_of::<T>() <= size_of_val(words), "{len} elements do not fit");
    // SAFETY: inside the words, which are 8-byte aligned, as no element needs more; their bytes were a `[T]` (see above).
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
}
