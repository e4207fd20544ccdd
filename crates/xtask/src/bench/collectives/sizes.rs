//! Sizes as people write them: `16`, `4K`, `64M` (powers of 1024).

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteSize(pub(crate) u64);

const UNITS: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shift = |unit: char| UNITS.iter().find(|(c, _)| *c == unit.to_ascii_uppercase()).map(|u| u.1);
        let (digits, shift) = match text.chars().last().and_then(shift) {
            Some(shift) => (&text[..text.len() - 1], shift),
            None => (text, 0),
        };
        let number: u64 = digits.parse().map_err(|_| bad(text))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| bad(text))
    }
}

fn bad(text: &str) -> String {
    format!("`{text}` is not a size; try 16, 4K, 1M or 1G")
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |shift: u32| self.0 > 0 && self.0.is_multiple_of(1 << shift);
        match UNITS.iter().find(|(_, shift)| whole(*shift)) {
            Some((unit, shift)) => write!(f, "{} {unit}iB", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes, shown) in [
            ("0", 0, "0 B"),
            ("16", 16, "16 B"),
            ("4K", 4096, "4 KiB"),
            ("64k", 65536, "64 KiB"),
            ("1M", 1 << 20, "1 MiB"),
            ("2G", 2 << 30, "2 GiB"),
            ("1500", 1500, "1500 B"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, shown));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "K", "4KB", "-1", "1.5M", "99999999999G"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
