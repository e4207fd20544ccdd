//! `OUT_DIR/metrics.jsonl`: what happened, for programs. One JSON object per line; rank 0 writes it.
//!
//! ```text
//!   {"kind":"run", …}      a process starts to work on the run, at this step
//!   {"kind":"epoch", …}    an epoch begins, or is resumed: its length, and that of the run
//!   {"kind":"step", …}     after each step of the optimizer
//!   {"kind":"eval", …}     after each evaluation
//!   {"kind":"end", …}      the process ends; missing if it was killed
//!
//!   EventLog ── whole lines ──▶ metrics.jsonl ──▶ read (once) or Follow (as it grows)
//! ```
//!
//! Each step is in the file once. A run that resumes from a checkpoint repeats the steps after it: their lines are removed
//! first, and so is a partial line that a crash has left. A new run keeps the file of the run before as `metrics.1.jsonl`,
//! `metrics.2.jsonl`, ….
//!
//! All losses and metrics are means over the samples of all ranks. A number that JSON does not have, such as NaN, is
//! written as null. Readers skip lines that are broken or of an unknown kind.

mod follow;
mod log;
mod number;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use follow::{Follow, News, read};
pub use log::{Begin, EventLog};

/// Name of the file in `OUT_DIR`.
pub const METRICS: &str = "metrics.jsonl";

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Event {
    /// The run starts, or resumes after `step` steps.
    Run(RunEvent),
    /// An epoch begins, or is resumed.
    Epoch(EpochEvent),
    /// A step of the optimizer.
    Step(StepEvent),
    /// An evaluation on the test set.
    Eval(EvalEvent),
    /// The run ends.
    End(EndEvent),
}

impl Event {
    /// The figures of a step or an evaluation that make curves, by name. A missing number is NaN.
    pub fn figures(&self) -> impl Iterator<Item = (&str, f64)> {
        let (own, metrics) = match self {
            Self::Step(step) => {
                let own = [("loss", step.loss), ("lr", step.lr), ("samples_per_s", step.samples_per_s)];
                (Some(own), Some(&step.metrics))
            }
            Self::Eval(eval) => (None, Some(&eval.metrics)),
            Self::Run(_) | Self::Epoch(_) | Self::End(_) => (None, None),
        };
        let own = own.into_iter().flatten().filter(|(_, value)| !number::is_missing(*value));
        // The k of top-k accuracy says nothing about the training.
        let metrics = metrics.into_iter().flatten().filter(|(name, _)| *name != "k");
        own.chain(metrics.map(|(name, value)| (name.as_str(), value.unwrap_or(f64::NAN))))
    }
}

/// What is needed to repeat the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunEvent {
    /// Steps that were done before.
    pub step: u64,
    /// The epoch that it begins in.
    pub epoch: u64,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of nodes.
    pub num_nodes: usize,
    /// The seed that was used.
    pub seed: u64,
    /// The device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Threads of each rank's kernels.
    pub num_threads: i32,
    /// Version of this program.
    pub drumline: String,
    /// Version of libtorch that it was built for.
    pub libtorch: String,
    /// Seconds since 1970.
    pub time: u64,
    /// With what later evaluations are compared, if the run is resumed. It may be another one than before: a best
    /// checkpoint that is damaged does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<ResumedBest>,
    /// Every key with its value.
    pub config: serde_json::Map<String, Value>,
}

/// The best evaluation of a resumed run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ResumedBest {
    /// The value of the metric by which the best model is chosen.
    pub metric: f64,
    /// Steps done by then.
    pub step: u64,
    /// Epochs done by then.
    pub epoch: u64,
}

/// How far the run is when an epoch begins, and how long it will be. Written only if that is known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EpochEvent {
    /// Steps of the run that were done before.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// Steps of this epoch that were done before, if it is resumed.
    pub step_in_epoch: u64,
    /// Steps of this epoch.
    pub steps_per_epoch: u64,
    /// Steps of the run, if all later epochs are as long as this one.
    pub total_steps: u64,
}

/// A step: its own figures, not means over the steps before.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// Steps done, this one included.
    pub step: u64,
    /// Epoch, from 0.
    #[serde(default)]
    pub epoch: u64,
    /// Mean over the samples of all ranks.
    #[serde(default = "number::missing", with = "number")]
    pub loss: f64,
    /// Learning rate of this step.
    #[serde(default = "number::missing", with = "number")]
    pub lr: f64,
    /// Samples of all ranks in this step.
    #[serde(default)]
    pub samples: u64,
    /// Samples of all ranks per second, since the step before.
    #[serde(default = "number::missing", with = "number")]
    pub samples_per_s: f64,
    /// When it ended: seconds since 1970, to the millisecond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// All other figures by name, such as `acc1`.
    #[serde(flatten, deserialize_with = "number::only_numbers")]
    pub metrics: Metrics,
}

/// An evaluation on the whole test set, each sample once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalEvent {
    /// Epochs done.
    #[serde(default)]
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
    /// Number of samples.
    #[serde(default)]
    pub samples: u64,
    /// When it ended: seconds since 1970, to the millisecond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<f64>,
    /// The metric by which the best model is chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric_key: Option<String>,
    /// Whether its value is better than in all evaluations before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_best: bool,
    /// Figures by name, such as `loss` and `acc1`.
    #[serde(flatten, deserialize_with = "number::only_numbers")]
    pub metrics: Metrics,
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndEvent {
    /// Steps done.
    pub step: u64,
    /// Epochs done.
    #[serde(default)]
    pub epoch: u64,
    /// Why it ended.
    pub reason: Reason,
    /// What went wrong, if something did.
    #[serde(default)]
    pub error: Option<String>,
    /// Seconds since 1970.
    #[serde(default)]
    pub time: u64,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// All steps were done.
    Finished,
    /// A signal or a callback stopped it; the run can be resumed.
    Stopped,
    /// Something went wrong.
    Failed,
}

/// Figures by name; `None` if the number is NaN or infinite.
pub type Metrics = BTreeMap<String, Option<f64>>;

/// Figures by name, in the form that events use.
///
/// ```
/// use drumline_observe::events::metrics;
///
/// assert_eq!(metrics([("acc1", 50.0), ("loss", f64::NAN)])["loss"], None);
/// ```
pub fn metrics<N: Into<String>>(figures: impl IntoIterator<Item = (N, f64)>) -> Metrics {
    let number = |value: f64| value.is_finite().then_some(value);
    figures.into_iter().map(|(name, value)| (name.into(), number(value))).collect()
}

/// Seconds since 1970, for [`RunEvent`] and [`EndEvent`].
pub fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// Seconds since 1970 to the millisecond, for [`StepEvent`] and [`EvalEvent`].
pub fn milliseconds_now() -> Option<f64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(now.as_millis() as f64 / 1e3)
}

/// The file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// The file cannot be written.
    #[error("cannot write {}: {source}; try another OUT_DIR", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The file does not exist, or this user may not read it.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_back(line: &str) -> Option<Event> {
        serde_json::from_str(line).ok()
    }

    #[test]
    fn every_kind_is_written_and_read_back() {
        let step = StepEvent {
            step: 1,
            loss: 2.5,
            lr: 0.1,
            samples: 64,
            samples_per_s: 500.5,
            ..Default::default()
        };
        let events = [
            Event::Run(RunEvent { world_size: 2, device: "cpu".into(), ..Default::default() }),
            Event::Epoch(EpochEvent { epoch: 1, epochs: 5, steps_per_epoch: 49, ..Default::default() }),
            Event::Step(StepEvent { metrics: metrics([("acc1", 12.5)]), time: Some(1.7e9), ..step }),
            Event::Eval(EvalEvent {
                epoch: 1,
                step: 40,
                samples: 9,
                time: Some(1.7e9),
                metric_key: Some("loss".into()),
                is_best: true,
                metrics: metrics([("loss", 1.5)]),
            }),
            Event::End(EndEvent {
                step: 40,
                epoch: 1,
                reason: Reason::Failed,
                error: Some("no memory".into()),
                time: 7,
            }),
        ];
        for event in events {
            let line = serde_json::to_string(&event).unwrap();
            assert_eq!(read_back(&line), Some(event), "{line}");
        }
        let line = serde_json::to_string(&Event::Eval(EvalEvent::default())).unwrap();
        assert_eq!(line, r#"{"kind":"eval","epoch":0,"step":0,"samples":0}"#);
    }

    #[test]
    fn numbers_that_json_does_not_have_are_null() {
        let step = StepEvent { loss: f64::NAN, lr: f64::INFINITY, ..Default::default() };
        let line = serde_json::to_string(&Event::Step(step)).unwrap();
        assert!(line.contains(r#""loss":null,"lr":null"#), "{line}");
        let Some(Event::Step(step)) = read_back(&line) else { panic!("{line}") };
        assert!(step.loss.is_nan() && step.lr.is_nan());
    }

    #[test]
    fn additional_fields_do_not_hide_a_line() {
        let line = r#"{"kind":"step","step":3,"note":"warm","acc1":null,"list":[1]}"#;
        let Some(Event::Step(step)) = read_back(line) else { panic!("not read") };
        assert_eq!((step.step, &step.metrics), (3, &Metrics::from([("acc1".into(), None)])));
        assert!(step.loss.is_nan(), "a missing number is not 0");
        let names =
            |line| read_back(line).unwrap().figures().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(line), ["acc1"]);
        assert_eq!(names(r#"{"kind":"step","step":3,"loss":null,"lr":0.5}"#), ["loss", "lr"]);
        assert_eq!(read_back(r#"{"kind":"party","step":3}"#), None);
        let run = read_back(r#"{"kind":"run","world_size":4,"new":{"a":1}}"#);
        assert_eq!(run, Some(Event::Run(RunEvent { world_size: 4, ..Default::default() })));
    }
}
