//! Schedules by name: in which order each rank computes forwards and backwards.
//!
//! ```text
//!   p ranks, m micro-batches; F forward, B backward, I and W its halves
//!   gpipe        all F, then all B                           keeps m activations on every rank
//!   1f1b         some F, then F and B in turn                keeps at most p
//!   interleaved  1f1b with several stages a rank             shorter bubble, more messages
//!   bfs          gpipe with several stages a rank            each stage is used once in each direction
//!   zb1p         1f1b, whose bubble is filled with W         keeps p on every rank
//!   zbv          two stages a rank along a V, I and W apart  almost no bubble, keeps p on every rank
//! ```
//! They are PyTorch's lists, so that files and knowledge can be exchanged. Naive model parallelism is `gpipe` with one
//! micro-batch. Not here: messages (`lower`), times (`simulate`).

mod all_then_all;
mod one_f_one_b;
mod zbv;

use std::fmt;
use std::str::FromStr;

use super::lower::lower;
use super::program::Program;
use super::stage_map::StageMap;

/// A named schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// All forwards, then all backwards. With one micro-batch it is naive model parallelism.
    GPipe,
    /// One forward, one backward: PipeDream-Flush.
    OneFOneB,
    /// The same with several stages a rank: Megatron-LM's interleaved schedule.
    Interleaved,
    /// All forwards of a stage, then of the next one, then backwards: looped breadth-first.
    BreadthFirst,
    /// 1F1B with the weight gradients apart, to fill its bubble: ZB-H1.
    ZeroBubble1P,
    /// Two stages a rank along a V, with the weight gradients apart.
    ZeroBubbleV,
}

/// How large a pipeline is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PipelineSize {
    /// Ranks along the axis `pp`.
    pub ranks: usize,
    /// Stages of each rank.
    pub chunks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

/// A size that a schedule cannot have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Nothing to do, or nobody to do it.
    #[error(
        "a pipeline of {} ranks with {} stages each and {} micro-batches; try at least 1 of each",
        .0.ranks, .0.chunks, .0.micro_batches
    )]
    Empty(PipelineSize),
    /// More than fits into the memory of a computer.
    #[error(
        "a pipeline of {} ranks with {} stages each and {} micro-batches is too large, with more than {} forwards; \
         try fewer micro-batches, or fewer ranks",
        .0.ranks, .0.chunks, .0.micro_batches, MOST_FORWARDS
    )]
    TooLarge(PipelineSize),
    /// A schedule with a fixed number of stages a rank.
    #[error(
        "the schedule {schedule} has {expected} {} a rank, not {chunks}; try {}",
        if *expected == 1 { "stage" } else { "stages" },
        if *expected == 1 { "interleaved or bfs for more" } else { "2 chunks" }
    )]
    Chunks {
        /// The schedule.
        schedule: Schedule,
        /// The stages a rank that were asked for.
        chunks: usize,
        /// Those that it has.
        expected: usize,
    },
    /// Micro-batches that cannot be divided into equal rounds.
    #[error(
        "the schedule {schedule} divides the micro-batches into {rounds} equal rounds, and {micro_batches} cannot be; \
         try {} or {}",
        micro_batches / ranks * ranks, micro_batches.next_multiple_of(*ranks)
    )]
    Rounds {
        /// The schedule.
        schedule: Schedule,
        /// The micro-batches that were asked for.
        micro_batches: usize,
        /// As many rounds as ranks fit into the micro-batches.
        rounds: usize,
        /// The ranks.
        ranks: usize,
    },
}

/// As many forwards as a program has at most, those of all ranks together. Its actions take some GB then.
const MOST_FORWARDS: usize = 1 << 22;

/// A text that names no schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no schedule is named `{0}`; try gpipe, 1f1b, interleaved, bfs, zb1p or zbv")]
pub struct NoSuchSchedule(String);

/// Other names of the schedules, PyTorch's first, in small letters.
const OTHER_NAMES: [(&str, Schedule); 12] = [
    ("interleaved1f1b", Schedule::Interleaved),
    ("loopedbfs", Schedule::BreadthFirst),
    ("interleavedzerobubble", Schedule::ZeroBubble1P),
    ("zbvzerobubble", Schedule::ZeroBubbleV),
    ("onefoneb", Schedule::OneFOneB),
    ("pipedream-flush", Schedule::OneFOneB),
    ("interleaved-1f1b", Schedule::Interleaved),
    ("looped-bfs", Schedule::BreadthFirst),
    ("breadth-first", Schedule::BreadthFirst),
    ("zb-h1", Schedule::ZeroBubble1P),
    ("zbh1", Schedule::ZeroBubble1P),
    ("zb-v", Schedule::ZeroBubbleV),
];

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::GPipe,
        Self::OneFOneB,
        Self::Interleaved,
        Self::BreadthFirst,
        Self::ZeroBubble1P,
        Self::ZeroBubbleV,
    ];

    /// Its name in configurations and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::BreadthFirst => "bfs",
            Self::ZeroBubble1P => "zb1p",
            Self::ZeroBubbleV => "zbv",
        }
    }

    /// Other names that are understood, PyTorch's class among them, in small letters.
    pub fn other_names(self) -> impl Iterator<Item = &'static str> {
        OTHER_NAMES.into_iter().filter(move |(_, schedule)| *schedule == self).map(|(name, _)| name)
    }

    /// How many stages a rank has if nothing else is asked for.
    pub fn default_chunks(self) -> usize {
        match self {
            Self::GPipe | Self::OneFOneB | Self::ZeroBubble1P => 1,
            Self::Interleaved | Self::BreadthFirst | Self::ZeroBubbleV => 2,
        }
    }

    /// Which rank holds which stage.
    pub fn stage_map(self, size: PipelineSize) -> StageMap {
        match self {
            Self::ZeroBubbleV => StageMap::V { ranks: size.ranks },
            _ => StageMap::Loop { ranks: size.ranks, chunks: size.chunks },
        }
    }

    /// What each rank does, with its messages.
    pub fn program(self, size: PipelineSize) -> Result<Program, ScheduleError> {
        self.check(size)?;
        let row = |rank| match self {
            Self::GPipe | Self::BreadthFirst => all_then_all::row(self, size, rank),
            Self::OneFOneB | Self::Interleaved | Self::ZeroBubble1P => one_f_one_b::row(self, size, rank),
            Self::ZeroBubbleV => zbv::row(size, rank),
        };
        let rows = (0..size.ranks).map(row).collect();
        let computed = Program { stages: self.stage_map(size), num_micro_batches: size.micro_batches, rows };
        Ok(lower(&computed).expect("every generator lists computations in an order that can be carried out"))
    }

    fn check(self, size: PipelineSize) -> Result<(), ScheduleError> {
        let PipelineSize { ranks, chunks, micro_batches } = size;
        if ranks == 0 || chunks == 0 || micro_batches == 0 {
            return Err(ScheduleError::Empty(size));
        }
        let fixed = match self {
            Self::GPipe | Self::OneFOneB => Some(1),
            Self::ZeroBubbleV => Some(2),
            Self::Interleaved | Self::BreadthFirst | Self::ZeroBubble1P => None,
        };
        if let Some(expected) = fixed.filter(|expected| *expected != chunks) {
            return Err(ScheduleError::Chunks { schedule: self, chunks, expected });
        }
        // ZB-V's rows are made for a full pipeline. What is of missing micro-batches is left out of them.
        let filled = if self == Self::ZeroBubbleV { micro_batches.max(ranks) } else { micro_batches };
        let forwards = ranks.checked_mul(chunks).and_then(|stages| stages.checked_mul(filled));
        if forwards.is_none_or(|forwards| forwards > MOST_FORWARDS) {
            return Err(ScheduleError::TooLarge(size));
        }
        let rounds = size.rounds();
        let divides = matches!(self, Self::Interleaved | Self::ZeroBubble1P) && chunks > 1;
        if divides && !micro_batches.is_multiple_of(rounds) {
            return Err(ScheduleError::Rounds { schedule: self, micro_batches, rounds, ranks });
        }
        Ok(())
    }
}

impl PipelineSize {
    /// Rounds of an interleaved schedule: in each, a rank does some micro-batches with its first stage, the same with its
    /// second one, and so on. There are as many as each rank has a micro-batch for.
    fn rounds(self) -> usize {
        (self.micro_batches / self.ranks).max(1)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Schedule {
    type Err = NoSuchSchedule;

    fn from_str(text: &str) -> Result<Self, NoSuchSchedule> {
        let small = text.to_ascii_lowercase();
        let ours = Self::ALL.into_iter().map(|schedule| (schedule.name(), schedule));
        let found = ours.chain(OTHER_NAMES).find(|(name, _)| *name == small);
        found.map(|(_, schedule)| schedule).ok_or_else(|| NoSuchSchedule(text.to_owned()))
    }
}

#[cfg(test)]
pub(super) mod tests_support {
    use super::super::action::Action;

    /// The texts of actions, with spaces between them.
    pub(in super::super) fn written(row: &[Action]) -> String {
        row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    /// The actions of such a text.
    pub(in super::super) fn read(row: &str) -> Vec<Action> {
        row.split_whitespace().map(|text| text.parse().unwrap()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineSize {
        PipelineSize { ranks, chunks, micro_batches }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for schedule in Schedule::ALL {
            assert_eq!(schedule.to_string().parse(), Ok(schedule));
        }
        for (name, schedule) in [("1F1B", Schedule::OneFOneB), ("LoopedBFS", Schedule::BreadthFirst)] {
            assert_eq!(name.parse(), Ok(schedule));
        }
        let error = "zb2p".parse::<Schedule>().unwrap_err();
        let text = "no schedule is named `zb2p`; try gpipe, 1f1b, interleaved, bfs, zb1p or zbv";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_size_that_a_schedule_cannot_have_is_an_error() {
        let error = |schedule: Schedule, size| schedule.program(size).unwrap_err().to_string();
        assert_eq!(
            error(Schedule::GPipe, size(4, 2, 8)),
            "the schedule gpipe has 1 stage a rank, not 2; try interleaved or bfs for more"
        );
        assert_eq!(
            error(Schedule::ZeroBubbleV, size(4, 1, 8)),
            "the schedule zbv has 2 stages a rank, not 1; try 2 chunks"
        );
        assert_eq!(
            error(Schedule::Interleaved, size(4, 2, 9)),
            "the schedule interleaved divides the micro-batches into 2 equal rounds, and 9 cannot be; try 8 or 12"
        );
        assert_eq!(
            error(Schedule::BreadthFirst, size(4, 0, 9)),
            "a pipeline of 4 ranks with 0 stages each and 9 micro-batches; try at least 1 of each"
        );
    }

    #[test]
    fn what_an_error_suggests_is_possible() {
        for (ranks, micro_batches) in (1..9).flat_map(|ranks| (1..60).map(move |m| (ranks, m))) {
            for schedule in [Schedule::Interleaved, Schedule::ZeroBubble1P] {
                let program = |micro_batches| schedule.program(size(ranks, 2, micro_batches));
                let Err(error) = program(micro_batches) else { continue };
                let text = error.to_string();
                let (_, suggested) = text.rsplit_once("; try ").unwrap();
                let numbers: Vec<usize> = suggested.split(" or ").map(|text| text.parse().unwrap()).collect();
                assert!(numbers[0] < micro_batches && micro_batches < numbers[1], "{text}");
                assert!(numbers.iter().all(|number| program(*number).is_ok()), "{text}");
            }
        }
    }

    #[test]
    fn a_size_that_no_memory_holds_is_an_error() {
        let most = usize::MAX;
        for (ranks, chunks, micro_batches) in
            [(4, 1, most), (most, 1, 1), (1, most, 1), (most, most, most), (1 << 12, 1, (1 << 10) + 1)]
        {
            for schedule in Schedule::ALL {
                let chunks = if chunks == 1 { schedule.default_chunks() } else { chunks };
                let size = size(ranks, chunks, micro_batches);
                let error = match schedule.program(size) {
                    Err(ScheduleError::Chunks { .. }) => continue,
                    other => other.unwrap_err(),
                };
                assert_eq!(error, ScheduleError::TooLarge(size), "{schedule}");
                assert!(error.to_string().ends_with("; try fewer micro-batches, or fewer ranks"), "{error}");
            }
        }
    }

    #[test]
    fn all_other_sizes_have_a_program() {
        for schedule in Schedule::ALL {
            let sizes = (1..7).flat_map(|ranks| {
                (1..5).flat_map(move |chunks| (1..20).map(move |m| size(ranks, chunks, m)))
            });
            for size in sizes {
                match schedule.program(size) {
                    Ok(program) => assert_eq!(program.rows.len(), size.ranks),
                    Err(ScheduleError::Chunks { expected, .. }) => assert_ne!(expected, size.chunks),
                    Err(ScheduleError::Rounds { rounds, .. }) => assert_ne!(size.micro_batches % rounds, 0),
                    Err(error) => panic!("{schedule} {size:?}: {error}"),
                }
            }
        }
    }
}
