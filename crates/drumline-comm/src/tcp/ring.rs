//! The last bytes that were sent over a link, kept until the other side must have read them.
//!
//! Bytes are numbered from the link's beginning. A ring holds those from `end - len` to `end`. An empty ring begins again at its
//! first position, so that short messages always use the same memory, which stays in the caches.

/// The last bytes of a stream, as many as it was made for.
#[derive(Debug)]
pub(super) struct Ring {
    bytes: Box<[u8]>,
    /// The number of the byte at the first position.
    base: u64,
    end: u64,
    len: usize,
}

impl Ring {
    /// The kernel allocates its memory when bytes are first written to it.
    pub(super) fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity].into_boxed_slice(), base: 0, end: 0, len: 0 }
    }

    /// The number of bytes that were added so far.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Adds `len` bytes, which `make` writes; the oldest ones are dropped to make room.
    pub(super) fn push_with(&mut self, len: usize, make: impl FnOnce(&mut [u8])) {
        let (capacity, at) = (self.bytes.len(), self.index(self.end));
        if let Some(bytes) = self.bytes[at..].get_mut(..len) {
            make(bytes);
            self.end += len as u64;
            self.len = (self.len + len).min(capacity);
        } else {
            // They do not fit before the ring's last position.
            let mut bytes = vec![0; len];
            make(&mut bytes);
            self.push_last(&bytes, len);
        }
    }

    /// Adds `bytes`, but keeps only the last `num_kept` of them. If that is not all of them, no earlier byte is kept either.
    pub(super) fn push_last(&mut self, bytes: &[u8], num_kept: usize) {
        let capacity = self.bytes.len();
        let kept = &bytes[bytes.len() - num_kept.min(capacity).min(bytes.len())..];
        self.end += bytes.len() as u64;
        if kept.len() < bytes.len() {
            (self.base, self.len) = (self.end - kept.len() as u64, 0);
        }
        self.len = (self.len + kept.len()).min(capacity);
        let at = self.index(self.end - kept.len() as u64);
        let (first, second) = kept.split_at(kept.len().min(capacity - at));
        self.bytes[at..][..first.len()].copy_from_slice(first);
        self.bytes[..second.len()].copy_from_slice(second);
    }

    /// The other side has read all bytes before number `position`.
    pub(super) fn forget(&mut self, position: u64) {
        let left = usize::try_from(self.end.saturating_sub(position)).unwrap_or(usize::MAX);
        self.len = self.len.min(left);
        if self.len == 0 {
            self.base = self.end;
        }
    }

    /// The bytes from number `from` on, in two slices; `None` if some of them are no longer kept, or were never added.
    pub(super) fn since(&self, from: u64) -> Option<[&[u8]; 2]> {
        let len = usize::try_from(self.end.checked_sub(from)?).ok().filter(|len| *len <= self.len)?;
        let at = self.index(from);
        let first = len.min(self.bytes.len() - at);
        Some([&self.bytes[at..][..first], &self.bytes[..len - first]])
    }

    fn index(&self, position: u64) -> usize {
        ((position - self.base) % self.bytes.len().max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a vector of everything that was ever sent.
        #[test]
        fn holds_the_last_bytes_and_no_others(
            capacity in 0usize..40,
            pushes in prop::collection::vec(
                (prop::collection::vec(any::<u8>(), 0..60), 0u64..700, 0usize..120), 0..20
            ),
            from in 0u64..600,
        ) {
            let (mut ring, mut all, mut oldest) = (Ring::new(capacity), Vec::new(), 0);
            for (bytes, read, kept) in &pushes {
                if *kept < bytes.len() {
                    ring.push_last(bytes, *kept);
                } else {
                    ring.push_with(bytes.len(), |into| into.copy_from_slice(bytes));
                }
                all.extend_from_slice(bytes);
                if *kept < bytes.len() {
                    oldest = (all.len() - kept) as u64;
                }
                prop_assert_eq!(ring.end(), all.len() as u64);
                oldest = oldest.max(all.len().saturating_sub(capacity) as u64);
                // Often the other side has read nothing new; at most it has read everything.
                if *read <= all.len() as u64 {
                    ring.forget(*read);
                    oldest = oldest.max(*read);
                }
            }
            let held = ring.since(from).map(|pieces| pieces.concat());
            let expected = (oldest..=all.len() as u64).contains(&from).then(|| all[from as usize..].to_vec());
            prop_assert_eq!(held, expected);
        }
    }
}
