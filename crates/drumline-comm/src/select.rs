//! Which algorithm a call uses: a pure function of its size, the number of ranks and whether each has a core of its own, with
//! the same result on all ranks. The thresholds were measured (see `bench/`).

use crate::shm::{CoreShare, INLINE, STAGE};

/// How ranks that share memory reduce private buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NodeReduce {
    /// The data is in the flag's cache line.
    Inline,
    /// Every rank reduces everything, `chunk` elements at a time.
    OneShot { chunk: usize },
    /// Each rank reduces a part, `chunk` elements at a time.
    TwoPhase { chunk: usize },
}

/// From this many bytes on, ranks check whether their buffers are symmetric.
pub(crate) const DIRECT_MIN: usize = 32 << 10;

/// Up to this many bytes every rank reduces everything, however many ranks there are: one round instead of two.
const ONE_SHOT_MAX: usize = 16 << 10;

/// The algorithm for `bytes` bytes of elements of `size` bytes among `ranks` ranks of one node.
pub(crate) fn node_reduce(bytes: usize, size: usize, ranks: usize, core_share: CoreShare) -> NodeReduce {
    if bytes <= INLINE {
        return NodeReduce::Inline;
    }
    let chunk = node_chunk(bytes, core_share) / size;
    if ranks == 2 || bytes <= ONE_SHOT_MAX {
        NodeReduce::OneShot { chunk }
    } else {
        NodeReduce::TwoPhase { chunk }
    }
}

/// Bytes moved in one round. A message of medium size is cut into chunks, so that staging one chunk overlaps reading another,
/// if there are cores to do both.
pub(crate) fn node_chunk(bytes: usize, core_share: CoreShare) -> usize {
    match bytes {
        0..=32_768 => bytes.next_multiple_of(64).max(64),
        _ if core_share == CoreShare::Shared => bytes.next_multiple_of(64).min(STAGE),
        32_769..=262_144 => 32 << 10,
        262_145..=1_048_576 => 128 << 10,
        _ => STAGE,
    }
}

/// How ranks with links to each other reduce.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LinkReduce {
    /// There is no other rank.
    Alone,
    /// Every rank sends everything to every rank: one step.
    Everything,
    /// Each rank reduces a part: two steps, the least data.
    Parts,
}

/// Up to this many bytes a second step costs more than sending everything to everyone.
const EVERYTHING_MAX: usize = 32 << 10;

/// The algorithm for `bytes` bytes among `ranks` ranks with links.
pub(crate) fn link_reduce(bytes: usize, ranks: usize) -> LinkReduce {
    match ranks {
        1 => LinkReduce::Alone,
        _ if bytes * (ranks - 1) <= EVERYTHING_MAX => LinkReduce::Everything,
        _ => LinkReduce::Parts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_fit_the_flag() {
        assert_eq!(node_reduce(48, 4, 2, CoreShare::Own), NodeReduce::Inline);
        assert_eq!(node_reduce(49, 1, 2, CoreShare::Own), NodeReduce::OneShot { chunk: 64 });
    }

    #[test]
    fn two_ranks_never_split_the_work() {
        assert!(matches!(node_reduce(1 << 30, 4, 2, CoreShare::Own), NodeReduce::OneShot { .. }));
        assert!(matches!(node_reduce(1 << 30, 4, 3, CoreShare::Shared), NodeReduce::TwoPhase { .. }));
    }

    #[test]
    fn a_chunk_fits_a_staging_buffer() {
        for bytes in (0..22).map(|power| 1usize << power).flat_map(|bytes| [bytes - 1, bytes, bytes + 1]) {
            for core_share in [CoreShare::Own, CoreShare::Shared] {
                assert!((1..=STAGE).contains(&node_chunk(bytes, core_share)), "{bytes} {core_share:?}");
            }
        }
    }
}
