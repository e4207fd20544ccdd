//! CSV files of loss and learning rate.

use std::path::PathBuf;

use drumline_observe::csv::Writer;

use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::state::TrainState;

/// Writes a CSV file for the loss and one for the learning rate, with the names and columns of DeepSpeed's
/// `csv_monitor`: `Train_Samples_train_loss.csv`, `Train_Samples_lr.csv`. The column `step` counts samples.
#[derive(Debug)]
pub struct CsvFiles {
    folder: PathBuf,
    samples_per_step: u64,
    writer: Option<Writer>,
}

impl CsvFiles {
    /// Writes in this folder, which is created if necessary. A resumed run continues the files without the lines that it
    /// repeats.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), samples_per_step: 1, writer: None }
    }

    /// Samples of a step, on all ranks; default 1, with which steps are counted.
    #[must_use]
    pub fn samples_per_step(self, samples: u64) -> Self {
        Self { samples_per_step: samples.max(1), ..self }
    }
}

impl MasterCallback for CsvFiles {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        let mut writer = Writer::create(&self.folder)?;
        if let Some(step) = state.resumed_at() {
            writer.resume_after(step * self.samples_per_step);
        }
        self.writer = Some(writer);
        Ok(())
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let figures = [("Train/Samples/train_loss", state.loss()), ("Train/Samples/lr", state.lr())];
        Ok(writer.scalars(state.step() * self.samples_per_step, &figures)?)
    }
}
