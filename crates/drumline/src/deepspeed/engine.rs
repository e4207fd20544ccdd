//! The engine: micro-steps, and the steps that they make up.
//!
//! ```text
//!   forward ─▶ backward ─▶ step      accumulates      micro-step 0
//!   forward ─▶ backward ─▶ step      reduces, clips, steps the optimizer and the schedule, clears gradients   1
//! ```
//! `backward` takes the mean loss of a micro-batch, and divides it by the number of micro-batches, as DeepSpeed does. In
//! the batches of a prepared loader each *sample* of a step has the same weight instead, which is the same unless the
//! last batches are smaller.

use std::cell::{Cell, RefCell};

use drumline_comm::{ReduceOp, call_site, on_behalf_of};
use tch::nn::ModuleT;
use tch::{Tensor, no_grad};

use super::Result;
use super::clock::{Phase, WallClock};
use super::optimizer::AnyOptimizer;
use crate::accelerator::{Accelerator, OpenTurn, PreparedModel, PreparedOptimizer, PreparedSchedule};
use crate::comm::alike::usage_error;
use crate::config::deepspeed::{Became, DeepSpeedPlan, Monitors, Resolved};
use crate::run_error::UsageError;
use crate::schedule::Schedule;
use crate::trainer::Mode;

/// A model that is trained by a configuration of DeepSpeed; see [`initialize`](super::initialize).
pub struct DeepSpeedEngine<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    steps: Option<Steps>,
    resolved: Resolved,
    /// The turn of a micro-step that has begun.
    turn: RefCell<Option<OpenTurn>>,
    mode: Cell<Mode>,
    micro_steps: u64,
    grad_norm: Option<f64>,
    /// The sum of this step's losses, if somebody logs them.
    losses: RefCell<Option<Tensor>>,
    clock: WallClock,
}

/// What steps: the optimizer and its schedule.
pub(super) struct Steps {
    optimizer: PreparedOptimizer<AnyOptimizer>,
    schedule: Option<PreparedSchedule<AnyOptimizer, Box<dyn Schedule>>>,
}

impl Steps {
    /// `None` without an optimizer. Called after the model is prepared.
    pub(super) fn new(
        accelerator: &Accelerator,
        optimizer: Option<AnyOptimizer>,
        schedule: Option<Box<dyn Schedule>>,
    ) -> Result<Option<Self>> {
        let Some(optimizer) = optimizer else { return Ok(None) };
        let optimizer = accelerator.adopt(optimizer)?;
        let schedule = schedule.map(|schedule| accelerator.prepare_schedule(&optimizer, schedule));
        Ok(Some(Self { optimizer, schedule }))
    }
}

impl<M: ModuleT + 'static> DeepSpeedEngine<M> {
    /// Forward of a micro-batch; after [`eval`](Self::eval) that of an evaluation.
    #[track_caller]
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        on_behalf_of(call_site(), || match self.mode.get() {
            Mode::Train => {
                self.begin_micro_step();
                self.clock.over(Phase::Forward, || self.model.forward(input))
            }
            Mode::Eval => no_grad(|| self.model.evaluate(input)),
        })
    }
}

impl<M: 'static> DeepSpeedEngine<M> {
    pub(super) fn new(
        accelerator: Accelerator,
        model: PreparedModel<M>,
        steps: Option<Steps>,
        resolved: Resolved,
    ) -> Self {
        let clock = WallClock::new(resolved.plan.wall_clock_breakdown, accelerator.device());
        Self {
            accelerator,
            model,
            steps,
            resolved,
            turn: RefCell::default(),
            mode: Cell::new(Mode::Train),
            micro_steps: 0,
            grad_norm: None,
            losses: RefCell::default(),
            clock,
        }
    }

    /// Forward of a micro-batch in training, for a model of any type: `body` gets the model.
    #[track_caller]
    pub fn forward_with<R>(&self, body: impl FnOnce(&M) -> R) -> Result<R> {
        self.begin_micro_step();
        on_behalf_of(call_site(), || self.clock.over(Phase::Forward, || self.model.forward_with(body)))
    }

    /// Runs an evaluation with any number of forwards in `body`. All ranks call it. It is needed only where parameters
    /// are divided among GPUs (stage 3).
    pub fn evaluation<R>(&self, body: impl FnOnce(&M) -> R) -> Result<R> {
        self.model.evaluation(|| body(self.model.unwrap()))
    }

    /// Backward from the mean loss of a micro-batch. The last one of a step reduces gradients.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result {
        self.begin_micro_step();
        if self.logs() {
            let mut losses = self.losses.borrow_mut();
            let loss = loss.f_detach()?;
            *losses = Some(match losses.take() {
                Some(sum) => sum.f_add(&loss)?,
                None => loss.copy(),
            });
        }
        on_behalf_of(call_site(), || self.clock.over(Phase::Backward, || self.accelerator.backward(loss)))
    }

    /// Ends a micro-step. At the last one of a step: clips gradients, steps the optimizer and the schedule, and clears
    /// gradients. In fp16 a step whose gradients have overflowed is skipped, and so is that of the schedule.
    #[track_caller]
    pub fn step(&mut self) -> Result {
        on_behalf_of(call_site(), || {
            self.begin_micro_step();
            if self.is_gradient_accumulation_boundary() {
                let begin = self.clock.begin();
                self.take_step()?;
                self.clock.end(Phase::Step, begin);
                self.report()?;
            }
            self.micro_steps += 1;
            self.turn.take();
            Ok(())
        })
    }

    fn take_step(&mut self) -> Result {
        let parameters = self.model.parameters();
        let Some(steps) = &mut self.steps else {
            return Err(usage_error(self.accelerator.group(), UsageError::NoOptimizer));
        };
        let clip = self.resolved.plan.clip_norm.filter(|norm| *norm > 0.0);
        self.grad_norm = match clip {
            Some(norm) => self.accelerator.clip_grad_norm(&parameters, norm)?,
            None => None,
        };
        steps.optimizer.step()?;
        if let Some(schedule) = &mut steps.schedule {
            schedule.step();
        }
        steps.optimizer.zero_grad()
    }

    /// Trains one step: takes its micro-batches from `batches`, and runs forward, backward and `step` of each. `loss`
    /// returns the mean loss of a micro-batch. Returns the mean of these over all ranks; `None` if there are no more
    /// batches.
    #[track_caller]
    pub fn train_batch<B>(
        &mut self,
        batches: &mut impl Iterator<Item = Result<B>>,
        mut loss: impl FnMut(&M, &B) -> Tensor,
    ) -> Result<Option<f64>> {
        let (mut sum, mut num) = (None::<Tensor>, 0);
        loop {
            let Some(batch) = batches.next().transpose()? else {
                if num == 0 {
                    return Ok(None);
                }
                return Err(usage_error(self.accelerator.group(), UsageError::StepWithoutData));
            };
            let mean = self.forward_with(|model| loss(model, &batch))?;
            self.backward(&mean)?;
            let mean = mean.f_detach()?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&mean)?,
                None => mean,
            });
            num += 1;
            let is_last = self.is_gradient_accumulation_boundary();
            self.step()?;
            if is_last {
                let sum = sum.map_or(0.0, |sum| sum.double_value(&[]));
                return self.mean_of(sum / f64::from(num)).map(Some);
            }
        }
    }

    /// The mean over all ranks.
    fn mean_of(&self, value: f64) -> Result<f64> {
        let mut values = [value];
        self.accelerator.group().all_reduce(&mut values, ReduceOp::Avg)?;
        Ok(values[0])
    }

    /// Whether figures are logged after this step.
    fn logs(&self) -> bool {
        let Monitors { tensorboard, csv } = &self.plan().monitors;
        [tensorboard, csv].into_iter().flatten().any(|monitor| monitor.is_enabled)
    }

    /// Logs what DeepSpeed logs: lines every `steps_per_print` steps, and figures for the monitors. Without
    /// `steps_per_print` there are lines of times only, one for each step.
    fn report(&self) -> Result {
        let (step, skipped, every) = (self.global_steps(), self.skipped_steps(), self.plan().steps_per_print);
        let is_due = every.is_some_and(|every| every > 0 && step.is_multiple_of(every));
        if is_due {
            let lr = self.get_lr();
            self.accelerator.on_main_process(|| tracing::info!("step={step}, skipped={skipped}, lr={lr:?}"));
        }
        let times = self.clock.end_step();
        if let Some(line) = (is_due || every.is_none()).then(|| self.clock.line()).flatten() {
            self.accelerator.on_main_process(|| tracing::info!("{line}"));
        }
        let Some(losses) = self.losses.take() else { return Ok(()) };
        let loss = losses.double_value(&[]) / self.gradient_accumulation_steps() as f64;
        let lr = self.get_lr().first().copied().unwrap_or_default();
        let mut figures = vec![("Train/Samples/train_loss", self.mean_of(loss)?), ("Train/Samples/lr", lr)];
        if self.plan().precision.is_some_and(|precision| precision.loss_scale.is_some()) {
            figures.push(("Train/Samples/loss_scale", self.loss_scale()?));
        }
        figures.extend(times.iter().flat_map(|times| times.figures()));
        self.accelerator.log(self.global_samples(), figures);
        Ok(())
    }

    /// Begins a micro-step, unless one has begun.
    fn begin_micro_step(&self) {
        let mut turn = self.turn.borrow_mut();
        if turn.is_none() {
            *turn = self.accelerator.begin_turn();
        }
    }

    /// Whether a micro-step has begun and not ended.
    pub(super) fn has_begun(&self) -> bool {
        self.turn.borrow().is_some()
    }

    /// Runs `body`, in which a backward accumulates gradients on this rank and reduces nothing.
    pub fn no_sync<R>(&self, body: impl FnOnce() -> R) -> R {
        self.accelerator.no_sync(body)
    }

    /// Whether this micro-step is the last one of a step: `step` will step the optimizer.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        if self.accelerator.is_in_turn() {
            self.accelerator.sync_gradients()
        } else {
            self.accelerator.is_next_turn_last()
        }
    }

    /// From now on `forward` is that of a training.
    pub fn train(&self) {
        self.mode.set(Mode::Train);
    }

    /// From now on `forward` is that of an evaluation.
    pub fn eval(&self) {
        self.mode.set(Mode::Eval);
    }

    /// Micro-batches of a step.
    pub fn gradient_accumulation_steps(&self) -> u64 {
        self.plan().batch.accumulation
    }

    /// Samples of a micro-batch.
    pub fn train_micro_batch_size_per_gpu(&self) -> u64 {
        self.plan().batch.micro_batch
    }

    /// Samples of a step, on all ranks.
    pub fn train_batch_size(&self) -> u64 {
        self.plan().batch.train_batch
    }

    /// Steps, the skipped ones among them.
    pub fn global_steps(&self) -> u64 {
        self.steps.as_ref().map_or(0, |steps| steps.optimizer.steps()) + self.skipped_steps()
    }

    /// Steps that were skipped because gradients had overflowed.
    pub fn skipped_steps(&self) -> u64 {
        self.steps.as_ref().map_or(0, |steps| steps.optimizer.skipped_steps())
    }

    /// Samples of all steps, if each was complete.
    pub fn global_samples(&self) -> u64 {
        self.global_steps() * self.train_batch_size()
    }

    /// Calls of [`step`](Self::step).
    pub fn micro_steps(&self) -> u64 {
        self.micro_steps
    }

    pub(super) fn set_micro_steps(&mut self, micro_steps: u64) {
        self.micro_steps = micro_steps;
    }

    /// The learning rate of the next step, in a list as DeepSpeed has it; empty without an optimizer.
    pub fn get_lr(&self) -> Vec<f64> {
        self.steps.iter().map(|steps| steps.optimizer.lr()).collect()
    }

    /// The norm of all gradients of the last step, before they were clipped; `None` without clipping.
    pub fn get_global_grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    /// Whether the last step was skipped.
    pub fn was_step_applied(&self) -> bool {
        self.steps
            .as_ref()
            .is_some_and(|steps| steps.optimizer.steps() > 0 && !steps.optimizer.step_was_skipped())
    }

    /// The factor by which losses are multiplied in fp16; 1 in all other precisions.
    pub fn loss_scale(&self) -> Result<f64> {
        self.accelerator.loss_scale()
    }

    /// The stage of ZeRO.
    pub fn zero_optimization_stage(&self) -> u8 {
        self.plan().zero.map_or(0, |zero| zero.stage.number())
    }

    /// The model itself.
    pub fn module(&self) -> &M {
        self.model.unwrap()
    }

    /// The accelerator below: the device, the ranks, collectives, logging.
    pub fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// What the configuration asks for, with all sizes.
    pub fn plan(&self) -> &DeepSpeedPlan {
        &self.resolved.plan
    }

    /// What each `"auto"` of the configuration became.
    pub fn autos(&self) -> &[Became] {
        &self.resolved.autos
    }
}

impl<M> std::fmt::Debug for DeepSpeedEngine<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeepSpeedEngine")
            .field("plan", &self.resolved.plan)
            .field("micro_steps", &self.micro_steps)
            .finish_non_exhaustive()
    }
}
