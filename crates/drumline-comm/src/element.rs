//! The number types that collectives carry: their names, and how two values are combined.
//!
//! A collective is generic over [`Element`]; the wire and the fingerprint carry its [`DType`]. Every element is plain
//! old data, so a slice of them is a slice of bytes. `f16` and `bf16` are combined in `f32` and rounded once.
//! Not here: loops over slices (`reduce`).

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of the elements of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum DType {
    F64 = 1,
    F32,
    F16,
    Bf16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
}

impl DType {
    /// Every type, in the order of their codes.
    pub const ALL: [DType; 13] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
    ];

    /// The type with this code, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// The short name used on the command line and in messages: `f32`, `bf16`, `bool`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::Bool => "bool",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no element type `{name}`; try one of {}", DType::ALL.map(DType::name).join(", "))]
pub struct UnknownDType {
    name: String,
}

impl std::str::FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| UnknownDType { name: text.into() })
    }
}

/// A number type that collectives carry: `f64 f32 f16 bf16 i8…i64 u8…u64 bool`.
///
/// The trait is sealed: its types are those of [`DType`].
pub trait Element:
    bytemuck::NoUninit + bytemuck::Zeroable + PartialEq + std::fmt::Debug + Send + Sync + sealed::Sealed
{
    /// Its code on the wire and in fingerprints.
    const DTYPE: DType;
}

pub(crate) mod sealed {
    /// How values are combined; `Wide` is the type in which a reduction is carried out.
    pub trait Sealed: Copy + 'static {
        type Wide: super::Element;
        /// True where `Wide` differs from the type itself, so that rounding happens once, at the end.
        const WIDENS: bool;
        fn widen(self) -> Self::Wide;
        fn narrow(wide: Self::Wide) -> Self;
        fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        fn mul(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        /// Divides a sum by the number of ranks.
        fn mean(sum: Self::Wide, ranks: usize) -> Self::Wide;
        fn scale(value: Self::Wide, factor: f64) -> Self::Wide;
        fn and(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        fn or(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        fn xor(a: Self::Wide, b: Self::Wide) -> Self::Wide;
        /// Maps every NaN to one bit pattern: which NaN a sum keeps is the compiler's choice, and differs between loops.
        #[inline(always)]
        fn plain_nan(value: Self::Wide) -> Self::Wide {
            value
        }
    }
}

macro_rules! float_element {
    ($($type:ty, $wide:ty, $dtype:ident, $widens:literal, $to:expr, $from:expr;)*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        impl sealed::Sealed for $type {
            type Wide = $wide;
            const WIDENS: bool = $widens;
            #[inline(always)]
            fn widen(self) -> $wide { $to(self) }
            // Which of two NaNs a sum keeps is the compiler's choice, even from rank to rank, so all become the same NaN.
            #[inline(always)]
            fn narrow(wide: $wide) -> Self { $from(if wide.is_nan() { <$wide>::NAN } else { wide }) }
            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide { a + b }
            #[inline(always)]
            fn mul(a: $wide, b: $wide) -> $wide { a * b }
            // A NaN on any rank reaches all ranks, as in PyTorch's minimum and maximum.
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide { if a < b || a.is_nan() { a } else { b } }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide { if a > b || a.is_nan() { a } else { b } }
            #[inline(always)]
            fn mean(sum: $wide, ranks: usize) -> $wide { sum / ranks as $wide }
            #[inline(always)]
            fn scale(value: $wide, factor: f64) -> $wide { value * factor as $wide }
            // Refused before any data moves: see `ReduceOp::check`.
            fn and(a: $wide, _: $wide) -> $wide { a }
            fn or(a: $wide, _: $wide) -> $wide { a }
            fn xor(a: $wide, _: $wide) -> $wide { a }
            #[inline(always)]
            fn plain_nan(value: $wide) -> $wide { if value.is_nan() { <$wide>::NAN } else { value } }
        }
    )*};
}

float_element! {
    f64, f64, F64, false, std::convert::identity, std::convert::identity;
    f32, f32, F32, false, std::convert::identity, std::convert::identity;
    f16, f32, F16, true, f16::to_f32, f16::from_f32;
    bf16, f32, Bf16, true, bf16::to_f32, bf16::from_f32;
}

macro_rules! integer_element {
    ($($type:ty, $dtype:ident;)*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        impl sealed::Sealed for $type {
            type Wide = $type;
            const WIDENS: bool = false;
            #[inline(always)]
            fn widen(self) -> Self { self }
            #[inline(always)]
            fn narrow(wide: Self) -> Self { wide }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self { a.wrapping_add(b) }
            #[inline(always)]
            fn mul(a: Self, b: Self) -> Self { a.wrapping_mul(b) }
            #[inline(always)]
            fn min(a: Self, b: Self) -> Self { Ord::min(a, b) }
            #[inline(always)]
            fn max(a: Self, b: Self) -> Self { Ord::max(a, b) }
            #[inline(always)]
            fn mean(sum: Self, ranks: usize) -> Self { (sum as i128 / ranks as i128) as Self }
            #[inline(always)]
            fn scale(value: Self, factor: f64) -> Self { (value as f64 * factor) as Self }
            #[inline(always)]
            fn and(a: Self, b: Self) -> Self { a & b }
            #[inline(always)]
            fn or(a: Self, b: Self) -> Self { a | b }
            #[inline(always)]
            fn xor(a: Self, b: Self) -> Self { a ^ b }
        }
    )*};
}

integer_element! { i8, I8; i16, I16; i32, I32; i64, I64; u8, U8; u16, U16; u32, U32; u64, U64; }

impl Element for bool {
    const DTYPE: DType = DType::Bool;
}

/// The sum of booleans is "any", the product is "all", as in PyTorch with NCCL.
impl sealed::Sealed for bool {
    type Wide = bool;
    const WIDENS: bool = false;
    fn widen(self) -> bool {
        self
    }
    fn narrow(wide: bool) -> Self {
        wide
    }
    fn add(a: bool, b: bool) -> bool {
        a | b
    }
    fn mul(a: bool, b: bool) -> bool {
        a & b
    }
    fn min(a: bool, b: bool) -> bool {
        a & b
    }
    fn max(a: bool, b: bool) -> bool {
        a | b
    }
    fn mean(sum: bool, _: usize) -> bool {
        sum
    }
    fn scale(value: bool, _: f64) -> bool {
        value
    }
    fn and(a: bool, b: bool) -> bool {
        a & b
    }
    fn or(a: bool, b: bool) -> bool {
        a | b
    }
    fn xor(a: bool, b: bool) -> bool {
        a ^ b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_come_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(14), None);
        assert!("f31".parse::<DType>().is_err());
    }
}
