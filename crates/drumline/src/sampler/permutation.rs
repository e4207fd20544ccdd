//! PyTorch's `randperm` on the CPU, in plain Rust: the Mersenne Twister (mt19937) and two ways to shuffle.
//!
//! A *draw* is the twister's next 32 bits. Short lists are shuffled from the front: place `i` swaps with one of those from
//! `i` on, chosen by a draw modulo their number. Where that many numbers would make the modulo unfair, two draws make 64
//! bits, the first of them the upper half, and the list grows from the inside out: the new number goes to a random
//! place among those so far, and what was there goes to the end.

use rand_mt::Mt;

/// From this length on PyTorch draws 64 bits.
const LONG: usize = u32::MAX as usize / 20;

/// The numbers below `len` in the order of `torch.randperm(len, generator=g)` after `g.manual_seed(seed)`.
pub(super) fn permutation(len: usize, seed: u64) -> Vec<usize> {
    // The twister's seed has 32 bits; PyTorch drops the others, too.
    let mut twister = Mt::new(seed as u32);
    if len < LONG { from_the_front(len, &mut twister) } else { inside_out(len, &mut twister) }
}

fn from_the_front(len: usize, twister: &mut Mt) -> Vec<usize> {
    let mut order: Vec<_> = (0..len).collect();
    for place in 0..len.saturating_sub(1) {
        let draw = twister.next_u32() as usize;
        order.swap(place, place + draw % (len - place));
    }
    order
}

fn inside_out(len: usize, twister: &mut Mt) -> Vec<usize> {
    let mut order = Vec::with_capacity(len);
    for number in 0..len {
        let upper = u64::from(twister.next_u32());
        let draw = (upper << 32) | u64::from(twister.next_u32());
        let place = (draw % (number as u64 + 1)) as usize;
        order.push(number);
        order.swap(place, number);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::super::golden;
    use super::*;

    #[test]
    fn both_ways_are_permutations() {
        for shuffle in [from_the_front, inside_out] {
            for len in [0, 1, 2, 3, 100] {
                let mut order = shuffle(len, &mut Mt::new(3));
                assert!(len < 100 || order.iter().ne((0..len).collect::<Vec<_>>().iter()));
                order.sort_unstable();
                assert!(order.into_iter().eq(0..len));
            }
        }
    }

    /// 2 GB and some time: run it with `--ignored` after a change here.
    #[test]
    #[ignore = "needs 2 GB and a minute"]
    fn long_lists_are_shuffled_as_pytorch_does() {
        for large in golden::read().large {
            let order = permutation(large.length, large.seed);
            assert_eq!(order[..5], large.first);
            assert_eq!(golden::crc(&order), large.crc);
        }
    }
}
