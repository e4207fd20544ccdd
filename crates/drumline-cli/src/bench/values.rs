//! The values that ranks put into their buffers, and the expected results: small whole numbers, so that every sum is exact.
//!
//! A value depends on its index (on each byte of it), on the rank and on the turn. So a part at a wrong place, of a wrong
//! rank or of an earlier turn is noticed.

use anyhow::{bail, ensure};
use drumline_comm::{DType, Element, bf16, f16};

use super::op::{Op, Origin, Place};

/// A number type whose values can be made from small whole numbers.
pub(super) trait Value: Element {
    /// The largest number up to which every whole number is exact.
    const EXACT_TO: usize = usize::MAX;
    fn of(number: i32) -> Self;
}

macro_rules! values {
    ($($type:ty, $exact:expr, $of:expr;)*) => {$(
        impl Value for $type {
            const EXACT_TO: usize = $exact;
            #[inline(always)]
            fn of(number: i32) -> Self {
                $of(number)
            }
        }
    )*};
}

values! {
    f64, usize::MAX, f64::from;
    f32, 1 << 24, |n| n as f32;
    f16, 1 << 11, |n| f16::from_f32(n as f32);
    bf16, 1 << 8, |n| bf16::from_f32(n as f32);
    i8, usize::MAX, |n| n as i8;
    i16, usize::MAX, |n| n as i16;
    i32, usize::MAX, |n| n;
    i64, usize::MAX, i64::from;
    u8, usize::MAX, |n| n as u8;
    u16, usize::MAX, |n| n as u16;
    u32, usize::MAX, |n| n as u32;
    u64, usize::MAX, |n| n as u64;
    bool, usize::MAX, |n| n != 0;
}

/// The values of one rank at one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Values {
    op: Op,
    rank: usize,
    world: usize,
    /// The number of elements.
    len: usize,
    /// Values are below this power of two.
    span: u32,
}

impl Values {
    pub(super) fn new<T: Value>(op: Op, rank: usize, world: usize, len: usize) -> anyhow::Result<Self> {
        let wanted = if T::DTYPE == DType::Bool { 2 } else { 256 };
        let mut span = wanted;
        while span > 2 && world * (span - 1) > T::EXACT_TO {
            span /= 2;
        }
        ensure!(
            world * (span - 1) <= T::EXACT_TO,
            "sums over {world} ranks are not exact in {}, so results cannot be checked; try --dtype f32",
            T::DTYPE
        );
        Ok(Self { op, rank, world, len, span: span as u32 })
    }

    /// Fills this rank's buffer for the turn `stamp`.
    pub(super) fn rewrite<T: Value>(&self, buffer: &mut [T], stamp: u32) {
        let (rank, mask) = (self.rank, self.span - 1);
        for (i, x) in buffer.iter_mut().enumerate() {
            *x = T::of(number(rank, stamp, i, mask));
        }
    }

    /// Checks the result of the turn `stamp`: the input buffer of an in-place operation, or else the output.
    pub(super) fn verify<T: Value>(&self, result: &[T], stamp: u32) -> anyhow::Result<()> {
        for (i, got) in result[..self.result_len()].iter().enumerate() {
            let expected: T = self.expected(stamp, i);
            if *got != expected {
                bail!(
                    "{} of {} bytes is wrong on rank {}, element {i}: expected {expected:?}, got {got:?}",
                    self.op,
                    self.len * size_of::<T>(),
                    self.rank
                );
            }
        }
        Ok(())
    }

    fn place(&self) -> Place {
        Place { rank: self.rank, world: self.world, len: self.len }
    }

    fn result_len(&self) -> usize {
        self.op.result_len(self.place())
    }

    fn expected<T: Value>(&self, stamp: u32, i: usize) -> T {
        match self.op.origin(self.place(), i) {
            Origin::Nothing => T::of(0),
            Origin::Sum { at } => self.sum(stamp, at),
            Origin::Given { rank, at } => self.given(rank, stamp, at),
        }
    }

    fn given<T: Value>(&self, rank: usize, stamp: u32, i: usize) -> T {
        T::of(number(rank, stamp, i, self.span - 1))
    }

    fn sum<T: Value>(&self, stamp: u32, i: usize) -> T {
        T::of((0..self.world).map(|rank| number(rank, stamp, i, self.span - 1)).sum())
    }
}

#[inline(always)]
fn number(rank: usize, stamp: u32, i: usize, mask: u32) -> i32 {
    let at = i as u32;
    let shown = at.wrapping_add(at >> 8).wrapping_add(at >> 16).wrapping_add(at >> 24);
    (shown.wrapping_add(stamp).wrapping_add(31 * rank as u32) & mask) as i32
}

#[cfg(test)]
mod tests {
    use super::super::op::tests::result;
    use super::*;
    use clap::ValueEnum;

    const WORLD: usize = 4;
    const LEN: usize = 1000;

    /// The result of the operation on `rank` in turn `stamp`.
    fn carried_out(op: Op, rank: usize, stamp: u32) -> Vec<f32> {
        let buffers: Vec<Vec<f32>> = (0..WORLD)
            .map(|rank| {
                let mut buffer = vec![0.0; LEN];
                Values::new::<f32>(op, rank, WORLD, LEN).unwrap().rewrite(&mut buffer, stamp);
                buffer
            })
            .collect();
        result(op, &buffers, rank)
    }

    #[test]
    fn right_results_pass_and_a_wrong_element_is_named() {
        for &op in Op::value_variants() {
            for rank in 0..WORLD {
                let values = Values::new::<f32>(op, rank, WORLD, LEN).unwrap();
                let mut result = carried_out(op, rank, 9);
                values.verify(&result, 9).unwrap();
                for wrong in [0, values.result_len() / 2, values.result_len().saturating_sub(1)] {
                    let Some(x) = result[..values.result_len()].get_mut(wrong) else { continue };
                    *x += 1.0;
                    let error = values.verify(&result, 9).unwrap_err().to_string();
                    assert!(error.contains(&format!("wrong on rank {rank}, element {wrong}:")), "{error}");
                    result[wrong] -= 1.0;
                }
            }
        }
    }

    #[test]
    fn an_old_result_a_wrong_part_and_a_missing_rank_are_noticed() {
        let values = Values::new::<f32>(Op::AllReduce, 0, WORLD, LEN).unwrap();
        let result = carried_out(Op::AllReduce, 0, 9);
        assert!(values.verify(&result, 10).is_err());
        let mut shifted = result.clone();
        shifted.rotate_left(256);
        assert!(values.verify(&shifted, 9).is_err());
        let three = Values { world: WORLD - 1, ..values };
        assert!(three.verify(&result, 9).is_err());
        let gathered = carried_out(Op::AllGather, 0, 9);
        let swapped = [&gathered[250..500], &gathered[..250], &gathered[500..]].concat();
        assert!(Values { op: Op::AllGather, ..values }.verify(&swapped, 9).is_err());
    }

    #[test]
    fn sums_are_exact_in_narrow_types() {
        fn largest<T: Value>(world: usize) -> usize {
            (Values::new::<T>(Op::AllReduce, 0, world, 1).unwrap().span as usize - 1) * world
        }
        for world in [1, 2, 3, 64, 200] {
            assert!(largest::<bf16>(world) <= 256 && largest::<f16>(world) <= 2048, "{world}");
        }
        let error = Values::new::<bf16>(Op::AllReduce, 0, 1000, 1).unwrap_err().to_string();
        assert!(error.contains("try --dtype f32"), "{error}");
        assert!(bool::of(3) && !bool::of(0));
    }
}
