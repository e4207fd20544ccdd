//! The learning rate by a schedule.

use crate::schedule::Schedule;
use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::TrainState;

/// Sets the learning rate of each step by any [`Schedule`]: one of the library, or a function of [`At`](crate::At).
///
/// ```
/// use drumline::trainer::LearningRate;
/// use drumline::{At, CosineAnnealingLr, LrPolicy, LrSchedule, Per};
///
/// let halving = LearningRate::by(|at: At| 0.1 * 0.5f64.powf(at.epoch));
/// let cosine = CosineAnnealingLr { t_max: 1000, eta_min: 0.0, per: Per::Step };
/// let cosine = LearningRate::by(LrSchedule::new(0.1, LrPolicy::CosineAnnealingLr(cosine))?);
/// # let _ = (halving, cosine);
/// # Ok::<(), drumline::ScheduleError>(())
/// ```
#[derive(Debug, Clone)]
pub struct LearningRate<S> {
    schedule: S,
}

impl<S: Schedule> LearningRate<S> {
    /// The learning rate of this schedule.
    pub fn by(schedule: S) -> Self {
        Self { schedule }
    }
}

impl<S: Schedule> Callback for LearningRate<S> {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let lr = self.schedule.lr(state.at());
        if !lr.is_finite() {
            return Err(format!("the schedule's learning rate for step {} is {lr}", state.step() + 1).into());
        }
        state.set_lr(lr);
        Ok(())
    }
}
