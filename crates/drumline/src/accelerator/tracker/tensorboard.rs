//! A tracker that writes event files for TensorBoard.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use drumline_observe::tensorboard::Writer;

use super::{Moment, Started, Tracker, TrackerResult};

/// Writes TensorBoard's event files in a folder: each figure under its name, and the configuration as text.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    writer: Option<Writer>,
}

impl TensorBoard {
    /// Writes in this folder, which is created if necessary. A resumed run begins another file; TensorBoard shows all
    /// of them as one run.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), writer: None }
    }
}

impl Tracker for TensorBoard {
    fn begin(&mut self, run: &Started) -> TrackerResult {
        let mut writer = Writer::create(&self.folder)?;
        if let Some(step) = run.resumed_at {
            writer.resume_after(step)?;
        }
        writer.text("config", run.resumed_at.unwrap_or(0), &as_table(run))?;
        self.writer = Some(writer);
        Ok(())
    }

    fn log(&mut self, at: Moment, values: &BTreeMap<String, f64>) -> TrackerResult {
        let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        Ok(self.writer.as_mut().map_or(Ok(()), |writer| writer.scalars(at.step, &values))?)
    }

    fn end(&mut self, _: Moment) -> TrackerResult {
        Ok(self.writer.as_mut().map_or(Ok(()), Writer::flush)?)
    }
}

/// The configuration as a Markdown table.
fn as_table(run: &Started) -> String {
    let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let mut table = format!("{}\n\n| key | value |\n|---|---|\n", cell(&run.name));
    for (key, value) in &run.config {
        let _ = writeln!(table, "| {} | {} |", cell(key), cell(&value.to_string()));
    }
    let _ = writeln!(table, "| ranks | {} |", run.world_size);
    table
}
