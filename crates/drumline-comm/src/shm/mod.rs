//! Ranks of one node: shared memory, the flag protocol, and the collectives on top of them.
//!
//! Almost all unsafe code of the crate is here. The layers, from the bottom:
//! `segment` (mapped memory) → `line`, `record`, `ring` (what is written there, and by whom) → `wait` → `node` (the round) →
//! `all_reduce`, `exchange` (collectives), `heap` (symmetric buffers), `mail` (point to point), `board` (last calls);
//! `descriptors` passes file descriptors to all ranks.
#![allow(unsafe_code)]

mod all_reduce;
mod board;
pub(crate) mod bytes;
mod copy;
mod descriptors;
mod exchange;
mod heap;
mod layout;
mod line;
mod mail;
mod node;
mod record;
mod ring;
mod segment;
mod wait;

pub(crate) use all_reduce::{Keep, Reduction};
pub(crate) use board::Board;
pub use copy::copy_past_caches;
pub(crate) use descriptors::{DescriptorListener, Descriptors};
pub(crate) use exchange::Input;
pub(crate) use heap::{Heap, Region, region_len};
pub use heap::{HeapBuffer, SharedBuffer};
pub(crate) use layout::{Layout, STAGE};
pub(crate) use line::INLINE;
pub(crate) use mail::Mail;
pub(crate) use node::{Context, Node};
pub(crate) use record::KnownTexts;
pub use segment::{FirstBytes, available_memory};
pub(crate) use segment::{Segment, allocate, create, create_within_memory, part};
pub(crate) use wait::{CoreShare, Stop, Watch};

/// Brings the cache line of `place` to this core, ready to be written.
#[cfg(all(target_arch = "x86_64", not(loom)))]
#[inline]
fn prefetch_for_writing<T>(place: &T) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a prefetch reads and writes nothing.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(std::ptr::from_ref(place).cast()) };
}
