//! Sizes as people write them: `16`, `4K`, `4KiB`, `4KB`, `64M` (powers of 1024), and the default sizes.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use drumline_comm::DType;

use super::op::Op;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteSize(pub(super) usize);

const UNITS: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

/// The default sizes: from where only latency counts to where only bandwidth does.
const LADDER: [usize; 8] = [16, 256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// The sizes to measure for `op` among `world` ranks: those given, if they can be divided, or the default ones, rounded up.
pub(super) fn to_measure(
    asked: &[ByteSize],
    op: Op,
    dtype: DType,
    world: usize,
) -> anyhow::Result<Vec<usize>> {
    if op == Op::Barrier {
        return Ok(vec![0]);
    }
    let unit = dtype.size() * if op.is_divided() { world } else { 1 };
    if asked.is_empty() {
        return Ok(LADDER.iter().map(|bytes| bytes.next_multiple_of(unit)).collect());
    }
    if asked.contains(&ByteSize(0)) {
        bail!("{op} of 0 bytes moves no data, so there is nothing to measure; try --sizes {unit} or more");
    }
    if let Some(ByteSize(odd)) = asked.iter().find(|size| !size.0.is_multiple_of(unit)) {
        let near = odd.checked_next_multiple_of(unit).unwrap_or(unit);
        bail!(
            "{op} of {dtype} among {world} ranks needs a multiple of {unit} bytes, got {odd}; try --sizes {near}"
        );
    }
    Ok(asked.iter().map(|size| size.0).collect())
}

/// A text that is no size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size; try 16, 4K, 1M or 1GiB")]
pub(super) struct BadSize(String);

impl FromStr for ByteSize {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let upper = text.to_ascii_uppercase();
        let of_unit = |(unit, shift): &(char, u32)| {
            let endings = [format!("{unit}IB"), format!("{unit}B"), unit.to_string()];
            endings.iter().find_map(|ending| upper.strip_suffix(ending)).map(|digits| (digits, *shift))
        };
        let (digits, shift) = UNITS.iter().find_map(of_unit).unwrap_or((&upper, 0));
        let bad = || BadSize(text.into());
        let number: usize = digits.parse().map_err(|_| bad())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
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
        let sizes = [("0", 0, "0 B"), ("16", 16, "16 B"), ("4K", 4096, "4 KiB"), ("64k", 65536, "64 KiB")];
        for (text, bytes, shown) in sizes.into_iter().chain([
            ("2G", 2 << 30, "2 GiB"),
            ("1500", 1500, "1500 B"),
            ("1KiB", 1024, "1 KiB"),
        ]) {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, shown));
        }
        for text in ["1K", "1k", "1KB", "1kb", "1KiB", "1024"] {
            assert_eq!(text.parse(), Ok(ByteSize(1024)), "{text}");
        }
        for text in ["", "K", "KiB", "4Ki", "4iB", "4 KB", "4é", "-1", "1.5M", "99999999999G"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_fit_the_ranks() {
        let of = |asked: &[ByteSize], op, world| to_measure(asked, op, DType::F32, world);
        assert_eq!(of(&[], Op::AllGather, 2).unwrap(), LADDER);
        assert_eq!(of(&[], Op::AllGather, 3).unwrap()[..3], [24, 264, 4104]);
        assert_eq!(of(&[], Op::AllReduce, 3).unwrap(), LADDER);
        assert_eq!(of(&[ByteSize(24)], Op::Scatter, 3).unwrap(), [24]);
        assert_eq!(of(&[ByteSize(24)], Op::Barrier, 3).unwrap(), [0]);
        let error = of(&[ByteSize(16)], Op::Scatter, 3).unwrap_err().to_string();
        let nothing = of(&[ByteSize(16), ByteSize(0)], Op::Broadcast, 2).unwrap_err().to_string();
        assert!(nothing.ends_with("nothing to measure; try --sizes 4 or more"), "{nothing}");
        assert!(error.ends_with("needs a multiple of 12 bytes, got 16; try --sizes 24"), "{error}");
    }
}
