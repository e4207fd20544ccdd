//! Draws the curves.

use std::path::PathBuf;

use drumline_observe::plot::{self, PlotOptions};

use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::state::{Evaluation, TrainState};

/// Draws loss and metrics after each evaluation and at the end: `curves.svg` in a folder in which an
/// [`EventFile`](super::EventFile) writes.
#[derive(Debug)]
pub struct Plots {
    folder: PathBuf,
    options: PlotOptions,
}

impl Plots {
    /// Draws the events of this folder.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), options: PlotOptions { smooth: 0.9, ..PlotOptions::default() } }
    }

    /// Sets the options of the plots.
    #[must_use]
    pub fn options(self, options: PlotOptions) -> Self {
        Self { options, ..self }
    }

    fn draw(&self) -> CallbackResult {
        let runs = plot::load(std::slice::from_ref(&self.folder))?;
        Ok(plot::save(&self.folder.join("curves.svg"), &runs, &[], self.options)?)
    }
}

impl MasterCallback for Plots {
    fn on_valid_end(&mut self, state: &TrainState, _: &Evaluation) -> CallbackResult {
        if state.step() > 0 { self.draw() } else { Ok(()) }
    }

    fn on_train_end(&mut self, state: &TrainState) -> CallbackResult {
        if state.step() > 0 { self.draw() } else { Ok(()) }
    }
}
