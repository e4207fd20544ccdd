//! Streams in memory that deliver bytes in pieces of any size: for tests and fuzzing of the router.

use std::collections::VecDeque;
use std::time::Instant;

use super::streams::Carrier;
use crate::shm::{Stop, Watch};

/// What other ranks have sent, and in what pieces it arrives.
#[derive(Debug, Default)]
pub(super) struct Trickle {
    /// What is yet to be read from each rank.
    pub(super) from: Vec<VecDeque<u8>>,
    /// The most that each of the next reads returns; after these a read returns all there is.
    pub(super) pieces: VecDeque<usize>,
    /// What was written to each rank.
    pub(super) to: Vec<Vec<u8>>,
}

impl Trickle {
    pub(super) fn new(ranks: usize) -> Self {
        Self { from: vec![VecDeque::new(); ranks], pieces: VecDeque::new(), to: vec![Vec::new(); ranks] }
    }
}

impl Carrier for Trickle {
    fn write(&mut self, _: &Watch<'_>, to: usize, bytes: &[u8]) -> Result<usize, Stop> {
        self.to[to].extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Stop> {
        let most = self.pieces.pop_front().unwrap_or(usize::MAX);
        let len = into.len().min(self.from[from].len()).min(most);
        for (place, byte) in into.iter_mut().zip(self.from[from].drain(..len)) {
            *place = byte;
        }
        Ok(len)
    }

    fn end(&mut self, from: usize) {
        self.from[from].clear();
    }

    fn end_of(&mut self, _: &Watch<'_>, _: usize) -> Option<Stop> {
        None
    }

    /// Nothing more arrives unless a piece of length 0 has held something back.
    fn wait(&mut self, _: &Watch<'_>, _: Instant, senders: &[usize], _: &[usize]) -> Result<(), Stop> {
        if senders.iter().any(|&rank| !self.from[rank].is_empty()) { Ok(()) } else { Err(Stop::TimedOut) }
    }
}
