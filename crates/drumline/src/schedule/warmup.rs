//! A learning rate that grows from small values to full ones, and then follows another schedule.

use super::{At, Evaluated, Schedule, ScheduleError, cosine, ensure};
use serde_json::Value;

/// Lets the learning rate grow linearly from near zero to the optimizer's own, like fastNLP's `WarmupCallback`. After
/// that it stays, falls, or follows another schedule.
///
/// ```
/// use drumline::schedule::{At, Schedule, Warmup};
///
/// let at = |step| At { step, total_steps: Some(10), base_lr: 0.4, ..At::default() };
/// let lr = |schedule: &dyn Schedule, step| schedule.lr(at(step));
/// let warmup = Warmup::steps(4).then_linear();
/// assert_eq!((lr(&warmup, 0), lr(&warmup, 3), lr(&warmup, 9)), (0.1, 0.4, 0.0));
/// let halved = Warmup::steps(4).then(|at: At| at.base_lr * 0.5);
/// assert_eq!((lr(&halved, 0), lr(&halved, 8)), (0.05, 0.2));
/// ```
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
    /// Down to this fraction.
    Cosine(f64),
}

impl Warmup {
    /// A warm-up of this many steps.
    pub fn steps(steps: u64) -> Self {
        Self { length: Length::Steps(steps), after: After::Constant }
    }

    /// A warm-up of this fraction of all steps, from 0 to 1.
    pub fn fraction(fraction: f64) -> Self {
        Self { length: Length::Fraction(fraction), after: After::Constant }
    }

    /// After the warm-up it falls linearly to zero at the last step. By default it stays.
    #[must_use]
    pub fn then_linear(self) -> Self {
        Self { after: After::Linear, ..self }
    }

    /// After the warm-up it falls by half a cosine to this fraction of the optimizer's own at the last step.
    #[must_use]
    pub fn then_cosine(self, floor: f64) -> Self {
        Self { after: After::Cosine(floor), ..self }
    }

    /// Multiplies the learning rate of another schedule: by less than 1 in the warm-up, by 1 after it.
    pub fn then<S: Schedule>(self, schedule: S) -> WarmupThen<S> {
        WarmupThen { warmup: Self { after: After::Constant, ..self }, schedule }
    }

    /// The factor of the learning rate of a step, counted from 0.
    fn factor(&self, step: u64, total: Option<u64>) -> f64 {
        // Without a total there is no last step to fall to.
        let total = total.map_or(f64::INFINITY, |total| total as f64);
        let warm = match self.length {
            Length::Steps(steps) => steps as f64,
            Length::Fraction(fraction) => fraction * total,
        };
        let step = (step + 1) as f64;
        match self.after {
            _ if step < warm => step / warm,
            After::Linear if total > warm && total.is_finite() => ((total - step) / (total - warm)).max(0.0),
            After::Cosine(floor) if total > warm && total.is_finite() => {
                let done = ((step - warm) / (total - warm)).min(1.0);
                floor + (1.0 - floor) * cosine(done)
            }
            _ => 1.0,
        }
    }

    /// Returns a warning if the warm-up takes the whole training, or more.
    fn too_long(&self, total: u64) -> Option<String> {
        match self.length {
            Length::Steps(warm) if warm >= total && total > 0 => Some(format!(
                "the warm-up has {warm} steps, and the whole training {total}: the learning rate only grows; try a warm-up of \
                 fewer steps, or of a fraction of them, such as 0.05"
            )),
            _ => None,
        }
    }
}

impl Schedule for Warmup {
    fn lr(&self, at: At) -> f64 {
        at.base_lr * self.factor(at.step, at.total_steps)
    }

    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        if let Length::Fraction(fraction) = self.length {
            ensure((0.0..=1.0).contains(&fraction), "Warmup", || {
                format!("it is {fraction} of all steps, expected a number from 0 to 1")
            })?;
            ensure(total_steps.is_some(), "Warmup", || {
                "it is a fraction of all steps, whose number is not known; try Warmup::steps".into()
            })?;
        }
        Ok(total_steps.and_then(|total| self.too_long(total)))
    }
}

/// A warm-up, and then another schedule; see [`Warmup::then`].
#[derive(Debug, Clone, PartialEq)]
pub struct WarmupThen<S> {
    warmup: Warmup,
    schedule: S,
}

impl<S: Schedule> Schedule for WarmupThen<S> {
    fn lr(&self, at: At) -> f64 {
        self.schedule.lr(at) * self.warmup.factor(at.step, at.total_steps)
    }

    fn check(&self, total_steps: Option<u64>) -> Result<Option<String>, ScheduleError> {
        let of_warmup = self.warmup.check(total_steps)?;
        Ok(of_warmup.or(self.schedule.check(total_steps)?))
    }

    fn evaluated(&mut self, evaluation: Evaluated) -> Option<f64> {
        self.schedule.evaluated(evaluation)
    }

    fn state(&self) -> Value {
        self.schedule.state()
    }

    fn load_state(&mut self, state: &Value, lr: f64) -> Result<(), serde_json::Error> {
        self.schedule.load_state(state, lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_that_takes_the_whole_training_is_a_warning() {
        let warning = Warmup::steps(2000).check(Some(300)).unwrap().unwrap();
        assert!(warning.starts_with("the warm-up has 2000 steps, and the whole training 300: "), "{warning}");
        assert!(Warmup::steps(300).check(Some(300)).unwrap().is_some());
        for fine in [Warmup::steps(299), Warmup::steps(0), Warmup::fraction(0.5), Warmup::fraction(1.0)] {
            assert_eq!(fine.check(Some(300)), Ok(None), "{fine:?}");
        }
    }

    #[test]
    fn fractions_are_checked() {
        let error = Warmup::fraction(1.5).check(Some(300)).unwrap_err().to_string();
        assert_eq!(error, "Warmup: it is 1.5 of all steps, expected a number from 0 to 1");
        let error = Warmup::fraction(0.5).check(None).unwrap_err().to_string();
        assert!(error.contains("try Warmup::steps"), "{error}");
    }

    #[test]
    fn it_grows_and_then_stays_or_falls() {
        let factors = |warmup: Warmup| (0..8).map(|step| warmup.factor(step, Some(8))).collect::<Vec<_>>();
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
