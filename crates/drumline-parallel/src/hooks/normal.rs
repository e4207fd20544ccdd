//! Random numbers as PyTorch draws them, without using the generator of the process.
//!
//! numpy's `RandomState(seed).randint` provides a seed for each draw, with which torch's `manual_seed(…)` and `randn`
//! on the CPU draw normal numbers. Both use the Mersenne Twister. So runs can be compared with PyTorch's number by
//! number (up to the rounding of logarithms and cosines).

use std::f32::consts::TAU;

use rand_mt::Mt;

/// A sequence of seeds, the same on all ranks.
#[derive(Debug)]
pub(super) struct Seeds(Mt);

impl Seeds {
    pub(super) fn new(seed: u32) -> Self {
        Self(Mt::new(seed))
    }

    /// `RandomState.randint(1_000_000_000)`: the low 30 bits of the first draw that is small enough.
    pub(super) fn next(&mut self) -> u32 {
        loop {
            let draw = self.0.next_u32() & ((1 << 30) - 1);
            if draw < 1_000_000_000 {
                return draw;
            }
        }
    }
}

/// torch's generator on the CPU after `manual_seed`.
#[derive(Debug)]
pub(super) struct Normal {
    bits: Mt,
    /// The second number of a pair: small draws are made in pairs.
    spare: Option<f64>,
}

impl Normal {
    pub(super) fn new(seed: u32) -> Self {
        Self { bits: Mt::new(seed), spare: None }
    }

    /// `randn(len)`. At least 16 numbers are drawn in blocks of 16; for a remainder the last 16 numbers are drawn
    /// again.
    pub(super) fn draw(&mut self, len: usize) -> Vec<f32> {
        if len < 16 {
            return (0..len).map(|_| self.single() as f32).collect();
        }
        let mut values: Vec<f32> = (0..len).map(|_| self.uniform()).collect();
        values.chunks_exact_mut(16).for_each(block);
        if !len.is_multiple_of(16) {
            let last = &mut values[len - 16..];
            last.fill_with(|| self.uniform());
            block(last);
        }
        values
    }

    fn uniform(&mut self) -> f32 {
        (self.bits.next_u32() & ((1 << 24) - 1)) as f32 / (1 << 24) as f32
    }

    fn uniform_double(&mut self) -> f64 {
        let (high, low) = (u64::from(self.bits.next_u32()), u64::from(self.bits.next_u32()));
        ((high << 32 | low) & ((1 << 53) - 1)) as f64 / (1u64 << 53) as f64
    }

    fn single(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let (angle, distance) = (self.uniform_double(), self.uniform_double());
        let radius = (-2.0 * (-distance).ln_1p()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * angle).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }
}

/// The Box-Muller transform of 16 uniform numbers.
fn block(values: &mut [f32]) {
    let (first, second) = values.split_at_mut(8);
    for (a, b) in first.iter_mut().zip(second) {
        let radius = (-2.0 * (1.0 - *a).ln()).sqrt();
        let (sin, cos) = (TAU * *b).sin_cos();
        (*a, *b) = (radius * cos, radius * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    #[test]
    fn seeds_equal_numpys() {
        let mut seeds = Seeds::new(0);
        // RandomState(0).randint(1_000_000_000), three times.
        assert_eq!([seeds.next(), seeds.next(), seeds.next()], [209_652_396, 398_764_591, 924_231_285]);
    }

    /// The only test of this binary that draws from the generator of the process.
    #[test]
    fn numbers_equal_torchs() {
        tch::manual_seed(209_652_396);
        let mut normal = Normal::new(209_652_396);
        for len in [12, 20, 3, 64, 1, 7, 129] {
            let theirs: Vec<f32> = Tensor::randn([len], (Kind::Float, Device::Cpu)).try_into().unwrap();
            for (ours, theirs) in normal.draw(len as usize).iter().zip(theirs) {
                assert!((ours - theirs).abs() < 1e-5, "{len}: {ours} {theirs}");
            }
        }
    }
}
