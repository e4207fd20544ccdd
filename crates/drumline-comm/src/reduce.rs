//! Reductions: the operators, and how they are applied to slices.
//!
//! Inputs are always combined in rank order, `((x0 + x1) + x2) + …`, whichever rank does it, so all ranks hold the same bits.
//! `f16` and `bf16` are summed in `f32` and rounded once, after the last input. Not here: the loops (`loops`).

mod loops;

use serde::{Deserialize, Serialize};

use crate::element::{DType, Element};
use loops::{Everywhere, InPlace, IntoOut, with_operator};

/// How the values of all ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum. Integers wrap around; for `bool` it is "any".
    Sum,
    /// The sum divided by the number of ranks. Integers are rounded towards zero.
    Avg,
    /// The product; for `bool` it is "all".
    Prod,
    /// The smallest value; NaN if any rank has NaN.
    Min,
    /// The largest value; NaN if any rank has NaN.
    Max,
    /// Bitwise and, of integers and `bool`.
    BitAnd,
    /// Bitwise or, of integers and `bool`.
    BitOr,
    /// Bitwise exclusive or, of integers and `bool`.
    BitXor,
    /// The sum of each value times the factor. The factor must be the same on all ranks.
    PreMulSum(f64),
}

impl ReduceOp {
    /// A number for the fingerprint, different for each operator and each factor.
    pub(crate) fn code(self) -> u64 {
        match self {
            ReduceOp::Sum => 1,
            ReduceOp::Avg => 2,
            ReduceOp::Prod => 3,
            ReduceOp::Min => 4,
            ReduceOp::Max => 5,
            ReduceOp::BitAnd => 6,
            ReduceOp::BitOr => 7,
            ReduceOp::BitXor => 8,
            // Inverted: only the bits of a NaN could then equal one of the numbers above.
            ReduceOp::PreMulSum(factor) => !factor.to_bits(),
        }
    }

    /// The operators of a reduction in two stages: inside nodes, then between them. The first stage scales; an average is
    /// summed in both and divided at the end, by [`divide`].
    pub(crate) fn in_two_stages(self) -> (Self, Self) {
        match self {
            ReduceOp::Avg => (ReduceOp::Sum, ReduceOp::Sum),
            ReduceOp::PreMulSum(_) => (self, ReduceOp::Sum),
            _ => (self, self),
        }
    }

    /// An error if the operator is not defined for the type.
    pub(crate) fn check(self, dtype: DType) -> Result<(), UndefinedReduction> {
        let float = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16);
        match self {
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if float => {
                Err(UndefinedReduction::BitsOfFloats { op: self, dtype })
            }
            ReduceOp::Avg | ReduceOp::PreMulSum(_) if dtype == DType::Bool => {
                Err(UndefinedReduction::Bool { op: self })
            }
            _ => Ok(()),
        }
    }
}

/// An operator that is not defined for an element type.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub(crate) enum UndefinedReduction {
    #[error("{op} is not defined for {dtype}; try an integer type, or Min or Max")]
    BitsOfFloats { op: ReduceOp, dtype: DType },
    #[error("{op} is not defined for bool; try Sum (any) or Prod (all)")]
    Bool { op: ReduceOp },
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReduceOp::Sum => f.write_str("sum"),
            ReduceOp::Avg => f.write_str("avg"),
            ReduceOp::Prod => f.write_str("prod"),
            ReduceOp::Min => f.write_str("min"),
            ReduceOp::Max => f.write_str("max"),
            ReduceOp::BitAnd => f.write_str("band"),
            ReduceOp::BitOr => f.write_str("bor"),
            ReduceOp::BitXor => f.write_str("bxor"),
            ReduceOp::PreMulSum(factor) => write!(f, "premul-sum({factor})"),
        }
    }
}

/// `out = inputs[0] ∘ inputs[1] ∘ …`, in that order. All slices are equally long. There is at least one input.
pub(crate) fn reduce_into<T: Element>(out: &mut [T], inputs: &[&[T]], op: ReduceOp) {
    debug_assert!(inputs.iter().all(|input| input.len() == out.len()));
    with_operator::<T, _>(op, IntoOut { out, inputs });
}

/// Which of two inputs is first in rank order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Order {
    MineFirst,
    TheirsFirst,
}

/// `data` becomes its reduction with `theirs`, in rank order.
pub(crate) fn reduce_with<T: Element>(data: &mut [T], theirs: &[T], order: Order, op: ReduceOp) {
    debug_assert_eq!(data.len(), theirs.len());
    with_operator::<T, _>(op, InPlace { data, theirs, order });
}

/// Every buffer becomes `buffers[0] ∘ buffers[1] ∘ …`: all of an all-reduce whose buffers are shared.
pub(crate) fn reduce_everywhere<T: Element>(buffers: &mut [&mut [T]], op: ReduceOp) {
    debug_assert!(buffers.iter().all(|buffer| buffer.len() == buffers[0].len()));
    with_operator::<T, _>(op, Everywhere { buffers });
}

/// The reduction over one rank: only a factor changes anything.
pub(crate) fn reduce_alone<T: Element>(data: &mut [T], op: ReduceOp) {
    if let ReduceOp::PreMulSum(factor) = op {
        data.iter_mut().for_each(|x| *x = T::narrow(T::scale(x.widen(), factor)));
    }
}

/// Divides sums by the number of ranks.
pub(crate) fn divide<T: Element>(data: &mut [T], ranks: usize) {
    data.iter_mut().for_each(|x| *x = T::narrow(T::mean(x.widen(), ranks)));
}

#[cfg(test)]
mod tests {
    use super::loops::BLOCK;
    use super::*;
    use half::{bf16, f16};

    fn reduce<T: Element>(inputs: &[&[T]], op: ReduceOp) -> Vec<T> {
        let mut out = inputs[0].to_vec();
        reduce_into(&mut out, inputs, op);
        let mut everywhere: Vec<Vec<T>> = inputs.iter().map(|input| input.to_vec()).collect();
        let mut views: Vec<&mut [T]> = everywhere.iter_mut().map(Vec::as_mut_slice).collect();
        reduce_everywhere(&mut views, op);
        for buffer in &everywhere {
            assert_eq!(*buffer, out, "{op}: the two loops agree");
        }
        if let [first, second] = inputs {
            for (mine, theirs, order) in
                [(first, second, Order::MineFirst), (second, first, Order::TheirsFirst)]
            {
                let mut data = mine.to_vec();
                reduce_with(&mut data, theirs, order, op);
                assert_eq!(data, out, "{op}: in place, {order:?}");
            }
        }
        out
    }

    #[test]
    fn every_operator_on_three_inputs() {
        let inputs: [&[i32]; 3] = [&[1, -2, 12], &[5, 7, 10], &[3, 4, 6]];
        let expected: [(ReduceOp, [i32; 3]); 9] = [
            (ReduceOp::Sum, [9, 9, 28]),
            (ReduceOp::Avg, [3, 3, 9]),
            (ReduceOp::Prod, [15, -56, 720]),
            (ReduceOp::Min, [1, -2, 6]),
            (ReduceOp::Max, [5, 7, 12]),
            (ReduceOp::BitAnd, [1, 4, 0]),
            (ReduceOp::BitOr, [7, -1, 14]),
            (ReduceOp::BitXor, [1 ^ 5 ^ 3, -2 ^ 7 ^ 4, 12 ^ 10 ^ 6]),
            (ReduceOp::PreMulSum(2.0), [18, 18, 56]),
        ];
        for (op, want) in expected {
            assert_eq!(reduce(&inputs, op), want, "{op}");
        }
    }

    #[test]
    fn two_inputs_in_place_and_into_a_third_buffer() {
        let (a, b) = ([1.5f32, -2.0, 0.0, 7.25], [0.5f32, 3.0, -0.0, 1e30]);
        for op in [
            ReduceOp::Sum,
            ReduceOp::Avg,
            ReduceOp::Prod,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::PreMulSum(0.5),
        ] {
            reduce(&[&a, &b], op);
        }
    }

    #[test]
    fn halves_are_rounded_once() {
        // 2048 + 1 + 1 is 2050 in f32; f16 arithmetic step by step would stay at 2048.
        let (big, one) = (f16::from_f32(2048.0), f16::ONE);
        assert_eq!(reduce(&[&[big], &[one], &[one]], ReduceOp::Sum), [f16::from_f32(2050.0)]);
        let (big, one) = (bf16::from_f32(256.0), bf16::ONE);
        assert_eq!(reduce(&[&[big], &[one], &[one]], ReduceOp::Sum), [bf16::from_f32(258.0)]);
    }

    #[test]
    fn nan_reaches_minimum_and_maximum() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for inputs in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
                let slices = inputs.each_ref().map(std::slice::from_ref);
                let mut out = [0.0f32];
                reduce_into(&mut out, &slices, op);
                assert!(out[0].is_nan(), "{op} of {inputs:?}");
            }
        }
    }

    #[test]
    fn lengths_around_a_block() {
        for len in [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5] {
            let a: Vec<f64> = (0..len).map(|i| i as f64).collect();
            let out = reduce(&[&a, &a, &a, &a], ReduceOp::Sum);
            assert!(out.iter().enumerate().all(|(i, &x)| x == 4.0 * i as f64));
        }
    }

    #[test]
    fn undefined_operators_are_errors() {
        assert!(ReduceOp::BitAnd.check(DType::F32).is_err());
        assert!(ReduceOp::Avg.check(DType::Bool).is_err());
        assert!(ReduceOp::BitAnd.check(DType::Bool).is_ok());
    }
}
