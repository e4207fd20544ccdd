//! The random number generators of all ranks in one file, and those of a rank that has none there.
//!
//! Tensors of bytes: `0.cpu`, `0.cuda.0`, `0.cuda.1`, `1.cpu`, …; the first number is the rank.

use drumline_torch::{Named, RngState, TorchError, bytes, tensor_from_vec};

/// All ranks' states as tensors.
pub(super) fn to_tensors(states: &[RngState]) -> Result<Vec<Named>, TorchError> {
    let mut tensors = Vec::new();
    for (rank, state) in states.iter().enumerate() {
        tensors.push(named(format!("{rank}.cpu"), &state.cpu)?);
        for (gpu, state) in state.cuda.iter().enumerate() {
            tensors.push(named(format!("{rank}.cuda.{gpu}"), state)?);
        }
    }
    Ok(tensors)
}

fn named(name: String, state: &[u8]) -> Result<Named, TorchError> {
    Ok(Named { name, tensor: tensor_from_vec(state.to_vec(), &[state.len() as i64])? })
}

/// The origin of a rank's generators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// From the checkpoint.
    Saved,
    /// Seeded from rank 0's state and the rank's number, because the checkpoint has none for this rank.
    Derived,
}

/// The state for `rank`.
pub(super) fn for_rank(tensors: &[Named], rank: usize) -> Result<(RngState, Origin), TorchError> {
    if let Some(cpu) = find(tensors, &format!("{rank}.cpu"))? {
        let gpus = (0..).map_while(|gpu| find(tensors, &format!("{rank}.cuda.{gpu}")).transpose());
        return Ok((RngState { cpu, cuda: gpus.collect::<Result<_, _>>()? }, Origin::Saved));
    }
    let first = find(tensors, "0.cpu")?.unwrap_or_default();
    let seed = mixed((u64::from(crc32fast::hash(&first)) << 32) | rank as u64);
    Ok((RngState::seeded(seed)?, Origin::Derived))
}

fn find(tensors: &[Named], name: &str) -> Result<Option<Vec<u8>>, TorchError> {
    let found = tensors.iter().find(|named| named.name == name);
    found.map(|named| Ok(bytes(&named.tensor)?.to_vec())).transpose()
}

/// Spreads adjacent numbers over all 64 bits (the finaliser of MurmurHash3).
fn mixed(mut number: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        number = (number ^ (number >> 33)).wrapping_mul(factor);
    }
    number ^ (number >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_finds_its_own_and_new_ones_differ() {
        let states =
            [1, 2].map(|n| RngState { cpu: vec![n; 8], cuda: vec![vec![n + 10; 16], vec![n + 20; 16]] });
        let tensors = to_tensors(&states).unwrap();
        for (rank, state) in states.iter().enumerate() {
            assert_eq!(for_rank(&tensors, rank).unwrap(), (state.clone(), Origin::Saved));
        }
        let (third, origin) = for_rank(&tensors, 2).unwrap();
        assert_eq!(origin, Origin::Derived);
        assert_eq!(for_rank(&tensors, 2).unwrap().0, third);
        assert_ne!(for_rank(&tensors, 3).unwrap().0, third);
    }
}
