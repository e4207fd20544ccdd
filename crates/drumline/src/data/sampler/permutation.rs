//! PyTorch's `randperm` on the CPU, in plain Rust: the Mersenne Twister (mt19937) and two ways to shuffle.
//!
//! A *draw* is the twister's next 32 bits. Short lists are shuffled from the front: place `i` swaps with one of the
//! places from `i` on, chosen by a draw modulo their number. For long lists that modulo would be biased. There two
//! draws make 64 bits, the first of them the upper half, and the list grows from the inside out: the new number goes to
//! a random place among those so far, and the number there goes to the end.

use rand_mt::Mt;

/// PyTorch draws 64 bits for lists of at least this length.
const LONG: usize = u32::MAX as usize / 20;

/// The numbers below `len` in the order of `torch.randperm(len, generator=g)` after `g.manual_seed(seed)`.
pub(super) fn permutation(len: usize, seed: u64) -> Vec<usize> {
    // The twister's seed has 32 bits. PyTorch also drops the upper ones.
    let mut twister = Mt::new(seed as u32);
    if len < LONG { from_the_front(len, &mut twister) } else { inside_out(len, &mut twister) }
}

fn from_the_front(len: usize, twister: &mut Mt) -> Vec<usize> {
    let mut order: Vec<_> = (0..len).collect();
    for place in 0..len.saturating_sub(1) {
        order.swap(place, one_behind(place, len, twister));
    }
    order
}

/// One of the places from `place` on.
fn one_behind(place: usize, len: usize, twister: &mut Mt) -> usize {
    place + twister.next_u32() as usize % (len - place)
}

fn inside_out(len: usize, twister: &mut Mt) -> Vec<usize> {
    let mut order = Vec::with_capacity(len);
    for number in 0..len {
        order.push(number);
        order.swap(one_up_to(number, twister), number);
    }
    order
}

/// One of the places up to `last`.
fn one_up_to(last: usize, twister: &mut Mt) -> usize {
    let upper = u64::from(twister.next_u32());
    let draw = (upper << 32) | u64::from(twister.next_u32());
    (draw % (last as u64 + 1)) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

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

    const FIRST: usize = 5;

    /// The first numbers, without making the whole list: later swaps do not touch them.
    fn first_from_the_front(len: usize, twister: &mut Mt) -> Vec<usize> {
        let mut moved = HashMap::new();
        for place in 0..FIRST {
            let other = one_behind(place, len, twister);
            let numbers = [place, other].map(|at| moved.get(&at).copied().unwrap_or(at));
            moved.extend([(place, numbers[1]), (other, numbers[0])]);
        }
        (0..FIRST).map(|place| moved[&place]).collect()
    }

    /// As above: of the later numbers only those count that go to one of the first places.
    fn first_inside_out(len: usize, twister: &mut Mt) -> Vec<usize> {
        let mut first = inside_out(FIRST, twister);
        for number in FIRST..len {
            let place = one_up_to(number, twister);
            if place < FIRST {
                first[place] = number;
            }
        }
        first
    }

    #[test]
    fn long_lists_begin_as_pytorchs_do() {
        let large = golden::read().large;
        assert!(
            large.iter().any(|large| large.length < LONG) && large.iter().any(|large| large.length >= LONG)
        );
        for large in large {
            let first = if large.length < LONG { first_from_the_front } else { first_inside_out };
            assert_eq!(first(large.length, &mut Mt::new(large.seed as u32)), large.first);
        }
    }

    #[test]
    fn the_beginning_of_a_list_is_known_without_the_list() {
        for len in [5, 6, 7, 100, 1000] {
            let twister = || Mt::new(len as u32);
            assert_eq!(
                first_from_the_front(len, &mut twister()),
                from_the_front(len, &mut twister())[..FIRST]
            );
            assert_eq!(first_inside_out(len, &mut twister()), inside_out(len, &mut twister())[..FIRST]);
        }
    }
}
