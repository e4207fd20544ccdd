//! Random numbers that depend only on the seed, on every machine: the 64-bit Mersenne Twister, and distributions over it.

use rand_mt::Mt64;

/// A generator that is independent of all others in the process.
pub(crate) struct Random {
    twister: Mt64,
}

impl Random {
    /// The generator of a seed and a stream. Each stream of a seed has its own numbers.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self { twister: Mt64::new_with_key([seed, stream]) }
    }

    /// A number from 0 to `bound` - 1. All are equally likely, up to a bias below `bound` / 2^64.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.twister.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number in [0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.twister.next_u64() >> 11) as f64 * f64::exp2(-53.0)
    }

    /// True with this probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    /// A random element.
    pub(crate) fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Puts the list into a random order; all orders are equally likely.
    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for place in (1..list.len()).rev() {
            list.swap(place, self.below(place + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn numbers_depend_on_seed_and_stream() {
        let draws: HashSet<_> = (0..100).map(|i| Random::new(i / 10, i % 10).below(1 << 40)).collect();
        assert_eq!(draws.len(), 100);
        assert!(draws.contains(&Random::new(3, 4).below(1 << 40)));
    }

    #[test]
    fn orders_are_about_equally_likely() {
        let mut random = Random::new(7, 0);
        let mut first = [0; 4];
        for _ in 0..4000 {
            let mut list = [0, 1, 2, 3];
            random.shuffle(&mut list);
            first[list[0]] += 1;
        }
        assert!(first.iter().all(|count| (900..1100).contains(count)), "{first:?}");
        let mean = (0..4000).map(|_| random.uniform()).sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.03 && !random.chance(0.0) && random.chance(1.0), "{mean}");
    }
}
