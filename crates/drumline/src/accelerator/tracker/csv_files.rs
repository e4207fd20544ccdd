//! A tracker that writes CSV files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use drumline_observe::csv::Writer;

use super::{Moment, Started, Tracker, TrackerResult};

/// Writes a CSV file for each figure, as DeepSpeed's `csv_monitor` does.
#[derive(Debug)]
pub struct CsvFiles {
    folder: PathBuf,
    writer: Option<Writer>,
}

impl CsvFiles {
    /// Writes in this folder, which is created if necessary. A resumed run continues the files without the lines that it
    /// repeats.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), writer: None }
    }
}

impl Tracker for CsvFiles {
    fn begin(&mut self, run: &Started) -> TrackerResult {
        let mut writer = Writer::create(&self.folder)?;
        if let Some(step) = run.resumed_at {
            writer.resume_after(step);
        }
        self.writer = Some(writer);
        Ok(())
    }

    fn log(&mut self, at: Moment, values: &BTreeMap<String, f64>) -> TrackerResult {
        let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        Ok(self.writer.as_mut().map_or(Ok(()), |writer| writer.scalars(at.step, &values))?)
    }

    fn end(&mut self, _: Moment) -> TrackerResult {
        Ok(())
    }
}
