//! The last bytes of a stream, in bounded memory.

use std::collections::VecDeque;

/// Keeps the last `limit` bytes pushed.
#[derive(Debug)]
pub(crate) struct Tail {
    bytes: VecDeque<u8>,
    limit: usize,
}

impl Tail {
    pub(crate) fn new(limit: usize) -> Self {
        Self { bytes: VecDeque::new(), limit }
    }

    pub(crate) fn push(&mut self, new: &[u8]) {
        let new = &new[new.len().saturating_sub(self.limit)..];
        let excess = (self.bytes.len() + new.len()).saturating_sub(self.limit);
        self.bytes.drain(..excess);
        self.bytes.extend(new);
    }

    /// The bytes held.
    pub(crate) fn held(&self) -> Vec<u8> {
        self.bytes.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_last_bytes_only() {
        for (limit, kept) in [(0, ""), (1, "f"), (4, "cdef"), (6, "abcdef"), (9, "abcdef")] {
            let mut tail = Tail::new(limit);
            for part in ["abc", "", "de", "f"] {
                tail.push(part.as_bytes());
            }
            assert_eq!(tail.held(), kept.as_bytes(), "limit {limit}");
        }
    }
}
