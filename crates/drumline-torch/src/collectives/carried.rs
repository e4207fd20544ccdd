//! How a tensor's elements are sent: as a number type of `drumline-comm`, as two numbers, or as bytes.

use drumline_comm::{DType, ReduceOp};

use crate::error::TorchError;

/// How a collective treats the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Carried {
    /// The type that is sent.
    pub(super) dtype: DType,
    nature: Nature,
    /// PyTorch's name of the tensor's type.
    name: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Nature {
    /// The element is the number.
    Number,
    /// Two numbers, the real and the imaginary part.
    Complex,
    /// Bytes that can be sent, but not reduced.
    Bytes,
}

impl Carried {
    /// For libtorch's number of a type (`c10::ScalarType`). tch's `Kind` lacks some of them.
    pub(super) fn of(code: i8) -> Result<Self, TorchError> {
        use Nature::{Bytes, Complex, Number};
        let (dtype, nature, name) = match code {
            0 => (DType::U8, Number, "uint8"),
            1 => (DType::I8, Number, "int8"),
            2 => (DType::I16, Number, "int16"),
            3 => (DType::I32, Number, "int32"),
            4 => (DType::I64, Number, "int64"),
            5 => (DType::F16, Number, "float16"),
            6 => (DType::F32, Number, "float32"),
            7 => (DType::F64, Number, "float64"),
            8 => (DType::F16, Complex, "complex32"),
            9 => (DType::F32, Complex, "complex64"),
            10 => (DType::F64, Complex, "complex128"),
            11 => (DType::Bool, Number, "bool"),
            15 => (DType::Bf16, Number, "bfloat16"),
            23..=26 => (DType::U8, Bytes, "float8"),
            27 => (DType::U16, Number, "uint16"),
            28 => (DType::U32, Number, "uint32"),
            29 => (DType::U64, Number, "uint64"),
            _ => {
                return Err(TorchError::Kind {
                    what: "a tensor of a collective".to_owned(),
                    expected: "a number or bool; try dequantize() or to_kind(..)".to_owned(),
                    got: format!("{code}, as libtorch numbers its types"),
                });
            }
        };
        Ok(Self { dtype, nature, name })
    }

    /// Numbers to send for one element.
    pub(super) fn lanes(self) -> usize {
        if self.nature == Nature::Complex { 2 } else { 1 }
    }

    /// An error if `op` is not defined for elements of this type.
    pub(super) fn check(self, op: ReduceOp) -> Result<(), TorchError> {
        let undefined = |hint| Err(TorchError::Reduction { op, kind: self.name, hint });
        match (self.nature, op) {
            (Nature::Bytes, _) => undefined("to_kind(Kind::BFloat16)"),
            (Nature::Complex, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
            | (Nature::Number, _) => Ok(()),
            (Nature::Complex, _) => {
                undefined("sum or avg, or view_as_real() to reduce real and imaginary parts separately")
            }
        }
    }
}

impl std::fmt::Display for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// `$body` with `$T` as the element type of `$dtype`. This is a macro, so that collectives see the caller's location.
macro_rules! with_elements {
    ($dtype:expr, $T:ident => $body:expr) => {
        with_elements!(@ $dtype, $T, $body,
            F64 f64, F32 f32, F16 half::f16, Bf16 half::bf16, I8 i8, I16 i16, I32 i32, I64 i64,
            U8 u8, U16 u16, U32 u32, U64 u64, Bool bool)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $($variant:ident $type:ty),*) => {
        match $dtype {
            $(drumline_comm::DType::$variant => {
                type $T = $type;
                $body
            })*
        }
    };
}
pub(super) use with_elements;
