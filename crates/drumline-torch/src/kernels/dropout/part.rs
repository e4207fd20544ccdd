//! Dropout of a part of a tensor: a rank that has some places of a dim drops what it would drop of the whole.
//!
//! ```text
//!   whole  [2 samples, 6 places, 4]     keep keep drop …       index of an element in its sample: place · 4 + feature
//!   part   places 1 2 and 5             elements 4 to 11, and 20 to 23, of each sample
//! ```
//! So masks do not depend on how ranks cut activations. On a GPU the mask of the whole is made, and the part is taken of it.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::super::cuda::Dropped;
use super::super::floats::floats_mut;
use super::{BLOCK, Dropout, HostMask, Mask, Rate};
use crate::error::TorchError;
use crate::function::autograd_function;

/// The elements of a whole tensor that a part has: some places along one dim, and all of the other dims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartOf {
    /// The dim, which is not the first: that one has the samples.
    pub dim: usize,
    /// The length of the whole along it.
    pub whole: i64,
    /// The places of the part, in its order.
    pub places: Vec<Range<i64>>,
}

impl PartOf {
    fn num_places(&self) -> i64 {
        self.places.iter().map(|range| range.end - range.start).sum()
    }

    fn check(&self, xs: &Tensor) -> Result<(), TorchError> {
        let size = xs.size();
        let is_within = self.places.iter().all(|range| range.start >= 0 && range.end <= self.whole);
        if self.dim > 0 && size.get(self.dim) == Some(&self.num_places()) && is_within {
            return Ok(());
        }
        let expected = format!(
            "{} elements along dim {}, after the first, as the part has",
            self.num_places(),
            self.dim
        );
        Err(TorchError::value("the size of a part", format!("{size:?}"), &expected))
    }

    fn whole_size(&self, xs: &Tensor) -> Vec<i64> {
        let mut size = xs.size();
        size[self.dim] = self.whole;
        size
    }

    /// The part of a tensor that is whole.
    fn of(&self, whole: &Tensor) -> Result<Tensor, TorchError> {
        let dim = self.dim as i64;
        let ranges =
            self.places.iter().map(|range| whole.f_narrow(dim, range.start, range.end - range.start));
        Ok(Tensor::f_cat(&ranges.collect::<Result<Vec<_>, _>>()?, dim)?)
    }

    /// The factors of the part's elements, of which `size` is the size.
    fn factors(&self, mask: &HostMask, size: &[i64]) -> Result<Tensor, TorchError> {
        let mut factors = Tensor::f_empty(size, (Kind::Float, Device::Cpu))?;
        let inner = size[self.dim + 1..].iter().product::<i64>() as usize;
        let rows = size[..self.dim].iter().product::<i64>() as usize;
        let rows_of_sample = (rows / mask.seeds.len().max(1)).max(1);
        let mut rest = floats_mut(&mut factors)?;
        for row in 0..rows {
            let Some(seed) = mask.seeds.get(row / rows_of_sample) else { break };
            let how = Dropout { seed: *seed, rate: mask.rate };
            let first = (row % rows_of_sample) * self.whole as usize;
            for range in &self.places {
                let (start, len) =
                    ((first + range.start as usize) * inner, (range.end - range.start) as usize * inner);
                let (own, after) = rest.split_at_mut(len);
                how.fill(own, start);
                rest = after;
            }
        }
        Ok(factors)
    }
}

impl Dropout {
    /// The factors of the elements from `start` on.
    fn fill(&self, mut out: &mut [f32], start: usize) {
        let (mut block, mut skipped) = (start / BLOCK, start % BLOCK);
        while !out.is_empty() {
            let len = (BLOCK - skipped).min(out.len());
            let (now, rest) = out.split_at_mut(len);
            now.copy_from_slice(&self.factors(block)[skipped..skipped + len]);
            (out, block, skipped) = (rest, block + 1, 0);
        }
    }
}

/// A mask of the whole, of which a part is used.
struct PartMask {
    mask: Mask,
    part: PartOf,
}

impl PartMask {
    fn draw(xs: &Tensor, rate: Rate, part: &PartOf) -> Result<Self, TorchError> {
        let drawn = match xs.device() {
            Device::Cpu => Mask::draw(xs, rate)?,
            device => Mask::draw(&Tensor::f_empty(part.whole_size(xs), (xs.kind(), device))?, rate)?,
        };
        let mask = drawn.map_or_else(|| HostMask::random(rate).map(Mask::Host), Ok)?;
        Ok(Self { mask, part: part.clone() })
    }

    fn times(&self, xs: &Tensor) -> Result<Tensor, TorchError> {
        let factors = match &self.mask {
            Mask::Host(mask) => {
                self.part.factors(mask, &xs.size())?.f_to_device(xs.device())?.f_to_kind(xs.kind())?
            }
            Mask::Cuda(mask) => {
                // The scale is not rounded to 16 bits, as in the kernel of the whole.
                let ones = Tensor::f_ones(self.part.whole_size(xs), (Kind::Float, xs.device()))?;
                self.part.of(&mask.run(&ones, Dropped::Alone)?)?
            }
        };
        Ok(xs.f_mul(&factors)?.f_to_kind(xs.kind())?)
    }
}

/// [`dropout`](crate::dropout) of a part of a tensor: the elements are dropped that dropout of the whole drops.
///
/// ```
/// use drumline_torch::{Masks, PartOf, StepSamples, dropout, dropout_part};
/// use tch::{Device, Kind, Tensor};
///
/// let masks = Masks::new(7, Device::Cpu)?;
/// let samples = StepSamples { first: 0, stride: 1, count: 2 };
/// let ones = Tensor::ones([2, 6, 5], (Kind::Float, Device::Cpu));
/// let whole = {
///     let _scope = masks.enter(samples);
///     dropout(&ones, 0.5)?
/// };
/// let part = PartOf { dim: 1, whole: 6, places: vec![1..3, 5..6] };
/// let _scope = masks.enter(samples);
/// let own = dropout_part(&ones.narrow(1, 0, 3), 0.5, &part)?;
/// assert_eq!(own.narrow(1, 0, 2), whole.narrow(1, 1, 2));
/// assert_eq!(own.narrow(1, 2, 1), whole.narrow(1, 5, 1));
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn dropout_part(xs: &Tensor, p: f64, part: &PartOf) -> Result<Tensor, TorchError> {
    if p == 0.0 {
        return Ok(xs.shallow_clone());
    }
    part.check(xs)?;
    let mask = PartMask::draw(xs, Rate::of(p)?, part)?;
    let later = PartMask { mask: mask.mask.shared(), part: mask.part.clone() };
    let outputs = autograd_function(
        &[xs],
        |_, inputs| Ok(vec![mask.times(inputs[0])?]),
        move |_, grads| Ok(vec![grads[0].as_ref().map(|grad| later.times(grad)).transpose()?]),
    );
    Ok(outputs?.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Masks, StepSamples, dropout};

    fn drawn<R>(count: u64, draw: impl FnOnce() -> R) -> R {
        let masks = Masks::new(11, Device::Cpu).unwrap();
        let _scope = masks.enter(StepSamples { first: 3, stride: 2, count });
        draw()
    }

    #[test]
    fn parts_join_to_the_dropout_of_the_whole() {
        for (size, dim, kind) in [
            ([4, 9, 7], 1, Kind::Float),
            ([4, 6, 35], 2, Kind::Float),
            ([3, 5, 33], 2, Kind::Double),
            ([4, 70, 3], 1, Kind::BFloat16),
        ] {
            let xs = Tensor::ones(size, (kind, Device::Cpu)).set_requires_grad(true);
            let whole = drawn(4, || dropout(&xs, 0.4)).unwrap();
            whole.sum(Kind::Double).backward();
            let len = size[dim];
            for places in [vec![0..2, len - 1..len], vec![2..len - 1], vec![1..1]] {
                let part = PartOf { dim, whole: len, places };
                let own = part.of(&xs.detach()).unwrap().set_requires_grad(true);
                let out = drawn(4, || dropout_part(&own, 0.4, &part)).unwrap();
                assert_eq!(out, part.of(&whole).unwrap(), "{size:?} {part:?}");
                out.sum(Kind::Double).backward();
                assert_eq!(own.grad(), part.of(&xs.grad()).unwrap());
            }
        }
    }

    #[test]
    fn parts_of_another_size_are_refused() {
        let xs = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
        for part in [
            PartOf { dim: 1, whole: 6, places: vec![0..2] },
            PartOf { dim: 0, whole: 4, places: vec![0..2] },
            PartOf { dim: 1, whole: 2, places: vec![0..3] },
        ] {
            let said = dropout_part(&xs, 0.5, &part).unwrap_err().to_string();
            assert!(said.contains("the size of a part is [2, 3]"), "{said}");
        }
        assert_eq!(dropout_part(&xs, 0.0, &PartOf { dim: 0, whole: 1, places: Vec::new() }).unwrap(), xs);
    }
}
