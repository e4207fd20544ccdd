//! Adam's running means as slices: in f32, in bf16 with random rounding, or in 8 bits.

use half::bf16;

use super::super::code_map::{BLOCK, CodeMap};
use super::super::halves::{nearest_by_chance, widened};
use super::super::random::Draw;

/// Numbers in 8 bits with a scale for each block. A block has up to 256 elements of one row; the last one of a row has
/// the rest.
#[derive(Debug)]
pub struct Codes<'a> {
    /// A code for each number.
    pub codes: &'a mut [u8],
    /// The greatest magnitude in each block, row by row.
    pub absmax: &'a mut [f32],
}

/// The running means of the gradient and of its square.
#[derive(Debug)]
pub enum MomentSlices<'a> {
    /// In f32.
    F32 {
        /// Of the gradient.
        exp_avg: &'a mut [f32],
        /// Of the squared gradient.
        exp_avg_sq: &'a mut [f32],
    },
    /// In bf16. Random bits decide in which direction a number is rounded, so that small changes add up.
    Bf16 {
        /// Of the gradient.
        exp_avg: &'a mut [bf16],
        /// Of the squared gradient.
        exp_avg_sq: &'a mut [bf16],
        /// The random bits of this step.
        draw: Draw,
    },
    /// In 8 bits.
    EightBit {
        /// Of the gradient.
        exp_avg: Codes<'a>,
        /// Of the squared gradient.
        exp_avg_sq: Codes<'a>,
        /// Elements in a row; rows are complete.
        row_len: usize,
    },
}

impl<'a> Codes<'a> {
    fn split_at(self, at: usize, block: usize) -> (Self, Self) {
        let (codes, other_codes) = self.codes.split_at_mut(at);
        let (absmax, other_absmax) = self.absmax.split_at_mut(block);
        (Self { codes, absmax }, Self { codes: other_codes, absmax: other_absmax })
    }

    /// The numbers of a block whose codes begin at `at`.
    #[inline(always)]
    pub(super) fn load(&self, map: &CodeMap, at: usize, block: usize, len: usize, to: &mut [f32; BLOCK]) {
        map.decode(&self.codes[at..at + len], self.absmax[block], to);
    }

    #[inline(always)]
    pub(super) fn store(&mut self, map: &CodeMap, at: usize, block: usize, from: &[f32; BLOCK], len: usize) {
        self.absmax[block] = map.encode(from, &mut self.codes[at..at + len]);
    }
}

impl MomentSlices<'_> {
    /// How many elements there are; `None` if the slices do not fit together.
    pub(super) fn len(&self) -> Option<usize> {
        let (len, other, fits) = match self {
            Self::F32 { exp_avg, exp_avg_sq } => (exp_avg.len(), exp_avg_sq.len(), true),
            Self::Bf16 { exp_avg, exp_avg_sq, .. } => (exp_avg.len(), exp_avg_sq.len(), true),
            Self::EightBit { exp_avg, exp_avg_sq, row_len } => {
                let len = exp_avg.codes.len();
                let fits = len == 0
                    || *row_len > 0 && len.is_multiple_of(*row_len) && {
                        let num_blocks = len / row_len * row_len.div_ceil(BLOCK);
                        [exp_avg.absmax.len(), exp_avg_sq.absmax.len()] == [num_blocks; 2]
                    };
                (len, exp_avg_sq.codes.len(), fits)
            }
        };
        (fits && len == other).then_some(len)
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32 { exp_avg, exp_avg_sq } => {
                let (exp_avg, avgs) = exp_avg.split_at_mut(at);
                let (exp_avg_sq, squares) = exp_avg_sq.split_at_mut(at);
                (Self::F32 { exp_avg, exp_avg_sq }, Self::F32 { exp_avg: avgs, exp_avg_sq: squares })
            }
            Self::Bf16 { exp_avg, exp_avg_sq, draw } => {
                let (exp_avg, avgs) = exp_avg.split_at_mut(at);
                let (exp_avg_sq, squares) = exp_avg_sq.split_at_mut(at);
                let after = Self::Bf16 { exp_avg: avgs, exp_avg_sq: squares, draw: draw.after(at) };
                (Self::Bf16 { exp_avg, exp_avg_sq, draw }, after)
            }
            Self::EightBit { exp_avg, exp_avg_sq, row_len } => {
                assert!(row_len > 0 && at.is_multiple_of(row_len), "{at} is within a row of {row_len}");
                let block = at / row_len * row_len.div_ceil(BLOCK);
                let (exp_avg, avgs) = exp_avg.split_at(at, block);
                let (exp_avg_sq, squares) = exp_avg_sq.split_at(at, block);
                let after = Self::EightBit { exp_avg: avgs, exp_avg_sq: squares, row_len };
                (Self::EightBit { exp_avg, exp_avg_sq, row_len }, after)
            }
        }
    }
}

/// A running mean in memory.
pub(super) trait Mean: Copy {
    /// Whether it is rounded by random bits.
    const IS_ROUNDED: bool;
    fn number(self) -> f32;
    fn of(number: f32, random: u32) -> Self;
}

impl Mean for f32 {
    const IS_ROUNDED: bool = false;

    #[inline(always)]
    fn number(self) -> f32 {
        self
    }

    #[inline(always)]
    fn of(number: f32, _: u32) -> Self {
        number
    }
}

impl Mean for bf16 {
    const IS_ROUNDED: bool = true;

    #[inline(always)]
    fn number(self) -> f32 {
        widened(self)
    }

    #[inline(always)]
    fn of(number: f32, random: u32) -> Self {
        nearest_by_chance(number, random)
    }
}
