//! Which of our types and reductions NCCL supports. The others go through host memory.

use std::ffi::c_int;

use drumline_comm::{DType, ReduceOp};

/// `ncclDataType_t`, and how many of them one of our elements has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) code: c_int,
    pub(crate) lanes: usize,
}

/// How elements are sent. Types that NCCL lacks are sent as bytes.
pub(crate) fn element(dtype: DType) -> Element {
    let (code, lanes) = match dtype {
        DType::I8 => (0, 1),
        DType::U8 | DType::Bool => (1, 1),
        DType::I32 => (2, 1),
        DType::U32 => (3, 1),
        DType::I64 => (4, 1),
        DType::U64 => (5, 1),
        DType::F16 => (6, 1),
        DType::F32 => (7, 1),
        DType::F64 => (8, 1),
        DType::Bf16 => (9, 1),
        DType::I16 | DType::U16 => (1, 2),
    };
    Element { code, lanes }
}

/// A reduction of NCCL.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Reduction {
    /// `ncclRedOp_t`.
    Ready(c_int),
    /// The sum of the elements times a factor, which needs a custom operation.
    ScaledSum(f64),
}

impl Reduction {
    pub(crate) const SUM: Self = Self::Ready(0);
    const PROD: Self = Self::Ready(1);
    const MAX: Self = Self::Ready(2);
    const MIN: Self = Self::Ready(3);
    pub(crate) const AVG: Self = Self::Ready(4);
}

/// NCCL's reduction for `op`, if it has one.
pub(crate) fn reduction(dtype: DType, op: ReduceOp) -> Option<Reduction> {
    let is_float = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16);
    match (dtype, op) {
        (DType::I16 | DType::U16, _) => None,
        // Bools are bytes of 0 and 1.
        (DType::Bool, ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr) => Some(Reduction::MAX),
        (DType::Bool, ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd) => Some(Reduction::MIN),
        (DType::Bool, _) => None,
        (_, ReduceOp::Sum) => Some(Reduction::SUM),
        (_, ReduceOp::Avg) => Some(Reduction::AVG),
        (_, ReduceOp::Prod) => Some(Reduction::PROD),
        (_, ReduceOp::Min) => Some(Reduction::MIN),
        (_, ReduceOp::Max) => Some(Reduction::MAX),
        (_, ReduceOp::PreMulSum(factor)) => is_float.then_some(Reduction::ScaledSum(factor)),
        (_, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_sent_with_its_size() {
        const SIZES: [usize; 10] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2];
        for dtype in DType::ALL {
            let Element { code, lanes } = element(dtype);
            assert_eq!(SIZES[code as usize] * lanes, dtype.size(), "{dtype}");
        }
    }

    #[test]
    fn reductions_that_nccl_lacks_go_through_the_host() {
        assert_eq!(reduction(DType::F32, ReduceOp::Avg), Some(Reduction::AVG));
        assert_eq!(reduction(DType::Bf16, ReduceOp::PreMulSum(0.5)), Some(Reduction::ScaledSum(0.5)));
        assert_eq!(reduction(DType::Bool, ReduceOp::Sum), Some(Reduction::MAX), "any");
        assert_eq!(reduction(DType::Bool, ReduceOp::Prod), Some(Reduction::MIN), "all");
        for (dtype, op) in [
            (DType::I16, ReduceOp::Sum),
            (DType::I32, ReduceOp::BitXor),
            (DType::I64, ReduceOp::PreMulSum(2.0)),
            (DType::Bool, ReduceOp::BitXor),
        ] {
            assert_eq!(reduction(dtype, op), None, "{op} of {dtype}");
        }
    }
}
