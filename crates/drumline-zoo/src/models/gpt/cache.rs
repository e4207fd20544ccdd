//! The cache of keys and values, so that each new token computes only its own place.

use tch::Tensor;

/// The number of places by which the capacity grows, so that memory is not copied for each token.
const ROOM: i64 = 64;

/// The cache of all blocks.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
}

impl KvCache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| LayerCache::default()).collect() }
    }

    /// The number of cached places.
    pub fn len(&self) -> i64 {
        self.layers.first().map_or(0, LayerCache::len)
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn layers(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }
}

/// The cache of one block: `[texts, heads, capacity, head size]`, of which the first `len` places are used.
#[derive(Debug, Default)]
pub(super) struct LayerCache {
    memory: Option<[Tensor; 2]>,
    len: i64,
}

impl LayerCache {
    pub(super) fn len(&self) -> i64 {
        self.len
    }

    /// Appends keys and values, and returns all of them.
    pub(super) fn extended(&mut self, keys: &Tensor, values: &Tensor) -> (Tensor, Tensor) {
        let new = keys.size()[2];
        let all = self.len + new;
        let memory = match self.memory.take() {
            Some(memory) if memory[0].size()[2] >= all => memory,
            before => self.larger(before.as_ref(), [keys, values], all),
        };
        for (memory, new_ones) in memory.iter().zip([keys, values]) {
            memory.narrow(2, self.len, new).copy_(new_ones);
        }
        self.len = all;
        let taken = [0, 1].map(|part| memory[part].narrow(2, 0, all));
        self.memory = Some(memory);
        let [keys, values] = taken;
        (keys, values)
    }

    fn larger(&self, before: Option<&[Tensor; 2]>, like: [&Tensor; 2], places: i64) -> [Tensor; 2] {
        let mut size = like[0].size();
        size[2] = places + ROOM;
        let memory = like.map(|like| like.new_empty(&size[..], (like.kind(), like.device())));
        for (old, new) in before.into_iter().flatten().zip(&memory) {
            new.narrow(2, 0, self.len).copy_(&old.narrow(2, 0, self.len));
        }
        memory
    }
}
