//! Writes `metrics.jsonl`.

use std::path::PathBuf;

use drumline_observe::events::{
    Begin, EndEvent, EpochEvent, EvalEvent, Event, EventLog, Reason, ResumedBest, RunEvent, StepEvent,
    metrics, milliseconds_now, seconds_now,
};

use crate::device::name_of;
use crate::trainer::callback::{CallbackResult, MasterCallback};
use crate::trainer::error::TrainerError;
use crate::trainer::state::{Best, Evaluation, TrainState};

/// Writes `metrics.jsonl` in a folder: a line for the run, each epoch, each step, each evaluation and the end.
/// `drumline plot` and `drumline watch` read it.
#[derive(Debug)]
pub struct EventFile {
    folder: PathBuf,
    log: Option<EventLog>,
    /// The loss of the last step that was written.
    last_loss: Option<f64>,
}

impl EventFile {
    /// Writes in this folder, which is created if necessary. A resumed training continues the same file.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), log: None, last_loss: None }
    }

    fn write(&mut self, event: &Event) -> CallbackResult {
        Ok(self.log.as_mut().map_or(Ok(()), |log| log.write(event))?)
    }
}

fn run_event(state: &TrainState) -> RunEvent {
    RunEvent {
        step: state.step(),
        epoch: state.epoch(),
        world_size: state.world_size(),
        num_nodes: state.group().num_nodes(),
        seed: state.config().get("seed").and_then(serde_json::Value::as_u64).unwrap_or(0),
        device: name_of(state.device()),
        num_threads: tch::get_num_threads(),
        drumline: env!("CARGO_PKG_VERSION").into(),
        libtorch: crate::torch::libtorch_version(),
        time: seconds_now(),
        best: state.best().filter(|best| best.metric.is_finite()).map(resumed_best),
        config: state.config().clone().into_iter().collect(),
    }
}

fn resumed_best(best: Best) -> ResumedBest {
    let Best { metric, step, epoch } = best;
    ResumedBest { metric, step, epoch }
}

fn epoch_event(state: &TrainState) -> EpochEvent {
    EpochEvent {
        step: state.step(),
        epoch: state.epoch(),
        epochs: state.n_epochs(),
        step_in_epoch: state.step_in_epoch(),
        steps_per_epoch: state.steps_per_epoch(),
        total_steps: state.total_steps(),
    }
}

fn step_event(state: &TrainState) -> StepEvent {
    StepEvent {
        step: state.step(),
        epoch: state.epoch(),
        loss: state.loss(),
        lr: state.lr(),
        samples: state.samples(),
        samples_per_s: state.samples_per_s(),
        time: milliseconds_now(),
        metrics: metrics(state.train_metrics().iter().cloned()),
    }
}

fn end_event(state: &TrainState, reason: Reason, error: Option<String>) -> Event {
    Event::End(EndEvent { step: state.step(), epoch: state.epoch(), reason, error, time: seconds_now() })
}

impl MasterCallback for EventFile {
    fn on_train_begin(&mut self, state: &TrainState) -> CallbackResult {
        let begin = state.resumed_at().map_or(Begin::New, |step| Begin::After { step });
        self.log = Some(EventLog::open(&self.folder, begin)?);
        self.write(&Event::Run(run_event(state)))
    }

    fn on_epoch_begin(&mut self, state: &TrainState) -> CallbackResult {
        self.write(&Event::Epoch(epoch_event(state)))
    }

    fn on_step_end(&mut self, state: &TrainState) -> CallbackResult {
        self.last_loss = Some(state.loss());
        self.write(&Event::Step(step_event(state)))
    }

    fn on_valid_end(&mut self, _: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        let Evaluation { epoch, step, samples, is_better: is_best, .. } = *evaluation;
        let metric_key = Some(evaluation.metric_key.clone());
        let metrics = metrics(evaluation.metrics.iter().cloned());
        let time = milliseconds_now();
        self.write(&Event::Eval(EvalEvent { epoch, step, samples, time, metric_key, is_best, metrics }))
    }

    fn on_train_end(&mut self, state: &TrainState) -> CallbackResult {
        let reason = if state.stop_reason().is_some() { Reason::Stopped } else { Reason::Finished };
        self.write(&end_event(state, reason, None))
    }

    fn on_exception(&mut self, state: &TrainState, error: &TrainerError) -> CallbackResult {
        // Also writes the step that was refused for its loss, so that curves show it.
        let is_refused = !state.loss().is_finite() && self.last_loss.is_none_or(f64::is_finite);
        if is_refused && state.samples() > 0 {
            self.write(&Event::Step(StepEvent { step: state.step() + 1, ..step_event(state) }))?;
        }
        self.write(&end_event(state, Reason::Failed, Some(error.to_string())))
    }
}
