//! Which ranks are slower than the others, as a pure function: times come in as numbers, and messages for people come out.
//!
//! ```text
//!   work of a step, of each rank ─▶ samples of at least 250 ms ─▶ ratio to the median of the others
//!     ─▶ of the last 20: 18 above 1.10 ─▶ slow; 10 or fewer above 1.05 ─▶ no longer slow
//! ```
//! *Work* is what a rank does by itself in a step: it waits for data and computes. Waiting for other ranks does not count, or all
//! would look alike. A *sample* is one step; if steps are short it is several, since the scheduler of a busy machine may delay one
//! rank for many milliseconds in a row. Two bounds, and a count of samples instead of a mean, keep the answer from flickering: one
//! long delay is one sample.
//!
//! Not here: who measures (`drumline`'s trainer), who shows it (`bar`, `page`).

use std::collections::VecDeque;
use std::fmt;

/// The number of samples that count.
const WINDOW: usize = 20;
/// The least seconds of a sample.
const SAMPLE: f64 = 0.25;
/// How much longer the work of a slow rank takes than that of the others.
const SLOW: f64 = 1.10;
/// In how many samples.
const SLOW_SAMPLES: usize = 18;
/// A slow rank stays slow while more than half of its samples are above this.
const STILL_SLOW: f64 = 1.05;

/// A rank that is, or was, slower than the others.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct SlowRank {
    /// The rank.
    pub rank: usize,
    /// Its work of a step, as a multiple of the median of the others.
    pub times: f64,
    /// The number of steps.
    pub steps: u64,
}

/// A change that people should know about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum News {
    /// A rank has become slow.
    Slow(SlowRank),
    /// A rank is no longer slow.
    Recovered(SlowRank),
}

impl fmt::Display for News {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slow(SlowRank { rank, times, steps }) => write!(
                f,
                "rank {rank} is slower than the others: its work of a step took {times:.2} × their median in the last {steps} steps; \
                 try `drumline doctor` on its host, and look at what else runs there"
            ),
            Self::Recovered(SlowRank { rank, times, steps }) => {
                write!(
                    f,
                    "rank {rank} is no longer slower than the others; it took {times:.2} × for {steps} steps"
                )
            }
        }
    }
}

impl fmt::Display for SlowRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, times, steps } = self;
        write!(
            f,
            "rank {rank} was slower than the others in {steps} steps: {times:.2} × the median of their work"
        )
    }
}

/// All ranks of a run. Ranks that are given the same numbers get the same answers.
#[derive(Debug, Clone, Default)]
pub struct SlowRanks {
    ranks: Vec<Watched>,
    /// The work of each rank in the current sample.
    work: Vec<f64>,
    steps: u64,
}

#[derive(Debug, Clone, Default)]
struct Watched {
    /// The last samples, oldest first: the ratio of its work to that of the others, and the number of steps.
    samples: VecDeque<(f64, u64)>,
    is_slow: bool,
    /// While it was slow: the number of steps, and the sum of ratios over them.
    slow_steps: u64,
    slow_sum: f64,
}

impl SlowRanks {
    /// Adds a step, with the seconds that each rank has worked.
    pub fn step(&mut self, work: &[f64]) -> Vec<News> {
        if work.len() != self.work.len() {
            *self =
                Self { ranks: vec![Watched::default(); work.len()], work: vec![0.0; work.len()], steps: 0 };
        }
        self.steps += 1;
        self.work.iter_mut().zip(work).for_each(|(sum, work)| *sum += work.max(0.0));
        if self.work.iter().copied().fold(0.0, f64::max) < SAMPLE {
            return Vec::new();
        }
        let sample = std::mem::replace(&mut self.work, vec![0.0; work.len()]);
        let steps = std::mem::take(&mut self.steps);
        let ranks = self.ranks.iter_mut().enumerate();
        ranks.filter_map(|(rank, watched)| watched.add(rank, ratio(&sample, rank), steps)).collect()
    }

    /// The ranks that are slow now.
    pub fn now(&self) -> Vec<SlowRank> {
        let ranks = self.ranks.iter().enumerate().filter(|(_, watched)| watched.is_slow);
        ranks.map(|(rank, watched)| watched.of_window(rank)).collect()
    }

    /// The ranks that were slow at any time, with all their slow steps.
    pub fn in_all(&self) -> Vec<SlowRank> {
        let ranks = self.ranks.iter().enumerate().filter(|(_, watched)| watched.slow_steps > 0);
        ranks.map(|(rank, watched)| watched.of_all(rank)).collect()
    }
}

impl Watched {
    fn add(&mut self, rank: usize, ratio: f64, steps: u64) -> Option<News> {
        self.samples.push_back((ratio, steps));
        if self.samples.len() > WINDOW {
            self.samples.pop_front();
        }
        let above = |bound: f64| self.samples.iter().filter(|(ratio, _)| *ratio > bound).count();
        let was_slow = self.is_slow;
        self.is_slow = if was_slow { above(STILL_SLOW) > WINDOW / 2 } else { above(SLOW) >= SLOW_SAMPLES };
        match (was_slow, self.is_slow) {
            (false, true) => {
                // The whole window counts, since it made the rank slow.
                self.samples.clone().into_iter().for_each(|(ratio, steps)| self.count(ratio, steps));
                Some(News::Slow(self.of_window(rank)))
            }
            (true, true) => {
                self.count(ratio, steps);
                None
            }
            (true, false) => Some(News::Recovered(self.of_all(rank))),
            (false, false) => None,
        }
    }

    fn count(&mut self, ratio: f64, steps: u64) {
        self.slow_steps += steps;
        self.slow_sum += ratio * steps as f64;
    }

    /// The median ratio of the last samples.
    fn of_window(&self, rank: usize) -> SlowRank {
        let mut ratios: Vec<f64> = self.samples.iter().map(|(ratio, _)| *ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let steps = self.samples.iter().map(|(_, steps)| steps).sum();
        SlowRank { rank, times: ratios.get(ratios.len() / 2).copied().unwrap_or(1.0), steps }
    }

    fn of_all(&self, rank: usize) -> SlowRank {
        SlowRank { rank, times: self.slow_sum / self.slow_steps.max(1) as f64, steps: self.slow_steps }
    }
}

/// The ratio of a rank's work to the median of the others. If there are two in the middle the lower one counts, so that the
/// slower of two ranks is compared with the faster.
fn ratio(work: &[f64], rank: usize) -> f64 {
    let mut others: Vec<f64> =
        work.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, work)| *work).collect();
    others.sort_by(f64::total_cmp);
    match others.get(others.len().saturating_sub(1) / 2) {
        Some(median) if *median > 0.0 => work[rank] / median,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator of numbers from 0 to 1, the same in each run of the tests.
    struct Noise(u64);

    impl Noise {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as f64 / (1u64 << 31) as f64
        }
    }

    /// All messages of this many steps.
    fn messages(steps: usize, mut work: impl FnMut(usize) -> Vec<f64>) -> (Vec<News>, SlowRanks) {
        let mut ranks = SlowRanks::default();
        let news = (0..steps).flat_map(|step| ranks.step(&work(step))).collect();
        (news, ranks)
    }

    #[test]
    fn a_rank_that_is_slower_for_twenty_steps_is_named_once() {
        for of in 2..5 {
            let slow = |_| (0..of).map(|rank| if rank == 1 { 0.6 } else { 0.5 }).collect::<Vec<_>>();
            assert_eq!(messages(17, slow).0, []);
            let (news, ranks) = messages(100, slow);
            assert!(matches!(news[..], [News::Slow(SlowRank { rank: 1, .. })]), "{news:?}");
            let [SlowRank { rank: 1, times, steps: 100 }] = ranks.in_all()[..] else { panic!("{ranks:?}") };
            assert!((times - 1.2).abs() < 1e-9 && ranks.now().len() == 1);
        }
    }

    #[test]
    fn ten_percent_are_the_bound() {
        assert_eq!(messages(200, |_| vec![1.0, 1.09]).0, []);
        assert_eq!(messages(200, |_| vec![1.0, 1.11]).0.len(), 1);
        assert_eq!(messages(200, |_| vec![1.0]).0, [], "alone");
        assert_eq!(messages(200, |_| vec![0.0, 0.0]).0, [], "without any work");
    }

    #[test]
    fn a_few_long_steps_are_not_slowness() {
        // Three long ones in twenty steps: a mean would be far above the bound.
        let (news, _) = messages(400, |step| vec![1.0, if step % 20 < 3 { 5.0 } else { 1.0 }]);
        assert_eq!(news, []);
    }

    #[test]
    fn two_ranks_of_a_busy_machine_do_not_flicker() {
        // Each is delayed now and then, by up to its own time; neither is slower.
        for seed in 0..50 {
            let mut noise = Noise(seed);
            let (news, _) = messages(2_000, |_| vec![1.0 + noise.next(), 1.0 + noise.next()]);
            assert_eq!(news, [], "seed {seed}");
        }
        // One is slower by half beneath the same noise: reported once, and not taken back.
        for seed in 0..50 {
            let mut noise = Noise(seed);
            let (news, _) = messages(2_000, |_| vec![1.0 + 0.3 * noise.next(), 1.5 + 0.3 * noise.next()]);
            assert!(matches!(news[..], [News::Slow(SlowRank { rank: 1, .. })]), "seed {seed}: {news:?}");
        }
        // At the bound itself it is reported a few times at most in 2,000 steps, not every few steps.
        for seed in 0..50 {
            let mut noise = Noise(seed);
            let (news, _) = messages(2_000, |_| vec![1.0 + 0.2 * noise.next(), 1.1 + 0.2 * noise.next()]);
            assert!(news.len() <= 4, "seed {seed}: {news:?}");
        }
    }

    #[test]
    fn short_steps_are_combined() {
        // A scheduler gives one rank half a core for 100 ms: a hundred slow steps in a row, and no slow rank.
        let (news, _) = messages(50_000, |step| match step / 100 % 10 {
            3 => vec![0.001, 0.002],
            8 => vec![0.002, 0.001],
            _ => vec![0.001, 0.001],
        });
        assert_eq!(news, []);
        let (news, _) = messages(50_000, |_| vec![0.001, 0.002]);
        assert!(matches!(news[..], [News::Slow(SlowRank { rank: 1, .. })]), "{news:?}");
    }

    #[test]
    fn a_rank_recovers() {
        let (news, ranks) = messages(100, |step| vec![1.0, if step < 40 { 1.5 } else { 1.0 }]);
        let [News::Slow(_), News::Recovered(SlowRank { rank: 1, times, steps })] = news[..] else {
            panic!("{news:?}")
        };
        assert!((40..=50).contains(&steps) && (1.35..1.5).contains(&times), "{times} {steps}");
        assert_eq!((ranks.now(), ranks.in_all().len()), (vec![], 1));
        assert_eq!(
            news[0].to_string(),
            "rank 1 is slower than the others: its work of a step took 1.50 × their median in the last 18 steps; \
             try `drumline doctor` on its host, and look at what else runs there"
        );
    }

    #[test]
    fn another_number_of_ranks_starts_over() {
        let mut ranks = SlowRanks::default();
        (0..19).for_each(|_| drop(ranks.step(&[1.0, 2.0])));
        assert_eq!(ranks.step(&[1.0, 2.0, 1.0]), []);
        assert_eq!(ranks.now(), []);
    }
}
