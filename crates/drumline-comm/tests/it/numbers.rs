//! Numbers for tests: small ones with exact sums in every type, and random ones.

use drumline_comm::{Element, bf16, f16};

/// An element type made from small numbers.
pub(crate) trait Number: Element {
    fn of(number: i64) -> Self;
}

macro_rules! number {
    ($($type:ty: $number:ident => $make:expr;)*) => {$(
        impl Number for $type {
            fn of($number: i64) -> Self { $make }
        }
    )*};
}

number! {
    f64: n => n as f64;
    f32: n => n as f32;
    f16: n => f16::from_f32(n as f32);
    bf16: n => bf16::from_f32(n as f32);
    i8: n => n as i8;
    i16: n => n as i16;
    i32: n => n as i32;
    i64: n => n;
    u8: n => n as u8;
    u16: n => n as u16;
    u32: n => n as u32;
    u64: n => n as u64;
    bool: n => n % 2 != 0;
}

/// Element `i` of rank `rank`.
pub(crate) fn value(rank: usize, i: usize) -> i64 {
    ((rank * 5 + i * 3) % 7 + 1) as i64
}

/// The initial data of rank `rank`.
pub(crate) fn buffer<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::of(value(rank, i))).collect()
}

/// Fails at the first element that is not what `want` says.
pub(crate) fn check<T: Element>(got: &[T], want: impl Fn(usize) -> T, what: impl Fn() -> String) {
    for (i, &x) in got.iter().enumerate() {
        assert_eq!(x, want(i), "{} at {i}", what());
    }
}

/// A generator of random numbers; equal seeds give equal numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
