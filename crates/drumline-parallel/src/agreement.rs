//! The agreement before a step: one small all-gather, after which every rank knows what all ranks bring.
//!
//! ```text
//!   rank 0   2 batches, 64 samples           ─┐
//!   rank 1   1 batch,   17 samples           ─┼─▶ all: 113 samples; every rank has data;
//!   rank 2   1 batch,   32 samples, "stop!"  ─┘      stop first, because rank 2 asks for it
//! ```
//! Ranks along `pp` and `tp` hold parts of the model and see the same samples, so that only one of them is counted. Not
//! here: agreements after backward, which are the loop's sum of losses and the engine's overflow and norm.

use drumline_comm::{Axis, CommError, Mesh, MeshShape, ProcessGroup};

/// What a rank brings to the agreement.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Brought {
    /// Its number of batches for the step.
    pub batches: usize,
    /// The number of their samples.
    pub samples: usize,
    /// What the sum of their losses is divided by: samples, tokens, or any weight.
    pub count: f64,
    /// Something failed here.
    pub failed: bool,
    /// It asks for the end of the training.
    pub stop: bool,
    /// It asks for an evaluation.
    pub validation: bool,
    /// It asks for a checkpoint.
    pub checkpoint: bool,
    /// It can run these batches as a CUDA graph.
    pub graph: bool,
    /// It would have to record that graph first.
    pub record: bool,
    /// Seconds since the training began in which it did not wait for other ranks: loading data and computing.
    pub work: f64,
}

/// The weight of one batch of a rank. All zero for a batch that is only a filler.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Count {
    /// Its samples.
    pub samples: usize,
    /// Its part of the number by which losses are divided.
    pub weight: f64,
}

/// What every rank knows after the agreement.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreed {
    /// Something failed on some rank.
    pub failed: bool,
    /// Some rank asks for the end.
    pub stop: bool,
    /// Some rank asks for an evaluation.
    pub validation: bool,
    /// Some rank asks for a checkpoint.
    pub checkpoint: bool,
    /// Every rank can run the step as a CUDA graph.
    pub graph: bool,
    /// Some rank has to record the graph first: then all record.
    pub record: bool,
    /// Samples of all ranks.
    pub samples: u64,
    /// The sum of all ranks' counts.
    pub count: f64,
    /// The batches of each rank.
    pub batches: Vec<usize>,
    /// The seconds of work of each rank.
    pub work: Vec<f64>,
    /// The number of ranks over which gradients are averaged.
    pub num_averaged: usize,
    /// For each micro-batch the weights of all ranks; empty unless ranks brought them.
    pub micro_batches: Vec<Vec<Count>>,
    shape: MeshShape,
}

const WORDS: usize = 5;

impl Brought {
    fn words(&self) -> [f64; WORDS] {
        let flags = [self.failed, self.stop, self.validation, self.checkpoint, self.graph, self.record];
        let flags = flags.iter().rev().fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        [self.batches as f64, self.samples as f64, self.count, f64::from(flags), self.work]
    }
}

impl Agreed {
    /// The agreement over the totals of each rank's batches. Every rank calls it.
    #[track_caller]
    pub fn reach(mesh: &Mesh, brought: &Brought) -> Result<Self, CommError> {
        Self::gather(mesh.whole(), mesh.shape(), &brought.words())
    }

    /// The same for replicas without a mesh.
    #[track_caller]
    pub(crate) fn reach_among(group: &ProcessGroup, brought: &Brought) -> Result<Self, CommError> {
        let shape = MeshShape::default().with(Axis::Dp, group.size());
        Self::gather(group, &shape, &brought.words())
    }

    /// The same, with the weight of each batch. A rank has at most `longest` batches.
    #[track_caller]
    pub fn reach_for_each(
        mesh: &Mesh,
        brought: &Brought,
        counts: &[Count],
        longest: usize,
    ) -> Result<Self, CommError> {
        Self::gather(mesh.whole(), mesh.shape(), &words_for_each(brought, counts, longest))
    }

    #[track_caller]
    fn gather(group: &ProcessGroup, shape: &MeshShape, own: &[f64]) -> Result<Self, CommError> {
        let mut all = vec![0.0; own.len() * group.size()];
        group.all_gather(own, &mut all)?;
        let ranks: Vec<&[f64]> = all.chunks_exact(own.len()).collect();
        Ok(Self::of(&ranks, shape))
    }

    fn of(ranks: &[&[f64]], shape: &MeshShape) -> Self {
        let flags = ranks.iter().fold(0, |flags, words| flags | words[3] as u32);
        let flags_of_each = ranks.iter().fold(u32::MAX, |flags, words| flags & words[3] as u32);
        let sum = |word: usize, counts_once: fn(&MeshShape, usize) -> bool| {
            let counted = ranks.iter().enumerate().filter(|(rank, _)| counts_once(shape, *rank));
            counted.map(|(_, words)| words[word]).sum::<f64>()
        };
        Self {
            failed: flags & 1 != 0,
            stop: flags & 2 != 0,
            validation: flags & 4 != 0,
            checkpoint: flags & 8 != 0,
            graph: flags_of_each & 16 != 0,
            record: flags & 32 != 0,
            samples: sum(1, has_own_samples) as u64,
            count: sum(2, has_own_tokens),
            batches: ranks.iter().map(|words| words[0] as usize).collect(),
            work: ranks.iter().map(|words| words[4]).collect(),
            num_averaged: shape.size_of(Axis::LOSSES),
            micro_batches: each_micro_batch(ranks),
            shape: *shape,
        }
    }

    /// The largest number of batches of a rank. All ranks take part in as many micro-batches.
    pub fn most_batches(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(0)
    }

    /// The batches of a rank that are no fillers.
    pub fn real_batches(&self, rank: usize) -> usize {
        if self.micro_batches.is_empty() {
            return self.batches[rank];
        }
        self.micro_batches.iter().filter(|counts| counts[rank].samples > 0).count()
    }

    /// Whether ranks have different numbers of batches, or a batch is only a filler.
    pub fn is_uneven(&self) -> bool {
        let most = self.most_batches();
        let is_filler = |count: &Count| count.samples == 0;
        self.batches.iter().any(|batches| *batches != most)
            || self.micro_batches.iter().flatten().any(is_filler)
    }

    /// The first rank that has no data in the first micro-batch.
    pub fn without_data(&self) -> Option<usize> {
        match self.micro_batches.first() {
            Some(counts) => counts.iter().position(|count| count.samples == 0),
            None => self.batches.iter().position(|batches| *batches == 0),
        }
    }

    /// The number of ranks that have data.
    pub fn num_with_data(&self) -> usize {
        self.batches.iter().filter(|batches| **batches > 0).count()
    }

    /// The last rank that has data; `None` if no rank has.
    pub fn last_with_data(&self) -> Option<usize> {
        self.batches.iter().rposition(|batches| *batches > 0)
    }

    /// The rank whose buffers all ranks use in the step, as its place among those that average gradients; `None` if no
    /// rank has data. Ranks only run out of data: one that has data now has trained in every step before, and its
    /// buffers are up to date.
    pub fn buffers_of(&self) -> Option<usize> {
        let rank = match self.micro_batches.last() {
            Some(last) => last.iter().position(|count| count.samples > 0),
            None if self.num_with_data() == self.batches.len() => Some(0),
            None => self.last_with_data(),
        };
        rank.map(|rank| self.shape.index(rank, Axis::LOSSES))
    }

    /// The factor for a sum of losses, with which the mean of all ranks' gradients is the gradient of the mean loss.
    pub fn factor_of_sums(&self) -> f64 {
        self.num_averaged as f64 / self.count
    }

    /// The same for the mean loss of a micro-batch of this weight.
    pub fn factor_of_mean(&self, weight: f64) -> f64 {
        weight * self.num_averaged as f64 / self.count
    }
}

/// Whether a rank is the one that is counted among those that share its samples.
fn has_own_samples(shape: &MeshShape, rank: usize) -> bool {
    has_own_tokens(shape, rank) && shape.coordinate(rank, Axis::Cp) == 0
}

/// Whether a rank is the one that is counted among those that share its tokens.
fn has_own_tokens(shape: &MeshShape, rank: usize) -> bool {
    [Axis::Pp, Axis::Tp].into_iter().all(|axis| shape.coordinate(rank, axis) == 0)
}

/// The words of a rank, with zeros for the batches that it does not have.
fn words_for_each(brought: &Brought, counts: &[Count], longest: usize) -> Vec<f64> {
    let mut words = brought.words().to_vec();
    words.extend(counts.iter().flat_map(|count| [count.samples as f64, count.weight]));
    words.resize(WORDS + 2 * longest, 0.0);
    words
}

fn each_micro_batch(ranks: &[&[f64]]) -> Vec<Vec<Count>> {
    if ranks.iter().all(|words| words.len() == WORDS) {
        return Vec::new();
    }
    let most = ranks.iter().map(|words| words[0] as usize).max().unwrap_or(0);
    let count = |words: &&[f64], index: usize| {
        let at = WORDS + 2 * index;
        Count { samples: words[at] as usize, weight: words[at + 1] }
    };
    (0..most).map(|index| ranks.iter().map(|words| count(words, index)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(brought: &[Brought]) -> Agreed {
        let words: Vec<Vec<f64>> = brought.iter().map(|brought| brought.words().to_vec()).collect();
        of(&words, MeshShape::default().with(Axis::Dp, brought.len()))
    }

    fn of(words: &[Vec<f64>], shape: MeshShape) -> Agreed {
        Agreed::of(&words.iter().map(Vec::as_slice).collect::<Vec<_>>(), &shape)
    }

    /// Batches with these numbers of samples on each rank.
    fn of_samples(ranks: &[&[usize]], longest: usize) -> Agreed {
        let words = |samples: &&[usize]| {
            let count = |samples: &usize| Count { samples: *samples, weight: *samples as f64 };
            let counts: Vec<Count> = samples.iter().map(count).collect();
            let total: usize = samples.iter().sum();
            let brought =
                Brought { batches: counts.len(), samples: total, count: total as f64, ..Brought::default() };
            words_for_each(&brought, &counts, longest)
        };
        let words: Vec<Vec<f64>> = ranks.iter().map(words).collect();
        of(&words, MeshShape::default().with(Axis::Dp, ranks.len()))
    }

    #[test]
    fn counts_add_up_and_a_request_of_any_rank_is_seen() {
        let full = Brought { batches: 2, samples: 64, count: 640.0, ..Default::default() };
        let all = agreed(&[full, full]);
        assert_eq!((all.samples, all.count, all.buffers_of()), (128, 1280.0, Some(0)));
        assert!(!(all.failed || all.stop || all.validation || all.checkpoint));
        let asking = |brought| agreed(&[full, brought]);
        assert!(asking(Brought { failed: true, ..full }).failed);
        assert!(asking(Brought { stop: true, ..full }).stop);
        assert!(asking(Brought { validation: true, ..full }).validation);
        assert!(asking(Brought { checkpoint: true, ..full }).checkpoint);
        assert!(asking(Brought { record: true, ..full }).record && !all.record);
        assert_eq!(asking(Brought { work: 2.5, ..full }).work, [0.0, 2.5]);
        let able = Brought { graph: true, ..full };
        assert!(
            agreed(&[able, able]).graph && !agreed(&[able, full]).graph,
            "all ranks run a graph, or none"
        );
    }

    #[test]
    fn buffers_are_of_a_rank_that_has_data() {
        let (full, none) = (Brought { batches: 1, ..Default::default() }, Brought::default());
        assert_eq!(agreed(&[full, full, none]).buffers_of(), Some(1));
        assert_eq!(agreed(&[none, none, full]).buffers_of(), Some(2));
        assert_eq!(agreed(&[none, none]).buffers_of(), None);
        assert!(agreed(&[none, full]).is_uneven() && !agreed(&[full, full]).is_uneven());
        assert_eq!(agreed(&[none, Brought { batches: 3, ..none }, full]).most_batches(), 3);
        assert_eq!(agreed(&[full, none, none]).without_data(), Some(1));
        assert_eq!(of_samples(&[&[2], &[2]], 1).buffers_of(), Some(0));
        assert_eq!(of_samples(&[&[2, 0], &[2, 1]], 2).buffers_of(), Some(1), "it has data to the end");
        assert_eq!(of_samples(&[&[], &[]], 2).buffers_of(), None);
    }

    #[test]
    fn each_sample_of_a_window_weighs_the_same() {
        let ranks: [&[usize]; 3] = [&[4, 4], &[3, 0], &[3]];
        let agreed = of_samples(&ranks, 3);
        assert_eq!(agreed.micro_batches.len(), 2);
        assert!(agreed.is_uneven());
        assert_eq!(agreed.without_data(), None, "each has data in the first micro-batch");
        // Averaged over ranks, each sample has a weight of 1/14.
        let parts = agreed.micro_batches.iter().flatten().map(|count| {
            let part = agreed.factor_of_mean(count.weight) / 3.0;
            assert!((part - count.samples as f64 / 14.0).abs() < 1e-12, "{part}");
            part
        });
        assert!((parts.sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((agreed.factor_of_sums() - 3.0 / 14.0).abs() < 1e-12);
    }

    #[test]
    fn ranks_that_share_samples_count_once() {
        let full = Brought { batches: 1, samples: 8, count: 80.0, ..Default::default() };
        let shape =
            MeshShape::default().with(Axis::Pp, 2).with(Axis::Dp, 3).with(Axis::Cp, 2).with(Axis::Tp, 2);
        let all = of(&vec![full.words().to_vec(); shape.num_ranks()], shape);
        assert_eq!((all.samples, all.count, all.num_averaged), (3 * 8, 3.0 * 2.0 * 80.0, 6));
        let of_two_replicas = |rank: usize| if rank % 12 < 8 { full } else { Brought::default() };
        let words: Vec<_> = (0..24).map(|rank| of_two_replicas(rank).words().to_vec()).collect();
        assert_eq!(of(&words, shape).buffers_of(), Some(3), "dp 1, cp 1");
    }
}
