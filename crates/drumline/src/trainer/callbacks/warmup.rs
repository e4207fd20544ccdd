//! A learning rate that grows from small steps to full ones, and then stays or falls.

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::TrainState;

/// Lets the learning rate grow evenly from near zero to the optimizer's own, as fastNLP's `WarmupCallback`. It sets the learning rate by itself: with
/// [`LearningRate`](super::LearningRate) use a schedule that has a warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Warmup {
    length: Length,
    after: After,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Length {
    Steps(u64),
    Fraction(f64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum After {
    Constant,
    Linear,
    /// Down to this part.
    Cosine(f64),
}

impl Warmup {
    /// Over this many steps.
    pub fn steps(steps: u64) -> Self {
        Self { length: Length::Steps(steps), after: After::Constant }
    }

    /// Over this part of all steps, from 0 to 1.
    pub fn fraction(fraction: f64) -> Self {
        Self { length: Length::Fraction(fraction), after: After::Constant }
    }

    /// Afterwards it falls evenly to zero at the last step; otherwise it stays.
    #[must_use]
    pub fn then_linear(self) -> Self {
        Self { after: After::Linear, ..self }
    }

    /// Afterwards it falls by half a cosine to this part of the optimizer's own, which it has at the last step.
    #[must_use]
    pub fn then_cosine(self, floor: f64) -> Self {
        Self { after: After::Cosine(floor), ..self }
    }

    /// What the learning rate of a step, counted from 0, is multiplied with.
    fn factor(&self, step: u64, total: u64) -> f64 {
        let warm = match self.length {
            Length::Steps(steps) => steps as f64,
            Length::Fraction(fraction) => fraction * total as f64,
        };
        let (step, total) = ((step + 1) as f64, total as f64);
        match self.after {
            _ if step < warm => step / warm,
            After::Linear if total > warm => ((total - step) / (total - warm)).max(0.0),
            After::Cosine(floor) if total > warm => {
                let done = ((step - warm) / (total - warm)).min(1.0);
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
            }
            _ => 1.0,
        }
    }

    /// What to say where it takes all steps of the training, or more.
    fn too_long(&self, total: u64) -> Option<String> {
        match self.length {
            Length::Steps(warm) if warm >= total && total > 0 => Some(format!(
                "the warm-up has {warm} steps, and the whole training {total}: the learning rate only grows; try a warm-up of \
                 fewer steps, or of a part of them, such as 0.05"
            )),
            _ => None,
        }
    }
}

impl Callback for Warmup {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if let Length::Fraction(fraction) = self.length
            && !(0.0..=1.0).contains(&fraction)
        {
            let what = format!("the warm-up is {fraction} of all steps; expected a number from 0 to 1");
            return Err(what.into());
        }
        if let Some(words) = self.too_long(state.total_steps()).filter(|_| state.rank() == 0) {
            tracing::warn!("{words}");
        }
        Ok(())
    }

    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        state.set_lr(state.initial_lr() * self.factor(state.optimizer_steps(), state.total_steps()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_takes_the_whole_training_is_told() {
        let said = Warmup::steps(2000).too_long(300).unwrap();
        assert!(said.starts_with("the warm-up has 2000 steps, and the whole training 300: "), "{said}");
        assert!(Warmup::steps(300).too_long(300).is_some());
        for fine in [Warmup::steps(299), Warmup::steps(0), Warmup::fraction(0.5), Warmup::fraction(1.0)] {
            assert_eq!(fine.too_long(300), None, "{fine:?}");
        }
    }

    #[test]
    fn it_grows_and_then_stays_or_falls() {
        let factors = |warmup: Warmup| (0..8).map(|step| warmup.factor(step, 8)).collect::<Vec<_>>();
        assert_eq!(factors(Warmup::steps(4)), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(factors(Warmup::fraction(0.5)), factors(Warmup::steps(4)));
        assert_eq!(factors(Warmup::steps(4).then_linear()), [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]);
        assert_eq!(factors(Warmup::steps(0)), [1.0; 8]);
        let cosine = factors(Warmup::steps(4).then_cosine(0.2));
        let slope = 0.4 * std::f64::consts::FRAC_1_SQRT_2;
        for (factor, expected) in
            cosine.iter().zip([0.25, 0.5, 0.75, 1.0, 0.6 + slope, 0.6, 0.6 - slope, 0.2])
        {
            assert!((factor - expected).abs() < 1e-12, "{cosine:?}");
        }
    }
}
