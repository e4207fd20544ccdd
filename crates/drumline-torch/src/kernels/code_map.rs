//! Numbers in 8 bits: the codes of a dynamic map, one scale for each block of 256 numbers (Dettmers and others, "8-bit
//! Optimizers via Block-wise Quantization").
//!
//! ```text
//!   block of 256 f32 ─▶ absmax: its greatest magnitude (f32) ─▶ codes: of each number ÷ absmax the nearest in the map
//!
//!   the map, signed: −0.993 … −5.5e-7, 0, 5.5e-7 … 0.993, 1      unsigned: 0, 3.25e-7 … 0.996, 1
//! ```
//! A map has 256 numbers: in each of seven decades evenly spaced ones, twice as many in each as in the one below. Numbers
//! are compared with the middles between neighbours. The 7 highest bits of a number's fraction find its place in a table,
//! because no two middles are so near to each other.

use std::sync::LazyLock;

/// The most numbers that have one scale.
pub(crate) const BLOCK: usize = 256;

/// The upper 16 bits of the smallest number that has a place of its own in the table, below all middles.
pub(super) const LOWEST: u32 = 0x3400;
/// The upper 16 bits of 1.
pub(super) const HIGHEST: u32 = 0x3f80;
/// The entries of the table.
const PLACES: usize = (HIGHEST - LOWEST + 1) as usize;

/// The codes of a map.
pub(super) struct CodeMap {
    /// The number of each code.
    values: [f32; 256],
    /// By the upper 16 bits of a magnitude: how many of the middles are below all such magnitudes, and the lower 16 bits of
    /// the middle among them, if there is one. Each entry has the place in its upper 16 bits.
    places: Box<[u32; PLACES]>,
    is_signed: bool,
}

static SIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(true));
static UNSIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(false));

/// The code of zero in the signed map.
const ZERO: u32 = 127;

/// The magnitudes of a map, from 0 to 1.
fn magnitudes(is_signed: bool) -> Vec<f32> {
    let mut all = vec![0.0];
    for decade in 0..7 {
        let num = if is_signed { 1 << decade } else { 2 << decade };
        let boundaries = evenly_spaced(num + 1);
        let scale = 10f64.powi(decade - 6) as f32;
        all.extend(boundaries.windows(2).map(|pair| scale * ((pair[0] + pair[1]) / 2.0)));
    }
    all.push(1.0);
    all
}

/// So many numbers from 0.1 to 1, computed as `torch.linspace` does: with an f32 step, and each rounded once.
fn evenly_spaced(num: usize) -> Vec<f32> {
    let (start, end) = (0.1f32, 1f32);
    let step = f64::from((end - start) / (num - 1) as f32);
    let number = |nth: usize| {
        if nth < num / 2 {
            (f64::from(start) + step * nth as f64) as f32
        } else {
            (f64::from(end) - step * (num - nth - 1) as f64) as f32
        }
    };
    (0..num).map(number).collect()
}

/// The middles between neighbouring magnitudes.
fn middles(magnitudes: &[f32]) -> Vec<f32> {
    magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect()
}

impl CodeMap {
    /// The map of numbers of both signs.
    pub(super) fn signed() -> &'static Self {
        &SIGNED
    }

    /// The map of numbers that are not negative.
    pub(super) fn unsigned() -> &'static Self {
        &UNSIGNED
    }

    fn new(is_signed: bool) -> Self {
        let magnitudes = magnitudes(is_signed);
        let middles = middles(&magnitudes);
        let mut places = Box::new([0; PLACES]);
        for (place, upper) in places.iter_mut().zip(LOWEST..) {
            let lower_end = if upper == LOWEST { 0.0 } else { f32::from_bits(upper << 16) };
            let num_below = middles.iter().filter(|middle| **middle < lower_end).count() as u32;
            let inside = middles.iter().find(|middle| middle.to_bits() >> 16 == upper);
            *place = num_below << 16 | inside.map_or(0xffff, |middle| middle.to_bits() & 0xffff);
        }
        let mut values = [0.0; 256];
        for (code, value) in values.iter_mut().enumerate() {
            *value = match code.checked_sub(ZERO as usize) {
                _ if !is_signed => magnitudes[code],
                Some(place) => magnitudes[place],
                None => -magnitudes[ZERO as usize - code],
            };
        }
        Self { values, places, is_signed }
    }

    /// The map for kernels of a GPU, as words: the numbers of the codes, the middles, and four places in each word.
    pub(super) fn words(&self) -> Vec<u32> {
        let places: Vec<_> = self.places.iter().map(|entry| (entry >> 16) as u8).collect();
        let places = places.chunks(4).map(|four| {
            let bytes = [0, 1, 2, 3].map(|nth| four.get(nth).copied().unwrap_or(0));
            u32::from_le_bytes(bytes)
        });
        let mut middles = middles(&magnitudes(self.is_signed));
        middles.resize(256, f32::INFINITY);
        self.values.iter().chain(&middles).map(|number| number.to_bits()).chain(places).collect()
    }

    /// The number of each code.
    #[cfg(test)]
    pub(super) fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// How many of the middles are below a magnitude. For a NaN it is all of them.
    #[inline(always)]
    fn place(&self, number: f32) -> u32 {
        let bits = number.to_bits() & 0x7fff_ffff;
        let upper = (bits >> 16).clamp(LOWEST, HIGHEST);
        let entry = self.places[(upper - LOWEST) as usize];
        (entry >> 16) + u32::from(bits & 0xffff > entry & 0xffff)
    }

    /// The code of the nearest number in the map. That of a NaN is the last.
    #[inline(always)]
    fn code<const SIGNED: bool>(&self, number: f32) -> u8 {
        let place = self.place(number);
        let code = match (SIGNED, number < 0.0) {
            (false, _) => place,
            (true, true) => ZERO - place.min(ZERO),
            (true, false) => ZERO + place,
        };
        code as u8
    }

    /// Writes the codes of a block, and returns its scale. Numbers beyond its end are zero.
    #[inline(always)]
    pub(super) fn encode(&self, numbers: &[f32; BLOCK], codes: &mut [u8]) -> f32 {
        // The bits of magnitudes have the order of the magnitudes, those of a NaN are the greatest.
        let greatest =
            numbers.iter().fold(0, |greatest, number| greatest.max(number.to_bits() & 0x7fff_ffff));
        let absmax = f32::from_bits(greatest);
        let divisor = if absmax == 0.0 { 1.0 } else { absmax };
        let all = if self.is_signed {
            self.encode_all::<true>(numbers, divisor)
        } else {
            self.encode_all::<false>(numbers, divisor)
        };
        codes.copy_from_slice(&all[..codes.len()]);
        absmax
    }

    #[inline(always)]
    fn encode_all<const SIGNED: bool>(&self, numbers: &[f32; BLOCK], divisor: f32) -> [u8; BLOCK] {
        let mut codes = [0; BLOCK];
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code = self.code::<SIGNED>(number / divisor);
        }
        codes
    }

    /// The numbers of a block's codes, and any beyond its end.
    #[inline(always)]
    pub(super) fn decode(&self, codes: &[u8], absmax: f32, numbers: &mut [f32; BLOCK]) {
        let mut all = [0; BLOCK];
        all[..codes.len()].copy_from_slice(codes);
        for (number, code) in numbers.iter_mut().zip(&all) {
            *number = self.values[usize::from(*code)] * absmax;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(map: &CodeMap, number: f32) -> u8 {
        if map.is_signed { map.code::<true>(number) } else { map.code::<false>(number) }
    }

    /// A block that begins with these numbers.
    fn block(begin: &[f32]) -> [f32; BLOCK] {
        let mut all = [0.0; BLOCK];
        all[..begin.len()].copy_from_slice(begin);
        all
    }

    fn nearest(map: &CodeMap, number: f32) -> u8 {
        let values = map.values();
        values.windows(2).filter(|pair| number > (pair[0] + pair[1]) / 2.0).count() as u8
    }

    #[test]
    fn maps_are_sorted_and_have_zero_and_one() {
        for map in [CodeMap::signed(), CodeMap::unsigned()] {
            let values = map.values();
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!((values[255], values.contains(&0.0)), (1.0, true));
        }
        assert_eq!((CodeMap::signed().values()[127], CodeMap::unsigned().values()[0]), (0.0, 0.0));
    }

    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let file =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden/peer_optimizers.safetensors");
        let golden = tch::Tensor::read_safetensors(file).unwrap();
        for (name, map) in [("map.signed", CodeMap::signed()), ("map.unsigned", CodeMap::unsigned())] {
            let expected = &golden.iter().find(|(found, _)| found == name).unwrap().1;
            assert!(tch::Tensor::from_slice(map.values()).equal(expected), "{name}");
        }
    }

    #[test]
    fn the_table_finds_the_nearest_number_everywhere() {
        for (map, signs) in [(CodeMap::signed(), &[1.0f32, -1.0][..]), (CodeMap::unsigned(), &[1.0])] {
            let edges = (0..=HIGHEST).flat_map(|upper| [upper << 16, upper << 16 | 0xffff]);
            let middles = map.values().windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0).abs().to_bits());
            let near = middles.flat_map(|bits| [bits.saturating_sub(1), bits, bits + 1]);
            for bits in edges.chain(near).filter(|bits| *bits <= 1f32.to_bits()) {
                for sign in signs {
                    let number = sign * f32::from_bits(bits);
                    let (found, expected) = (code(map, number), nearest(map, number));
                    // In the middle between two negative numbers either is as near.
                    let is_middle = |code: u8| {
                        let pair = [map.values()[usize::from(code) - 1], map.values()[usize::from(code)]];
                        (pair[0] + pair[1]) / 2.0 == number
                    };
                    assert!(
                        found == expected || found == expected + 1 && is_middle(found),
                        "{number:e}: {found} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_block_of_zeros_stays_zero_and_the_greatest_number_is_exact() {
        let (map, mut codes) = (CodeMap::signed(), [9; 3]);
        assert_eq!(map.encode(&block(&[]), &mut codes), 0.0);
        assert_eq!(codes, [127; 3]);
        let absmax = map.encode(&block(&[3.0, -1.5, 0.0]), &mut codes);
        let mut numbers = block(&[]);
        map.decode(&codes, absmax, &mut numbers);
        assert_eq!((absmax, numbers[0], numbers[2]), (3.0, 3.0, 0.0));
        assert!((numbers[1] + 1.5).abs() < 0.03, "{numbers:?}");
        assert!(map.encode(&block(&[f32::NAN, 1.0, 0.0]), &mut codes).is_nan(), "a NaN is not hidden");
    }
}
