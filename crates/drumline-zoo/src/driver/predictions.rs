//! The predictions of a test: the rows of all ranks in one file.

use std::path::Path;

use drumline::ProcessGroup;
use drumline::data::{Prediction, PredictionError, PredictionOptions, PredictionWriter};

/// The number of rows that a rank sends in one message.
const ROWS: usize = 1000;

/// Creates the file for the rows of all ranks, in the order of the dataset. A `.jsonl` file gets JSON lines, any other
/// file CSV.
pub(super) fn create<'a>(
    path: &Path,
    columns: &[&str],
    num_samples: usize,
    group: &'a ProcessGroup,
) -> Result<PredictionWriter<'a>, PredictionError> {
    let is_json = path.extension().is_some_and(|ending| ending == "jsonl");
    let options = if is_json { PredictionOptions::json_lines } else { PredictionOptions::csv };
    PredictionWriter::create(path, &options(num_samples, columns), group)
}

/// Writes the rows of all ranks. Each rank passes its own rows.
pub(super) fn write(mut writer: PredictionWriter<'_>, own: &[Prediction]) -> Result<(), PredictionError> {
    for rows in own.chunks(ROWS) {
        writer.write(rows)?;
    }
    writer.finish()
}
