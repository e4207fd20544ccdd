//! Keys and values of the places that a text has so far, so that each new token costs one place.

use tch::Tensor;

/// Places that are added at a time: memory is not moved for each.
const ROOM: i64 = 64;

/// The cache of all blocks.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Kept>,
}

impl KvCache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| Kept::default()).collect() }
    }

    /// Places that it has.
    pub fn len(&self) -> i64 {
        self.layers.first().map_or(0, Kept::len)
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn layers(&mut self) -> &mut [Kept] {
        &mut self.layers
    }
}

/// That of one block: texts × heads × room × head's size, of which `len` places are taken.
#[derive(Debug, Default)]
pub(super) struct Kept {
    memory: Option<[Tensor; 2]>,
    len: i64,
}

impl Kept {
    pub(super) fn len(&self) -> i64 {
        self.len
    }

    /// All keys and values, with these behind them.
    pub(super) fn extended(&mut self, keys: &Tensor, values: &Tensor) -> (Tensor, Tensor) {
        let new = keys.size()[2];
        let all = self.len + new;
        let memory = match self.memory.take() {
            Some(memory) if memory[0].size()[2] >= all => memory,
            before => self.larger(before, (keys, values), all),
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

    fn larger(&self, before: Option<[Tensor; 2]>, like: (&Tensor, &Tensor), places: i64) -> [Tensor; 2] {
        let mut size = like.0.size();
        size[2] = places + ROOM;
        let memory = [like.0, like.1].map(|like| like.new_empty(&size[..], (like.kind(), like.device())));
        for (old, new) in before.iter().flatten().zip(&memory) {
            new.narrow(2, 0, self.len).copy_(&old.narrow(2, 0, self.len));
        }
        memory
    }
}
