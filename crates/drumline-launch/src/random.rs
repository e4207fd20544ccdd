//! Unpredictable random numbers.

use drumline_rendezvous::JobKey;

/// 128 random bits.
pub(crate) fn random_number() -> u128 {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&JobKey::random().as_bytes()[..16]);
    u128::from_le_bytes(bytes)
}
