//! A tracker that writes `metrics.jsonl`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use drumline_observe::events::{
    Begin, EndEvent, Event, EventLog, Reason, RunEvent, StepEvent, metrics, milliseconds_now, seconds_now,
};

use super::{Moment, Started, Tracker, TrackerResult};

/// Writes `metrics.jsonl` in a folder: a line for the run, each step and the end. `drumline plot` and `drumline watch`
/// read it. A resumed run continues the same file. A new run keeps the file of the run before as `metrics.1.jsonl`, ….
///
/// `loss`, `lr`, `samples`, `samples_per_s` and `epoch` are fields of the line; all other names are metrics. A metric
/// called `kind`, `step` or `time` gets a `_` after its name, because the line has fields of these names.
#[derive(Debug)]
pub struct JsonLines {
    folder: PathBuf,
    log: Option<EventLog>,
}

impl JsonLines {
    /// Writes in `folder`, which is created if necessary.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), log: None }
    }

    fn write(&mut self, event: &Event) -> TrackerResult {
        Ok(self.log.as_mut().map_or(Ok(()), |log| log.write(event))?)
    }
}

impl Tracker for JsonLines {
    fn begin(&mut self, run: &Started) -> TrackerResult {
        let begin = run.resumed_at.map_or(Begin::New, |step| Begin::After { step });
        self.log = Some(EventLog::open(&self.folder, begin)?);
        self.write(&Event::Run(RunEvent {
            step: run.resumed_at.unwrap_or(0),
            epoch: run.epoch,
            world_size: run.world_size,
            num_nodes: run.num_nodes,
            seed: run.seed,
            device: run.device.clone(),
            num_threads: tch::get_num_threads(),
            drumline: env!("CARGO_PKG_VERSION").into(),
            libtorch: crate::torch::libtorch_version(),
            time: seconds_now(),
            best: None,
            config: run.config.clone(),
        }))
    }

    fn log(&mut self, at: Moment, values: &BTreeMap<String, f64>) -> TrackerResult {
        self.write(&Event::Step(step_event(at, values.clone())))
    }

    fn end(&mut self, at: Moment) -> TrackerResult {
        let Moment { step, epoch } = at;
        let (reason, error, time) = (Reason::Finished, None, seconds_now());
        self.write(&Event::End(EndEvent { step, epoch, reason, error, time }))
    }
}

fn step_event(at: Moment, mut values: BTreeMap<String, f64>) -> StepEvent {
    let mut taken = |name: &str| values.remove(name);
    let event = StepEvent {
        step: at.step,
        epoch: taken("epoch").map_or(at.epoch, |epoch| epoch as u64),
        loss: taken("loss").unwrap_or(f64::NAN),
        lr: taken("lr").unwrap_or(f64::NAN),
        samples: taken("samples").map_or(0, |samples| samples as u64),
        samples_per_s: taken("samples_per_s").unwrap_or(f64::NAN),
        time: milliseconds_now(),
        ..StepEvent::default()
    };
    let unreserved =
        |name: String| if matches!(&*name, "kind" | "step" | "time") { name + "_" } else { name };
    let others = values.into_iter().map(|(name, value)| (unreserved(name), value));
    StepEvent { metrics: metrics(others), ..event }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_can_be_logged_and_is_read_back() {
        let names = ["loss", "lr", "epoch", "kind", "step", "samples", "samples_per_s", "acc1", "time"];
        let values = names.iter().zip(1..).map(|(name, value)| (name.to_string(), f64::from(value)));
        let event = Event::Step(step_event(Moment { step: 7, epoch: 9 }, values.collect()));
        let line = serde_json::to_string(&event).unwrap();
        let Event::Step(step) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!((step.step, step.epoch, step.loss, step.lr), (7, 3, 1.0, 2.0));
        assert_eq!(step.metrics, metrics([("acc1", 8.0), ("kind_", 4.0), ("step_", 5.0), ("time_", 9.0)]));
        assert!(step.time.is_some_and(|time| time > 1e9), "{line}");
    }
}
