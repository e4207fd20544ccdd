//! The indices of PyTorch's sampler, read for the tests (`bench/oracle/sampler.py`).

use serde::Deserialize;

use super::SamplerOptions;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/sampler.json");

#[derive(Deserialize)]
pub(super) struct Golden {
    pub(super) torch: String,
    pub(super) large: Vec<Large>,
    pub(super) cases: Vec<Case>,
}

/// A single long permutation.
#[derive(Deserialize)]
pub(super) struct Large {
    pub(super) length: usize,
    pub(super) seed: u64,
    pub(super) first: Vec<usize>,
}

/// The shares of all ranks: as lists, or as counts and checksums.
#[derive(Deserialize, Debug)]
pub(super) struct Case {
    length: usize,
    pub(super) world: usize,
    pub(super) epoch: u64,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
    #[serde(default)]
    indices: Vec<Vec<usize>>,
    #[serde(default)]
    counts: Vec<usize>,
    #[serde(default)]
    crcs: Vec<u32>,
}

impl Case {
    pub(super) fn options(&self, rank: usize) -> SamplerOptions {
        let Self { length: num_samples, world: num_replicas, shuffle, seed, drop_last, .. } = *self;
        SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last }
    }

    pub(super) fn check(&self, rank: usize, got: &[usize]) {
        if self.crcs.is_empty() {
            assert_eq!(got, self.indices[rank], "rank {rank} of {self:?}");
        } else {
            assert_eq!(
                (got.len(), crc(got)),
                (self.counts[rank], self.crcs[rank]),
                "rank {rank} of {self:?}"
            );
        }
    }
}

pub(super) fn read() -> Golden {
    serde_json::from_str(&std::fs::read_to_string(PATH).unwrap()).unwrap()
}

/// The checksum of the indices as 64-bit little-endian numbers.
pub(super) fn crc(indices: &[usize]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    indices.iter().for_each(|index| hasher.update(&(*index as u64).to_le_bytes()));
    hasher.finalize()
}
