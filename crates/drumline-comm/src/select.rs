//! Which algorithm serves a call: a pure function of its size, the number of ranks and whether they have cores enough, on
//! which all ranks agree. The cut-offs were measured (see `bench/`).

use crate::shm::{INLINE, Pace, STAGE};

/// How ranks that share memory reduce private buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NodeReduce {
    /// In the flag's cache line.
    Inline,
    /// Everyone reduces everything, `chunk` elements at a time.
    OneShot { chunk: usize },
    /// Each reduces a part, `chunk` elements at a time.
    TwoPhase { chunk: usize },
}

/// From this many bytes on ranks look whether their buffers are symmetric.
pub(crate) const DIRECT_MIN: usize = 32 << 10;

/// Up to this many bytes everyone reduces everything, however many ranks there are: one round instead of two.
const ONE_SHOT_MAX: usize = 16 << 10;

/// The choice for `bytes` bytes of elements of `size` bytes among `ranks` ranks of one node.
pub(crate) fn node_reduce(bytes: usize, size: usize, ranks: usize, pace: Pace) -> NodeReduce {
    if bytes <= INLINE {
        return NodeReduce::Inline;
    }
    let chunk = node_chunk(bytes, pace) / size;
    if ranks == 2 || bytes <= ONE_SHOT_MAX {
        NodeReduce::OneShot { chunk }
    } else {
        NodeReduce::TwoPhase { chunk }
    }
}

/// Bytes moved in one round: a message of middling size is cut so that staging one chunk overlaps reading another, if
/// there are cores to do both.
pub(crate) fn node_chunk(bytes: usize, pace: Pace) -> usize {
    match bytes {
        0..=32_768 => bytes.next_multiple_of(64).max(64),
        _ if pace == Pace::Crowded => bytes.next_multiple_of(64).min(STAGE),
        32_769..=262_144 => 32 << 10,
        262_145..=1_048_576 => 128 << 10,
        _ => STAGE,
    }
}

/// How ranks with links to each other reduce.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LinkReduce {
    /// There is nobody else.
    Alone,
    /// Everyone sends everything to everyone: one step.
    Everything,
    /// Each owns a part: two steps, the least data.
    Parts,
}

/// Up to this many bytes a second step costs more than sending everything to everyone.
const EVERYTHING_MAX: usize = 32 << 10;

/// The choice for `bytes` bytes among `ranks` ranks with links.
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
    fn small_messages_ride_in_the_flag() {
        assert_eq!(node_reduce(48, 4, 2, Pace::Roomy), NodeReduce::Inline);
        assert_eq!(node_reduce(49, 1, 2, Pace::Roomy), NodeReduce::OneShot { chunk: 64 });
    }

    #[test]
    fn two_ranks_never_split_the_work() {
        assert!(matches!(node_reduce(1 << 30, 4, 2, Pace::Roomy), NodeReduce::OneShot { .. }));
        assert!(matches!(node_reduce(1 << 30, 4, 3, Pace::Crowded), NodeReduce::TwoPhase { .. }));
    }

    #[test]
    fn a_chunk_fits_a_staging_place() {
        for bytes in (0..22).map(|power| 1usize << power).flat_map(|bytes| [bytes - 1, bytes, bytes + 1]) {
            for pace in [Pace::Roomy, Pace::Crowded] {
                assert!((1..=STAGE).contains(&node_chunk(bytes, pace)), "{bytes} {pace:?}");
            }
        }
    }
}
