//! What a tensor's elements travel as: the number type of `drumline-comm` that holds them, or two of them, or only their bytes.

use drumline_comm::{DType, ReduceOp};

use crate::error::TorchError;

/// How elements of a tensor are seen by a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Carried {
    /// The type that travels.
    pub(super) dtype: DType,
    nature: Nature,
    /// PyTorch's name of the tensor's own type.
    name: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Nature {
    /// The element is the number.
    Number,
    /// Two numbers, the real and the imaginary part.
    Complex,
    /// Bytes that are moved and never computed with.
    Bytes,
}

impl Carried {
    /// For libtorch's code of a type (`c10::ScalarType`). tch's `Kind` lacks some of them.
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
                return Err(TorchError::Unfit(format!(
                    "tensors of this type (code {code} of libtorch) do not travel; try dequantize() or to_kind(..)"
                )));
            }
        };
        Ok(Self { dtype, nature, name })
    }

    /// Numbers that travel for one element.
    pub(super) fn lanes(self) -> usize {
        if self.nature == Nature::Complex { 2 } else { 1 }
    }

    /// An error if elements of this type cannot be reduced so.
    pub(super) fn check(self, op: ReduceOp) -> Result<(), TorchError> {
        let name = self.name;
        match (self.nature, op) {
            (Nature::Bytes, _) => Err(TorchError::Unfit(format!(
                "{op} is not defined for {name}, which only moves; try to_kind(Kind::BFloat16)"
            ))),
            (Nature::Complex, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
            | (Nature::Number, _) => Ok(()),
            (Nature::Complex, _) => Err(TorchError::Unfit(format!(
                "{op} is not defined for {name}; try sum or avg, or view_as_real() to reduce the parts by themselves"
            ))),
        }
    }
}

impl std::fmt::Display for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// `$body` with `$T` standing for the element type of `$dtype`. A macro, so that the caller's place in the program is still
/// known to the collective.
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
