//! Distributed inference: the predictions of all ranks in one file, in the data set's order.
//!
//! ```text
//!   rank 0: rows 0 3 6 ─┐
//!   rank 1: rows 1 4 7 ─┼─ gather ─▶ rank 0: Merge puts them in order ─▶ name.part ── all there ──▶ name
//!   rank 2: rows 2 5   ─┘                    (a row waits until all before it are written)
//! ```
//!
//! Rank 0 writes rows as they arrive, so that memory is bounded: with [`EvalSampler`](crate::data::EvalSampler) at most
//! one batch of each rank waits. The file appears under its name when every row was written once, otherwise not at all.

mod cell;
mod merge;
mod sink;

use std::path::Path;

use drumline_comm::{CommError, ProcessGroup};
use serde::{Deserialize, Serialize};

use sink::Sink;

pub use cell::Cell;

/// The format of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PredictionFormat {
    /// CSV with a header line.
    Csv,
    /// A JSON object on a line for each row.
    JsonLines,
}

/// Options of a [`PredictionWriter`], the same on all ranks.
#[derive(Debug, Clone)]
pub struct PredictionOptions {
    /// The format.
    pub format: PredictionFormat,
    /// The names of the columns; `index` is added in front of them.
    pub columns: Vec<String>,
    /// The length of the data set. The file has one row for each sample.
    pub num_samples: usize,
    /// How many bytes of rows may wait for earlier rows.
    pub max_waiting: usize,
}

impl PredictionOptions {
    /// A CSV file with these columns, with up to 256 MiB of waiting rows.
    pub fn csv(num_samples: usize, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Self { format: PredictionFormat::Csv, columns, num_samples, max_waiting: 256 << 20 }
    }

    /// The same as [`csv`](Self::csv), with a JSON object on each line.
    pub fn json_lines(num_samples: usize, columns: &[&str]) -> Self {
        Self { format: PredictionFormat::JsonLines, ..Self::csv(num_samples, columns) }
    }
}

/// The prediction for one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The index of the sample in the data set.
    pub index: usize,
    /// A cell for each column.
    pub cells: Vec<Cell>,
}

/// What is wrong with the predictions. All ranks get the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PredictionFault {
    /// There are two rows for one sample.
    #[error("rank {rank} gave a second prediction for sample {index}; try EvalSampler, which repeats none")]
    Duplicate {
        /// The sample.
        index: usize,
        /// The rank with the later one.
        rank: usize,
    },
    /// There is no such sample.
    #[error("rank {rank} gave a prediction for sample {index} of a data set of {num_samples}")]
    Outside {
        /// The sample.
        index: usize,
        /// The rank.
        rank: usize,
        /// The length of the data set.
        num_samples: usize,
    },
    /// Some samples have no row.
    #[error("{count} of {num_samples} samples have no prediction: {first:?}{}", if first.len() < *count { ", …" } else { "" })]
    Missing {
        /// How many.
        count: usize,
        /// The length of the data set.
        num_samples: usize,
        /// The first of them.
        first: Vec<usize>,
    },
    /// Rows come in another order than samples, and too many wait.
    #[error(
        "{waiting} predictions wait for that of sample {index}, which is more than {max_waiting} bytes; \
         try samples in order (EvalSampler), or a larger max_waiting"
    )]
    TooFarAhead {
        /// The sample that they wait for.
        index: usize,
        /// How many.
        waiting: usize,
        /// The limit.
        max_waiting: usize,
    },
    /// A row has the wrong number of cells.
    #[error("rank {rank} gave {got} cells for sample {index}, expected {expected}, one a column")]
    Cells {
        /// The sample.
        index: usize,
        /// The rank.
        rank: usize,
        /// How many columns.
        expected: usize,
        /// How many cells.
        got: usize,
    },
    /// The file cannot be written.
    #[error("rank 0 cannot write {path}: {cause}")]
    File {
        /// Where.
        path: String,
        /// The system's message.
        cause: String,
    },
}

/// Predictions cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PredictionError {
    /// The predictions are wrong, or the file cannot be written.
    #[error(transparent)]
    Fault(#[from] PredictionFault),
    /// The group failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Writes the predictions of all ranks to one file.
///
/// All ranks create it together. Then each calls [`write`](Self::write) for each of its batches, and
/// [`finish`](Self::finish) at the end; ranks with fewer batches wait there for the others. In between, no other calls
/// may be made to the same group, because ranks need not make the same number of them.
///
/// ```
/// use drumline::comm::LocalGroup;
/// use drumline::data::{EvalSampler, Prediction, PredictionOptions, PredictionWriter};
///
/// let folder = tempfile::tempdir().expect("a folder");
/// let path = folder.path().join("predictions.csv");
/// LocalGroup::run(2, |group| {
///     let options = PredictionOptions::csv(3, &["label"]);
///     let mut writer = PredictionWriter::create(&path, &options, &group).expect("a file");
///     for index in EvalSampler::new(3, group.size(), group.rank()).expect("a rank").indices() {
///         writer.write(&[Prediction { index, cells: vec![(index as i64 * 10).into()] }]).expect("a row");
///     }
///     Ok(writer.finish().expect("all rows"))
/// })?;
/// assert_eq!(std::fs::read_to_string(&path).expect("the file"), "index,label\n0,0\n1,10\n2,20\n");
/// # Ok::<(), drumline::CommError>(())
/// ```
#[derive(Debug)]
pub struct PredictionWriter<'a> {
    group: &'a ProcessGroup,
    format: PredictionFormat,
    columns: Vec<String>,
    /// On rank 0.
    sink: Option<Sink>,
}

/// What a rank contributes to a round.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Share {
    rows: Vec<(usize, String)>,
    fault: Option<PredictionFault>,
    is_last: bool,
}

/// The result of a round, from rank 0.
#[derive(Debug, Serialize, Deserialize)]
struct Verdict {
    fault: Option<PredictionFault>,
    is_complete: bool,
}

impl<'a> PredictionWriter<'a> {
    /// Begins a file. All ranks call it together. Only rank 0 writes, so that only it needs access to `path`. If the
    /// file cannot be written, all ranks get the error.
    #[track_caller]
    pub fn create(
        path: &Path,
        options: &PredictionOptions,
        group: &'a ProcessGroup,
    ) -> Result<Self, PredictionError> {
        let sink = (group.rank() == 0).then(|| Sink::new(path, options));
        let mut writer = Self { group, format: options.format, columns: options.columns.clone(), sink };
        writer.round(&Share { rows: Vec::new(), fault: None, is_last: false })?;
        Ok(writer)
    }

    /// Adds predictions of this rank, and waits for the other ranks' next ones.
    #[track_caller]
    pub fn write(&mut self, rows: &[Prediction]) -> Result<(), PredictionError> {
        let rows = rows.iter().map(|row| self.line(row)).collect::<Result<Vec<_>, _>>();
        let (rows, fault) = match rows {
            Ok(rows) => (rows, None),
            Err(fault) => (Vec::new(), Some(fault)),
        };
        self.round(&Share { rows, fault, is_last: false }).map(drop)
    }

    /// Waits for all ranks, checks that every sample has its row, and gives the file its name.
    #[track_caller]
    pub fn finish(mut self) -> Result<(), PredictionError> {
        while !self.round(&Share { rows: Vec::new(), fault: None, is_last: true })? {}
        Ok(())
    }

    /// Exchanges one round of rows. Returns whether the file is complete.
    #[track_caller]
    fn round(&mut self, share: &Share) -> Result<bool, PredictionError> {
        let shares = self.group.gather_object(share, 0)?;
        let verdict = self.sink.as_mut().zip(shares).map(|(sink, shares)| match sink.take(shares) {
            Ok(is_complete) => Verdict { fault: None, is_complete },
            Err(fault) => Verdict { fault: Some(fault), is_complete: false },
        });
        let verdict = self.group.broadcast_object(verdict.as_ref(), 0)?;
        verdict.fault.map_or(Ok(verdict.is_complete), |fault| Err(fault.into()))
    }

    fn line(&self, row: &Prediction) -> Result<(usize, String), PredictionFault> {
        let (expected, got) = (self.columns.len(), row.cells.len());
        if expected != got {
            let (index, rank) = (row.index, self.group.rank());
            return Err(PredictionFault::Cells { index, rank, expected, got });
        }
        Ok((row.index, cell::line(self.format, &self.columns, row)))
    }
}
