//! When a run validates, whether it then translates, and where it writes the translations.

use std::path::PathBuf;
use std::rc::Rc;

use drumline::comm::Exchange;
use drumline::data::Cause;
use drumline::trainer::{Callback, CallbackResult, Evaluation, TrainState};
use serde_json::Value;

use super::bleu::Round;
use super::config::NmtConfig;
use super::translator::write_lines;

/// The steps at which validations are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Due {
    loss_every: u64,
    bleu_every: u64,
    bleu_from: u64,
}

impl Due {
    pub(crate) fn new(config: &NmtConfig) -> Self {
        let training = &config.training;
        Self {
            loss_every: training.loss_valid_freq,
            bleu_every: training.bleu_valid_freq,
            bleu_from: training.bleu_valid_warmup,
        }
    }

    fn validates(self, step: u64) -> bool {
        step > 0 && (step.is_multiple_of(self.loss_every) || self.translates(step))
    }

    fn translates(self, step: u64) -> bool {
        step > 0 && step >= self.bleu_from && step.is_multiple_of(self.bleu_every)
    }
}

/// Validates by loss and by BLEU, each at its own interval and both at the end, and writes translations.
pub(crate) struct Validation {
    pub(crate) due: Due,
    pub(crate) max_steps: Option<u64>,
    /// The state shared with the `bleu` metric.
    pub(crate) round: Rc<Round>,
    pub(crate) exchange: Exchange,
    /// The folder that translations are written to.
    pub(crate) folder: PathBuf,
    /// The number of lines in the validation source.
    pub(crate) lines: usize,
    /// The step of the last validation.
    pub(crate) last: Option<u64>,
}

impl Validation {
    fn is_last(&self, state: &TrainState) -> bool {
        let ends_epoch = state.step_in_epoch() >= state.steps_per_epoch();
        let epochs = state.epoch() + u64::from(ends_epoch);
        epochs >= state.n_epochs() || self.max_steps.is_some_and(|most| state.step() >= most)
    }

    /// Gathers all translations on rank 0, which writes them in the order of the source.
    fn write(&self, state: &TrainState) -> Result<(), Cause> {
        let own = self.round.translations.take();
        let Some(all) = self.exchange.gather(state.group(), &own)? else { return Ok(()) };
        let mut lines = vec![String::new(); self.lines];
        for (line, text) in all.into_iter().flatten() {
            lines[line] = text;
        }
        let path = self.folder.join(format!("step-{:08}.txt", state.step()));
        Ok(write_lines(&path, &lines)?)
    }
}

impl Callback for Validation {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        // A signal may have interrupted the validation at this checkpoint.
        if let Some(step) = state.resumed_at()
            && (self.due.validates(step) || self.is_last(state))
            && self.last != Some(step)
        {
            state.request_validation();
        }
        Ok(())
    }

    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.due.validates(state.step()) || self.max_steps == Some(state.step()) {
            state.request_validation();
        }
        Ok(())
    }

    fn on_epoch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if self.is_last(state) {
            state.request_validation();
        }
        Ok(())
    }

    fn on_valid_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        self.round.translates.set(self.due.translates(state.step()) || self.is_last(state));
        Ok(())
    }

    fn on_valid_end(&mut self, state: &mut TrainState, _: &Evaluation) -> CallbackResult {
        self.last = Some(state.step());
        if self.round.translates.get() { self.write(state) } else { Ok(()) }
    }

    fn state(&self) -> Value {
        self.last.into()
    }

    fn load_state(&mut self, state: &Value) -> CallbackResult {
        self.last = state.as_u64();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_bleu_have_their_own_intervals() {
        let due = Due { loss_every: 4, bleu_every: 6, bleu_from: 10 };
        let steps = |when: fn(Due, u64) -> bool| (0..25).filter(|step| when(due, *step)).collect::<Vec<_>>();
        assert_eq!(steps(Due::translates), [12, 18, 24]);
        assert_eq!(steps(Due::validates), [4, 8, 12, 16, 18, 20, 24]);
    }
}
