//! A library that replaces NCCL, lets ranks share a GPU, and fails on demand; `nccl_stand_in/nccl.cpp` describes it.

use std::fs;

use anyhow::Result;
use tempfile::TempDir;

use crate::ranks::Ranks;

/// The library, as the build script compiled it.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnccl_stand_in.so"));

/// The library as a file, until this is dropped.
#[derive(Debug)]
pub struct StandIn(TempDir);

impl StandIn {
    /// Writes it to a temporary folder.
    pub fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("libnccl_stand_in.so"), LIBRARY)?;
        Ok(Self(folder))
    }

    /// The ranks, with this library instead of NCCL.
    pub fn with(&self, ranks: &Ranks) -> Ranks {
        ranks.clone().env([("DRUMLINE_TEST_NCCL", self.0.path().join("libnccl_stand_in.so"))])
    }
}
