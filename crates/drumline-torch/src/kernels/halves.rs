//! f32 numbers in 16 bits: rounded to bf16, or split into two halves from which the number comes back to the bit.
//!
//! ```text
//!   f32, 32 bits ─ split ─▶ high: bf16, what the model computes with ─┐
//!                      └──▶ low: 16 signed bits, what is missing      ┴─ joined ─▶ the same f32
//! ```
//! The high half is the bf16 number that is nearest. Of a number in the middle between two of them it is the one away
//! from zero, where rounding in libtorch takes the even one: with both of them the low half would need a 17th bit. A NaN
//! becomes a quiet one, as in every computation.

use half::bf16;

use super::floats::for_instruction_sets;

/// The bits of infinity; those of a NaN without its sign are greater.
const INFINITY: u32 = 0x7f80_0000;
/// The bit of a quiet NaN, in the high half.
const QUIET: u32 = 0x40;

#[inline(always)]
fn is_nan(bits: u32) -> bool {
    bits & 0x7fff_ffff > INFINITY
}

/// The same number in f32.
#[inline(always)]
pub(super) fn widened(number: bf16) -> f32 {
    f32::from_bits(u32::from(number.to_bits()) << 16)
}

/// The nearest bf16 number; in the middle between two of them the even one, as in libtorch.
#[inline(always)]
pub(super) fn nearest(number: f32) -> bf16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    bf16::from_bits(if is_nan(bits) { 0x7fc0 } else { rounded as u16 })
}

/// One of the two bf16 numbers around a number, the nearer one the more often: 16 random bits decide. The expected value
/// is the number itself, so that small changes are not lost.
#[inline(always)]
pub(super) fn nearest_by_chance(number: f32, random: u32) -> bf16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(random & 0xffff) >> 16;
    bf16::from_bits(if is_nan(bits) { 0x7fc0 } else { rounded as u16 })
}

/// The two halves of a number.
#[inline(always)]
pub(super) fn split(number: f32) -> (bf16, i16) {
    let bits = number.to_bits();
    let high = if is_nan(bits) { (bits >> 16) | QUIET } else { bits.wrapping_add(0x8000) >> 16 };
    (bf16::from_bits(high as u16), bits as u16 as i16)
}

/// The number of two halves.
#[inline(always)]
pub(super) fn joined(high: bf16, low: i16) -> f32 {
    let high = u32::from(high.to_bits()) << 16;
    let low = if is_nan(high) { u32::from(low as u16) } else { i32::from(low) as u32 };
    f32::from_bits(high.wrapping_add(low))
}

for_instruction_sets! {
    /// The numbers of all halves.
    pub(crate) fn join_all(high: &[bf16], low: &[i16], numbers: &mut [f32]) {
        for ((number, high), low) in numbers.iter_mut().zip(high).zip(low) {
            *number = joined(*high, *low);
        }
    }
}

for_instruction_sets! {
    /// The halves of master weights, for the bf16 weights `high`. Where a weight is not its master rounded in either way,
    /// the program has changed it, and its low half becomes zero.
    pub(crate) fn split_all(masters: &[f32], high: &mut [bf16], low: &mut [i16]) {
        for ((master, high), low) in masters.iter().zip(high).zip(low) {
            let (new_high, new_low) = split(*master);
            let is_own = high.to_bits() == new_high.to_bits() || high.to_bits() == nearest(*master).to_bits();
            (*high, *low) = if is_own { (new_high, new_low) } else { (*high, 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of all kinds: special ones, their neighbours, and every 977th pattern of bits.
    fn patterns() -> impl Iterator<Item = u32> {
        let special = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x007f_ffff, 0x0080_0000, 0x3f80_8000];
        let ends = [
            0x3f80_7fff,
            0x3f81_8000,
            0x7f7f_7fff,
            0x7f7f_8000,
            0x7f7f_ffff,
            INFINITY,
            0x7fc0_0000,
            0x7fff_ffff,
        ];
        let all = special.into_iter().chain(ends);
        all.flat_map(|bits| [bits, bits | 0x8000_0000]).chain((0..=u32::MAX).step_by(977))
    }

    #[test]
    fn halves_join_to_the_same_bits_and_the_high_one_is_the_nearest() {
        for bits in patterns() {
            let number = f32::from_bits(bits);
            let (high, low) = split(number);
            let expected = if number.is_nan() { bits | QUIET << 16 } else { bits };
            assert_eq!(joined(high, low).to_bits(), expected, "{bits:#x}");
            assert_eq!(high.is_nan(), number.is_nan(), "{bits:#x}");
            if bits & 0xffff != 0x8000 && !number.is_nan() {
                assert_eq!(high, nearest(number), "{bits:#x}");
            }
        }
        let middle = f32::from_bits(0x3f80_8000);
        assert_eq!((split(middle).0.to_bits(), nearest(middle).to_bits()), (0x3f81, 0x3f80));
    }

    #[test]
    fn rounding_is_that_of_the_crate_half_and_widening_loses_nothing() {
        for bits in patterns() {
            let number = f32::from_bits(bits);
            assert_eq!(nearest(number).is_nan(), number.is_nan());
            if !number.is_nan() {
                assert_eq!(nearest(number), bf16::from_f32(number), "{bits:#x}");
                let wide = widened(nearest(number));
                assert_eq!(wide, bf16::from_f32(number).to_f32());
                assert_eq!(nearest_by_chance(wide, 0xffff).to_bits(), nearest(number).to_bits(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn chance_keeps_the_mean() {
        for number in [1.0f32 + 1.0 / 1024.0, -3.3, 1e-30] {
            let mean = (0..1u32 << 16)
                .map(|random| f64::from(widened(nearest_by_chance(number, random))))
                .sum::<f64>()
                / f64::from(1u32 << 16);
            let error = (mean - f64::from(number)) / f64::from(number);
            assert!(error.abs() < 1e-9, "{number}: {mean}");
        }
    }
}
