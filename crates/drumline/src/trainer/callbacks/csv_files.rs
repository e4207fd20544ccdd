//! CSV files of loss and learning rate.

use std::path::PathBuf;

use drumline_observe::csv::Writer;
use serde_json::{Value, json};

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::TrainState;

/// The key of the samples in checkpoints.
const SAMPLES: &str = "samples";

/// Writes a CSV file for the loss and one for the learning rate, with the names and columns of DeepSpeed's
/// `csv_monitor`: `Train_Samples_train_loss.csv`, `Train_Samples_lr.csv`. The column `step` counts samples. Rank 0 writes.
#[derive(Debug)]
pub struct CsvFiles {
    folder: PathBuf,
    samples_per_step: u64,
    /// The samples of all steps so far, which may have had other numbers of ranks.
    samples: Option<u64>,
    writer: Option<Writer>,
}

impl CsvFiles {
    /// Writes in this folder, which is created if necessary. A resumed run continues the files without the lines that it
    /// repeats, also on another number of ranks.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), samples_per_step: 1, samples: None, writer: None }
    }

    /// Samples of a step, on all ranks; default 1, with which steps are counted.
    #[must_use]
    pub fn samples_per_step(self, samples: u64) -> Self {
        Self { samples_per_step: samples.max(1), ..self }
    }
}

impl Callback for CsvFiles {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        // A checkpoint of a run without these files does not say.
        let samples = *self.samples.get_or_insert(state.step() * self.samples_per_step);
        if state.rank() != 0 {
            return Ok(());
        }
        let mut writer = Writer::create(&self.folder)?;
        if state.resumed_at().is_some() {
            writer.resume_after(samples);
        }
        self.writer = Some(writer);
        Ok(())
    }

    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let samples = self.samples.unwrap_or_default() + self.samples_per_step;
        self.samples = Some(samples);
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let figures = [("Train/Samples/train_loss", state.loss()), ("Train/Samples/lr", state.lr())];
        Ok(writer.scalars(samples, &figures)?)
    }

    fn state(&self) -> Value {
        json!({ SAMPLES: self.samples })
    }

    fn load_state(&mut self, state: &Value) -> CallbackResult {
        self.samples = state.get(SAMPLES).and_then(Value::as_u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_keeps_the_samples() {
        let mut written = CsvFiles::in_folder("csv").samples_per_step(8);
        written.samples = Some(24);
        let mut read = CsvFiles::in_folder("csv").samples_per_step(4);
        read.load_state(&written.state()).unwrap();
        assert_eq!(read.samples, Some(24));
        read.load_state(&Value::Null).unwrap();
        assert_eq!(read.samples, None);
    }
}
