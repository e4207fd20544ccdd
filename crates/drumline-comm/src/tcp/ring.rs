//! The last bytes that were sent over a link, kept until the other side must have read them.
//!
//! Bytes are numbered from the link's beginning. A ring holds those from `end - len` to `end`.

/// The last bytes of a stream, as many as it was made for.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: Box<[u8]>,
    end: u64,
    len: usize,
}

impl Ring {
    /// Its memory is taken by the system only as it is filled.
    pub(super) fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity.max(1)].into_boxed_slice(), end: 0, len: 0 }
    }

    /// The number of bytes that have gone through it.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Adds `bytes`; the oldest make room.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let capacity = self.bytes.len();
        let kept = &bytes[bytes.len().saturating_sub(capacity)..];
        self.end += bytes.len() as u64;
        self.len = (self.len + kept.len()).min(capacity);
        let at = self.index(self.end - kept.len() as u64);
        let (first, second) = kept.split_at(kept.len().min(capacity - at));
        self.bytes[at..][..first.len()].copy_from_slice(first);
        self.bytes[..second.len()].copy_from_slice(second);
    }

    /// The bytes from number `from` on, in two pieces; `None` if some of them are no longer there, or never were.
    pub(super) fn since(&self, from: u64) -> Option<[&[u8]; 2]> {
        let len = usize::try_from(self.end.checked_sub(from)?).ok().filter(|len| *len <= self.len)?;
        let at = self.index(from);
        let first = len.min(self.bytes.len() - at);
        Some([&self.bytes[at..][..first], &self.bytes[..len - first]])
    }

    fn index(&self, position: u64) -> usize {
        (position % self.bytes.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain vector of everything that was ever sent.
        #[test]
        fn holds_the_last_bytes_and_no_others(
            capacity in 1usize..40,
            pushes in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..20),
            from in 0u64..600,
        ) {
            let (mut ring, mut all) = (Ring::new(capacity), Vec::new());
            for bytes in &pushes {
                ring.push(bytes);
                all.extend_from_slice(bytes);
                prop_assert_eq!(ring.end(), all.len() as u64);
            }
            let oldest = all.len().saturating_sub(capacity) as u64;
            let held = ring.since(from).map(|pieces| pieces.concat());
            let expected = (oldest..=all.len() as u64).contains(&from).then(|| all[from as usize..].to_vec());
            prop_assert_eq!(held, expected);
        }
    }
}
