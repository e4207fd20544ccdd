//! Event files for TensorBoard.

use std::path::PathBuf;

use drumline_observe::tensorboard::Writer;
use drumline_torch::grad;
use tch::Kind;

use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::error::TrainerError;
use crate::trainer::state::{Evaluation, TrainState};

/// Writes TensorBoard's event files: loss, learning rate, speed, metrics of evaluations, the settings as text and, on
/// request, gradients.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    gradients_every: Option<u64>,
    writer: Option<Writer>,
}

impl TensorBoard {
    /// Writes in this folder, which is created if necessary.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), gradients_every: None, writer: None }
    }

    /// Also writes a histogram of each parameter's gradient, every `steps` steps.
    #[must_use]
    pub fn gradients_every(self, steps: u64) -> Self {
        Self { gradients_every: Some(steps.max(1)), ..self }
    }
}

impl MasterCallback for TensorBoard {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        let mut writer = Writer::create(&self.folder)?;
        if let Some(step) = state.resumed_at() {
            writer.resume_after(step)?;
        }
        writer.text("settings", state.step(), &state.config_text())?;
        self.writer = Some(writer);
        Ok(())
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let step = state.step();
        writer.scalars(
            step,
            &[
                ("train/loss", state.loss()),
                ("train/lr", state.lr()),
                ("train/samples_per_s", state.samples_per_s()),
            ],
        )?;
        for (name, value) in state.train_metrics() {
            writer.scalar(&format!("train/{name}"), step, *value)?;
        }
        if self.gradients_every.is_some_and(|every| step.is_multiple_of(every)) {
            for named in state.parameters() {
                if let Some(gradient) = grad(&named.tensor)? {
                    let values: Vec<f32> = gradient.to_kind(Kind::Float).flatten(0, -1).try_into()?;
                    writer.histogram(&format!("gradients/{}", named.name), step, &values)?;
                }
            }
        }
        Ok(())
    }

    fn on_valid_end(&mut self, _: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        for (name, value) in &evaluation.metrics {
            writer.scalar(&format!("eval/{name}"), evaluation.step, *value)?;
        }
        Ok(writer.flush()?)
    }

    fn on_train_end(&mut self, _: &TrainState) -> CallbackResult {
        Ok(self.writer.as_mut().map_or(Ok(()), Writer::flush)?)
    }

    fn on_exception(&mut self, state: &TrainState, _: &TrainerError) -> CallbackResult {
        self.on_train_end(state)
    }
}
