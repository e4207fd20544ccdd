//! A library in the place of NCCL, which lets ranks share a GPU and fails on demand; what it does says `nccl_stand_in/nccl.cpp`.

use std::fs;

use anyhow::Result;
use rank_test::Ranks;
use tempfile::TempDir;

/// As the build script made it.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnccl_stand_in.so"));

/// The library as a file, until this is dropped.
pub(crate) struct StandIn(TempDir);

impl StandIn {
    pub(crate) fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("libnccl_stand_in.so"), LIBRARY)?;
        Ok(Self(folder))
    }

    /// The ranks, with it instead of NCCL.
    pub(crate) fn with(&self, ranks: &Ranks) -> Ranks {
        ranks.clone().env([("DRUMLINE_TEST_NCCL", self.0.path().join("libnccl_stand_in.so"))])
    }
}
