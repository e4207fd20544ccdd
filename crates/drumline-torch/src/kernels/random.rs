//! Random bits that are a function of what they are for, and not of an order: two 32-bit hashes.

/// A 32-bit hash in which each input bit changes half of the output bits (C. Wellons' "lowbias32").
#[inline(always)]
pub(crate) fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The random bits of a tensor's elements in one step. Each element has its own, by its index in the whole tensor, so
/// that any part of it draws the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Draw {
    seed: [u32; 2],
    /// The index of the first element of these slices in the whole tensor.
    first: u64,
}

impl Draw {
    /// The bits of the tensor of this name in this step, for slices that begin at the element `first` of the whole.
    pub fn new(seed: u64, name: &str, step: u64, first: u64) -> Self {
        let of_step = mix(step as u32 ^ mix((step >> 32) as u32));
        Self { seed: [Self::of_name(seed, name), mix((seed >> 32) as u32 ^ of_step)], first }
    }

    /// What the bits depend on in all steps of the tensor of this name.
    pub(crate) fn of_name(seed: u64, name: &str) -> u32 {
        // FNV-1a: the same in every build and on every machine.
        let name = name
            .bytes()
            .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        mix(seed as u32 ^ mix(name))
    }

    /// The bits for slices that begin so many elements later.
    pub(super) fn after(self, num_elements: usize) -> Self {
        Self { first: self.first + num_elements as u64, ..self }
    }

    /// The bits of the nth element of the slices: 16 for each of two numbers.
    #[inline(always)]
    pub(super) fn bits(&self, nth: usize) -> u32 {
        let (low, carry) = (self.first as u32).overflowing_add(nth as u32);
        let high = ((self.first >> 32) as u32).wrapping_add(u32::from(carry)).wrapping_mul(0x9e37_79b9);
        mix(mix(low ^ self.seed[0]).wrapping_add(self.seed[1] ^ high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_depend_on_seed_name_step_and_place_in_the_whole_tensor() {
        let draw = Draw::new(1, "w", 2, 100);
        assert_eq!(draw.bits(7), Draw::new(1, "w", 2, 0).bits(107));
        assert_eq!(draw.bits(7), draw.after(7).bits(0));
        let others = [Draw::new(2, "w", 2, 100), Draw::new(1, "v", 2, 100), Draw::new(1, "w", 3, 100)];
        for other in others {
            let same = (0..1000).filter(|nth| other.bits(*nth) == draw.bits(*nth)).count();
            assert!(same < 3, "{other:?}: {same}");
        }
        let across = Draw::new(1, "w", 2, u64::from(u32::MAX));
        assert_eq!(across.bits(1), Draw::new(1, "w", 2, 1 << 32).bits(0));
        assert_ne!(across.bits(1), Draw::new(1, "w", 2, 0).bits(0));
    }
}
