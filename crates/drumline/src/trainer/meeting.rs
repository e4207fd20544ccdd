//! Between two steps all ranks meet: one small call tells each what any of them knows.
//!
//! ```text
//!   rank 0   2 batches, 64 samples            ─┐
//!   rank 1   1 batch,   17 samples            ─┼─▶ all: go on; 81 samples; everybody has data
//!   rank 2   1 batch,   32 samples, "enough!" ─┘       but stop first, as rank 2 asks for it
//! ```

use drumline_comm::{CommError, ProcessGroup};

/// What a rank brings.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Brought {
    /// Batches for the next step.
    pub(super) batches: usize,
    /// Their samples.
    pub(super) samples: usize,
    /// What their loss is divided by.
    pub(super) count: f64,
    /// Something went wrong here.
    pub(super) failed: bool,
    /// A signal, or a callback.
    pub(super) stop: bool,
    /// A callback wants an evaluation.
    pub(super) validation: bool,
    /// A callback wants a checkpoint.
    pub(super) checkpoint: bool,
    /// These batches can be computed by graphs.
    pub(super) graphs: bool,
    /// They would have to be recorded first.
    pub(super) records: bool,
    /// Seconds that it has worked by itself since training began: waited for data, and computed.
    pub(super) work: f64,
}

/// What all know afterwards.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Agreed {
    pub(super) failed: bool,
    pub(super) stop: bool,
    pub(super) validation: bool,
    pub(super) checkpoint: bool,
    /// Whether every rank can use graphs.
    pub(super) graphs: bool,
    /// Whether some rank has to record them first: then all do.
    pub(super) records: bool,
    /// Of all ranks.
    pub(super) samples: u64,
    /// Of all ranks.
    pub(super) count: f64,
    /// Of the rank that has most.
    pub(super) most_batches: usize,
    /// Whether ranks have different numbers.
    pub(super) is_uneven: bool,
    /// A rank that has none.
    pub(super) without_data: Option<usize>,
    /// The rank whose buffers count in the next step; `None` if nobody has data.
    pub(super) buffers_of: Option<usize>,
    /// That of each rank.
    pub(super) work: Vec<f64>,
}

const WORDS: usize = 5;

impl Brought {
    fn words(&self) -> [f64; WORDS] {
        let flags = [self.failed, self.stop, self.validation, self.checkpoint, self.graphs, self.records];
        let flags = flags.iter().rev().fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        [self.batches as f64, self.samples as f64, self.count, f64::from(flags), self.work]
    }
}

impl Agreed {
    fn of(all: &[[f64; WORDS]]) -> Self {
        let flags = all.iter().fold(0, |flags, words| flags | words[3] as u32);
        let flags_of_each = all.iter().fold(u32::MAX, |flags, words| flags & words[3] as u32);
        let sum = |word: usize| all.iter().map(|words| words[word]).sum::<f64>();
        let batches: Vec<usize> = all.iter().map(|words| words[0] as usize).collect();
        let most_batches = batches.iter().copied().max().unwrap_or(0);
        let has_data = |batches: &usize| *batches > 0;
        // Whoever had data in the step before has good buffers; ranks only ever run out.
        let buffers_of = match batches.iter().all(has_data) {
            true => Some(0),
            false => batches.iter().rposition(has_data),
        };
        Self {
            failed: flags & 1 != 0,
            stop: flags & 2 != 0,
            validation: flags & 4 != 0,
            checkpoint: flags & 8 != 0,
            graphs: flags_of_each & 16 != 0,
            records: flags & 32 != 0,
            samples: sum(1) as u64,
            count: sum(2),
            most_batches,
            is_uneven: batches.iter().any(|batches| *batches != most_batches),
            without_data: batches.iter().position(|batches| *batches == 0),
            buffers_of,
            work: all.iter().map(|words| words[4]).collect(),
        }
    }
}

/// Every rank comes, and goes with the same knowledge.
#[track_caller]
pub(super) fn meet(group: &ProcessGroup, brought: &Brought) -> Result<Agreed, CommError> {
    let mut all = vec![0.0; WORDS * group.size()];
    group.all_gather(&brought.words(), &mut all)?;
    Ok(Agreed::of(all.as_chunks::<WORDS>().0))
}

/// What ranks know that have met with these.
#[cfg(test)]
pub(super) fn agreed_by(brought: &[Brought]) -> Agreed {
    Agreed::of(&brought.iter().map(Brought::words).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::agreed_by as agreed;
    use super::*;

    #[test]
    fn counts_add_up_and_any_wish_counts() {
        let full = Brought { batches: 2, samples: 64, count: 640.0, ..Default::default() };
        let all = agreed(&[full, full]);
        assert_eq!((all.samples, all.count, all.buffers_of), (128, 1280.0, Some(0)));
        assert!(!(all.failed || all.stop || all.validation || all.checkpoint));
        let asking = |brought| agreed(&[full, brought]);
        assert!(asking(Brought { failed: true, ..full }).failed);
        assert!(asking(Brought { stop: true, ..full }).stop);
        assert!(asking(Brought { validation: true, ..full }).validation);
        assert!(asking(Brought { checkpoint: true, ..full }).checkpoint);
        assert!(asking(Brought { records: true, ..full }).records && !all.records);
        assert_eq!(asking(Brought { work: 2.5, ..full }).work, [0.0, 2.5]);
    }

    #[test]
    fn buffers_are_of_a_rank_that_has_data() {
        let (full, none) = (Brought { batches: 1, ..Default::default() }, Brought::default());
        assert_eq!(agreed(&[full, full, none]).buffers_of, Some(1));
        assert_eq!(agreed(&[none, none, full]).buffers_of, Some(2));
        assert_eq!(agreed(&[none, none]).buffers_of, None);
        assert!(agreed(&[none, full]).is_uneven && !agreed(&[full, full]).is_uneven);
        assert_eq!(agreed(&[none, Brought { batches: 3, ..none }, full]).most_batches, 3);
    }
}
