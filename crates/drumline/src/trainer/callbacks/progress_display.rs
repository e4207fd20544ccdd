//! Shows the training: a progress bar on a terminal, lines elsewhere.

use drumline_observe::bar::{At, Figure, Pace, Progress};

use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::error::TrainerError;
use crate::trainer::state::{Evaluation, TrainState};

/// Shows a bar or lines for the steps, and a line for each evaluation.
pub(crate) struct ProgressDisplay {
    progress: Progress,
    pace: Pace,
}

impl ProgressDisplay {
    pub(crate) fn new(progress: Progress) -> Self {
        Self { progress, pace: Pace::new() }
    }
}

/// Formats a value. Whole numbers have no decimals.
fn display(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}

impl From<&TrainState> for At {
    fn from(state: &TrainState) -> Self {
        Self {
            epoch: state.epoch(),
            epochs: state.n_epochs(),
            step: state.step_in_epoch(),
            steps: state.steps_per_epoch(),
        }
    }
}

impl MasterCallback for ProgressDisplay {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        if let Some(step) = state.resumed_at() {
            self.progress.say(&format!("[resume] == after step {step}, epoch {} ==", state.epoch() + 1));
        }
        if let Some(note) = state.accumulation_note() {
            self.progress.say(&format!("[shard] == {note} =="));
        }
        Ok(())
    }

    fn on_epoch_begin(&mut self, state: &TrainState) -> CallbackResult {
        self.progress.begin_epoch(state.into());
        self.pace = Pace::new();
        Ok(())
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        self.pace.step(state.samples());
        let mut figures = vec![Figure::new("loss", format!("{:.4}", state.loss()))];
        let metrics = state.train_metrics().iter();
        figures.extend(metrics.map(|(name, value)| Figure::new(name, display(*value))));
        figures.push(Figure::new("lr", format!("{:.6}", state.lr())).in_lines_only());
        figures.push(Figure::unnamed(format!("{:.1} samples/s", self.pace.mean())));
        let left = self.pace.left(state.total_steps().saturating_sub(state.step()));
        self.progress.step(state.into(), &figures, Some(left));
        state.notices().iter().for_each(|notice| self.progress.say(&format!("[ranks] == {notice} ==")));
        Ok(())
    }

    fn on_valid_end(&mut self, state: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        let metrics =
            evaluation.metrics.iter().map(|(name, value)| format!(" | {name}: {}", display(*value)));
        let best = state.best().map_or(String::new(), |best| format!(" | best: {}", display(best.metric)));
        let (epoch, epochs, metrics) = (evaluation.epoch, state.n_epochs(), metrics.collect::<String>());
        let samples = evaluation.samples;
        self.progress.say(&format!("   == eval: [{epoch}/{epochs}]{metrics}{best} | {samples} samples"));
        Ok(())
    }

    fn on_train_end(&mut self, _: &TrainState) -> CallbackResult {
        self.progress.finish();
        Ok(())
    }

    fn on_exception(&mut self, state: &TrainState, error: &TrainerError) -> CallbackResult {
        self.progress.finish();
        self.progress.note(&format!("error: {error}"));
        self.progress.say(&failed_line(state));
        Ok(())
    }
}

/// The line about a failed training. The program itself shows the error.
fn failed_line(state: &TrainState) -> String {
    let (step, epoch, epochs) = (state.step(), state.epoch() + 1, state.n_epochs());
    let saved = state
        .checkpoint()
        .map_or("no checkpoint".to_owned(), |path| format!("last checkpoint {}", path.display()));
    format!("[stop] == failed after step {step}, in epoch {} of {epochs} | {saved} ==", epoch.min(epochs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_whole_numbers() {
        let values = [173.0, 0.0, -2.0, 0.25, 99.99999, f64::NAN, f64::INFINITY];
        assert_eq!(values.map(display), ["173", "0", "-2", "0.2500", "100.0000", "NaN", "inf"]);
    }
}
