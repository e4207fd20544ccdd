//! What people see of a training, in the words of Distribuuuu.

use drumline::trainer::{CallbackResult, Evaluation, MasterCallback, TrainState, TrainerError};
use drumline_observe::bar::{Figure, Pace, Progress};

use crate::config::Config;

/// A bar or lines for steps, lines for evaluations.
pub(super) struct Shown {
    progress: Progress,
    /// Batches of an evaluation from line to line.
    print_freq: u64,
    pace: Pace,
    epoch: Means,
}

/// Over the epoch so far, weighted by samples.
#[derive(Debug, Default)]
struct Means {
    loss: f64,
    acc1: f64,
    samples: f64,
}

impl Shown {
    pub(super) fn new(progress: Progress, config: &Config) -> Self {
        let print_freq = config.test.print_freq as u64;
        Self { progress, print_freq, pace: Pace::new(), epoch: Means::default() }
    }
}

impl MasterCallback for Shown {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        if let Some(step) = state.resumed_at() {
            self.progress.say(&format!("[resume] == after step {step}, epoch {} ==", state.epoch() + 1));
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
        self.pace.step(state.samples());
        let (samples, acc1) =
            (state.samples() as f64, state.train_metrics().first().map_or(0.0, |acc1| acc1.1));
        self.epoch.samples += samples;
        self.epoch.loss += state.loss() * samples;
        self.epoch.acc1 += acc1 * samples;
        let Means { loss, acc1, samples } = self.epoch;
        let figures = figures(loss / samples, acc1 / samples, state.lr(), self.pace.mean());
        let left = self.pace.left(state.total_steps().saturating_sub(state.step()));
        self.progress.step(state.into(), &figures, Some(left));
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
        let best = state.best().map_or(0.0, |best| best.metric);
        let accuracies = evaluation
            .metrics
            .iter()
            .filter_map(|(name, value)| Some(format!(" | Acc@{} {value:.3}", name.strip_prefix("acc")?)));
        self.progress.say(&format!(
            "   == eval: [{}/{}] | loss: {:.3}{} | best Acc@1 {best:.3} | {} images",
            state.epoch(),
            state.n_epochs(),
            evaluation.metric("loss").unwrap_or(f64::NAN),
            accuracies.collect::<String>(),
            evaluation.samples,
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

/// What a person sees of an epoch so far.
fn figures(loss: f64, acc1: f64, lr: f64, images_per_s: f64) -> [Figure<'static>; 4] {
    [
        Figure::new("loss", format!("{loss:.3}")),
        Figure::new("acc", format!("{acc1:6.3}%")),
        Figure::new("lr", format!("{lr:.4}")).in_lines_only(),
        Figure::unnamed(format!("{images_per_s:.0} img/s")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_observe::bar::{At, step_line};
    use std::time::Duration;

    #[test]
    fn lines_are_as_in_the_tutorial() {
        let at = At { epoch: 1, epochs: 5, step: 25, steps: 149 };
        let line = step_line(at, &figures(1.4641, 47.3912, 0.02, 812.4), Some(Duration::from_secs(3_723)));
        let expected = "   == step: [ 25/149] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 1:02:03";
        assert_eq!(line, expected);
    }
}
