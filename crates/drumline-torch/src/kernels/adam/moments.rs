//! Adam's running means as slices: in f32, in bf16 with random rounding, or in 8 bits.

use half::bf16;

use super::super::code_map::{BLOCK, CodeMap};
use super::super::halves::{nearest_by_chance, widened};
use super::super::random::Draw;
use super::super::weights::CHUNK;

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

    #[inline(always)]
    fn load(&self, map: &CodeMap, at: usize, block: usize, to: &mut [f32]) {
        map.decode(&self.codes[at..at + to.len()], self.absmax[block], to);
    }

    #[inline(always)]
    fn store(&mut self, map: &CodeMap, at: usize, block: usize, from: &mut [f32]) {
        self.absmax[block] = map.encode(from, &mut self.codes[at..at + from.len()]);
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

    /// How many elements from `at` on are stepped together.
    #[inline(always)]
    pub(super) fn chunk_len(&self, at: usize) -> usize {
        match self {
            Self::F32 { .. } | Self::Bf16 { .. } => CHUNK,
            Self::EightBit { row_len, .. } => BLOCK.min(row_len - at % row_len),
        }
    }

    /// Copies the means from `at` on, which are in the nth chunk.
    #[inline(always)]
    pub(super) fn load(&self, at: usize, nth: usize, m: &mut [f32], v: &mut [f32]) {
        let range = at..at + m.len();
        match self {
            Self::F32 { exp_avg, exp_avg_sq } => {
                m.copy_from_slice(&exp_avg[range.clone()]);
                v.copy_from_slice(&exp_avg_sq[range]);
            }
            Self::Bf16 { exp_avg, exp_avg_sq, .. } => {
                let both = exp_avg[range.clone()].iter().zip(&exp_avg_sq[range]);
                for ((m, v), (avg, square)) in m.iter_mut().zip(v).zip(both) {
                    (*m, *v) = (widened(*avg), widened(*square));
                }
            }
            Self::EightBit { exp_avg, exp_avg_sq, .. } => {
                exp_avg.load(CodeMap::signed(), at, nth, m);
                exp_avg_sq.load(CodeMap::unsigned(), at, nth, v);
            }
        }
    }

    /// Writes the means from `at` on, and may change `m` and `v`.
    #[inline(always)]
    pub(super) fn store(&mut self, at: usize, nth: usize, m: &mut [f32], v: &mut [f32]) {
        let range = at..at + m.len();
        match self {
            Self::F32 { exp_avg, exp_avg_sq } => {
                exp_avg[range.clone()].copy_from_slice(m);
                exp_avg_sq[range].copy_from_slice(v);
            }
            Self::Bf16 { exp_avg, exp_avg_sq, draw } => {
                let both = exp_avg[range.clone()].iter_mut().zip(&mut exp_avg_sq[range]);
                for (nth, ((avg, square), (m, v))) in both.zip(m.iter().zip(v.iter())).enumerate() {
                    let random = draw.bits(at + nth);
                    *avg = nearest_by_chance(*m, random);
                    *square = nearest_by_chance(*v, random >> 16);
                }
            }
            Self::EightBit { exp_avg, exp_avg_sq, .. } => {
                exp_avg.store(CodeMap::signed(), at, nth, m);
                exp_avg_sq.store(CodeMap::unsigned(), at, nth, v);
            }
        }
    }
}
