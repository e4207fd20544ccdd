//! The lines that users see during training, in Distribuuuu's format, for every task.

use drumline::trainer::{CallbackResult, Evaluation, MasterCallback, TrainState, TrainerError};
use drumline_observe::bar::{Figure, Pace, Progress};

use crate::images;
use crate::task::ReportStyle;

/// A callback that prints a progress bar or lines for steps, and lines for evaluations.
pub struct Report {
    progress: Progress,
    /// The number of evaluation batches between two lines.
    print_freq: u64,
    pace: Pace,
    epoch: Means,
    style: ReportStyle,
}

/// Means over the epoch so far, weighted by the number of samples.
#[derive(Debug, Default)]
struct Means {
    loss: f64,
    acc1: f64,
    samples: f64,
}

impl Report {
    pub(crate) fn new(progress: Progress, print_freq: u64, style: ReportStyle) -> Self {
        Self { progress, print_freq, pace: Pace::new(), epoch: Means::default(), style }
    }

    /// A report for programs that train on images with their own loop.
    pub fn of_images(progress: Progress, print_freq: u64) -> Self {
        Self::new(progress, print_freq, images::REPORT_STYLE)
    }
}

impl MasterCallback for Report {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        if let Some(step) = state.resumed_at() {
            self.progress.say(&format!("[resume] == after step {step}, epoch {} ==", state.epoch() + 1));
        }
        if let Some(note) = state.accumulation_note() {
            self.progress.say(&format!("[shard] == {note} =="));
        }
        if let Some(note) = state.offload_note() {
            self.progress.say(&format!("[offload] == {note} =="));
        }
        self.progress.say("            =======  Training  =======");
        Ok(())
    }

    fn on_epoch_begin(&mut self, state: &TrainState) -> CallbackResult {
        self.progress.begin_epoch(state.into());
        (self.pace, self.epoch) = (Pace::new(), Means::default());
        Ok(())
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        self.pace.step((self.style.counted)(state));
        let (samples, acc1) =
            (state.samples() as f64, state.train_metrics().first().map_or(0.0, |acc1| acc1.1));
        self.epoch.samples += samples;
        self.epoch.loss += state.loss() * samples;
        self.epoch.acc1 += acc1 * samples;
        let Means { loss, acc1, samples } = self.epoch;
        let mut figures = self.style.figures(loss / samples, acc1 / samples, state.lr(), self.pace.mean());
        figures.extend(scale_figures(state.train_metrics(), state.skipped_steps()));
        let left = self.pace.left(state.total_steps().saturating_sub(state.step()));
        self.progress.step(state.into(), &figures, Some(left));
        state.notices().iter().for_each(|notice| self.progress.say(&format!("[ranks] == {notice} ==")));
        Ok(())
    }

    fn on_valid_batch_end(&mut self, state: &TrainState) -> CallbackResult {
        let (done, batches) = state.valid_batches();
        if done.is_multiple_of(self.print_freq) {
            self.progress.say(&format!("   == eval: [{done}/{batches}] batches of rank 0"));
        }
        Ok(())
    }

    fn on_valid_end(&mut self, state: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        let key = &evaluation.metric_key;
        let name = (self.style.metric)(key).unwrap_or_else(|| key.clone());
        let best = state.best().map(|best| format!(" | best {name} {:.3}", best.metric)).unwrap_or_default();
        self.progress.say(&format!(
            "   == eval: [{}/{}] | loss: {:.3}{}{best} | {} {}",
            // The current epoch counts, even if it is not complete.
            state.epoch() + u64::from(state.step_in_epoch() > 0),
            state.n_epochs(),
            evaluation.metric("loss").unwrap_or(f64::NAN),
            self.style.metrics(&evaluation.metrics),
            evaluation.samples,
            self.style.samples,
        ));
        Ok(())
    }

    fn on_train_end(&mut self, _: &TrainState) -> CallbackResult {
        self.progress.finish();
        Ok(())
    }

    fn on_exception(&mut self, _: &TrainState, error: &TrainerError) -> CallbackResult {
        self.progress.finish();
        self.progress.note(&format!("error: {error}"));
        Ok(())
    }
}

impl ReportStyle {
    /// The figures of the epoch so far.
    fn figures(&self, loss: f64, acc1: f64, lr: f64, per_s: f64) -> Vec<Figure<'static>> {
        let accuracy = self.has_accuracy.then(|| Figure::new("acc", format!("{acc1:6.3}%")));
        let behind = [
            Figure::new("lr", format!("{lr:.*}", self.lr_digits)).in_lines_only(),
            Figure::unnamed(format!("{per_s:.0} {}", self.rate)),
        ];
        [Figure::new("loss", format!("{loss:.3}"))].into_iter().chain(accuracy).chain(behind).collect()
    }

    /// The metrics of an evaluation as text, without the loss.
    pub(super) fn metrics(&self, metrics: &[(String, f64)]) -> String {
        let written = |(name, value): &(String, f64)| Some(format!(" | {} {value:.3}", (self.metric)(name)?));
        metrics.iter().filter_map(written).collect()
    }
}

/// The loss scale in fp16, and the number of skipped steps if there are any.
fn scale_figures(metrics: &[(String, f64)], skipped: u64) -> Vec<Figure<'static>> {
    let scale = metrics.iter().find(|(name, _)| name == "loss_scale");
    let scale = scale.map(|(_, scale)| Figure::new("scale", scale.to_string()));
    let skipped = (skipped > 0).then(|| Figure::new("skipped", skipped.to_string()));
    scale.into_iter().chain(skipped).map(Figure::in_lines_only).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::GptTask;
    use crate::task::Task;
    use drumline_observe::bar::{At, step_line};
    use std::time::Duration;

    #[test]
    fn step_lines_have_the_format_of_the_tutorial() {
        let at = At { epoch: 1, epochs: 5, step: 25, steps: 149 };
        let line = step_line(
            at,
            &images::REPORT_STYLE.figures(1.4641, 47.3912, 0.02, 812.4),
            Some(Duration::from_secs(3_723)),
        );
        let expected = "   == step: [ 25/149] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 1:02:03";
        assert_eq!(line, expected);
        let line = step_line(at, &GptTask::REPORT_STYLE.figures(1.4641, 0.0, 6e-4, 8120.4), None);
        assert!(line.ends_with("| loss: 1.464 | lr: 0.000600 | 8120 tokens/s"), "{line}");
    }

    #[test]
    fn fp16_lines_show_the_loss_scale_and_the_skipped_steps() {
        let at = At { epoch: 0, epochs: 1, step: 1, steps: 2 };
        let line = |metrics: &[(String, f64)], skipped| step_line(at, &scale_figures(metrics, skipped), None);
        let metrics = [("acc1".to_owned(), 3.5), ("loss_scale".to_owned(), 32768.0)];
        assert_eq!(line(&metrics, 2), "   == step: [1/2] [1/1] | scale: 32768 | skipped: 2");
        assert_eq!(line(&metrics, 0), "   == step: [1/2] [1/1] | scale: 32768");
        assert_eq!(line(&metrics[..1], 0), "   == step: [1/2] [1/1]");
    }
}
