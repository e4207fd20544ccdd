//! What the network says of each test image, all ranks' in one file: `TEST.PREDICTIONS`.

use std::path::Path;

use drumline::{ImageBatch, Prediction, PredictionError, PredictionOptions, PredictionWriter, ProcessGroup};
use tch::{Kind, Tensor};

const COLUMNS: [&str; 3] = ["label", "predicted", "probability"];
/// Rows that a rank sends at once.
const ROWS: usize = 1000;

/// A row for each image of a batch.
pub(super) fn rows(batch: &ImageBatch, output: &Tensor) -> anyhow::Result<Vec<Prediction>> {
    let (probability, predicted) = output.softmax(1, Kind::Double).max_dim(1, false);
    let labels: Vec<i64> = (&batch.labels).try_into()?;
    let predicted: Vec<i64> = predicted.try_into()?;
    let probability: Vec<f64> = probability.try_into()?;
    let row = |((index, label), (predicted, probability)): ((&usize, i64), (i64, f64))| Prediction {
        index: *index,
        cells: vec![label.into(), predicted.into(), probability.into()],
    };
    let told = predicted.into_iter().zip(probability);
    Ok(batch.indices.iter().zip(labels).zip(told).map(row).collect())
}

/// Opens the file for the rows of all ranks, in the order of the data set. A `.jsonl` file has JSON lines, any other is CSV.
pub(super) fn create<'a>(
    path: &Path,
    num_samples: usize,
    group: &'a ProcessGroup,
) -> Result<PredictionWriter<'a>, PredictionError> {
    let options = match path.extension().is_some_and(|ending| ending == "jsonl") {
        true => PredictionOptions::json_lines(num_samples, &COLUMNS),
        false => PredictionOptions::csv(num_samples, &COLUMNS),
    };
    PredictionWriter::create(path, &options, group)
}

/// Writes the rows of all ranks, of which this rank gives its own.
pub(super) fn write(mut writer: PredictionWriter<'_>, own: &[Prediction]) -> Result<(), PredictionError> {
    for rows in own.chunks(ROWS) {
        writer.write(rows)?;
    }
    writer.finish()
}
