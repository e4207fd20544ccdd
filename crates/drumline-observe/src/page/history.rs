//! The history of a run as `metrics.jsonl` has it: its curves, its progress, its end.
//!
//! In: the file's events, one after the other. Out: the fields of the page.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Serialize;
use serde_json::{Map, Value};

use super::clock::Clock;
use super::curve::{Curve, End, Now, Sample};
use crate::events::{EndEvent, EpochEvent, EvalEvent, Event, Reason, RunEvent, StepEvent};
use crate::runs::Best;

/// The most curves of a run; more names are a mistake.
const MOST_CURVES: usize = 64;

/// The run, as far as its file was read.
#[derive(Debug)]
pub(super) struct History {
    facts: Facts,
    setup: Option<Setup>,
    /// The version at which the setup was read.
    setup_version: u64,
    curves: BTreeMap<(String, Phase), Curve>,
    /// Steps whose values are kept.
    steps: RangeInclusive<u64>,
    clock: Clock,
    /// Steps of the run before its current epoch, if known.
    before_epoch: Option<u64>,
    /// The version at which all curves were dropped.
    reset: u64,
}

/// Everything but the curves.
#[derive(Debug, Default, Clone, Serialize)]
pub(super) struct Facts {
    pub(super) world_size: Option<usize>,
    num_nodes: usize,
    device: String,
    pub(super) step: u64,
    pub(super) total_steps: Option<u64>,
    /// From 0.
    pub(super) epoch: u64,
    pub(super) epochs: Option<u64>,
    step_in_epoch: Option<u64>,
    steps_per_epoch: Option<u64>,
    /// Seconds of work so far, and the rest.
    elapsed_s: Option<f64>,
    pub(super) left_s: Option<f64>,
    pub(super) best: Option<Best>,
    /// How it ended, if the file has its end.
    pub(super) reason: Option<Reason>,
    error: Option<String>,
    /// The number of curves that are left out because there are too many.
    num_left_out: usize,
}

/// What the run was started with.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub(super) struct Setup {
    seed: u64,
    num_threads: i32,
    drumline: String,
    libtorch: String,
    config: Map<String, Value>,
}

/// What a curve's values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Step,
    Eval,
}

/// The new part of a curve.
#[derive(Debug, Serialize)]
pub(super) struct CurveEnd<'a> {
    name: &'a str,
    phase: Phase,
    #[serde(flatten)]
    end: End,
}

impl Default for History {
    fn default() -> Self {
        Self::within(0..=u64::MAX)
    }
}

impl History {
    /// Keeps the curves of these steps only.
    pub(super) fn within(steps: RangeInclusive<u64>) -> Self {
        Self {
            facts: Facts::default(),
            setup: None,
            setup_version: 0,
            curves: BTreeMap::new(),
            steps,
            clock: Clock::default(),
            before_epoch: None,
            reset: 0,
        }
    }

    /// The file was replaced: forgets everything.
    pub(super) fn start_over(&mut self, version: u64) {
        *self = Self { reset: version, setup_version: version, ..Self::within(self.steps.clone()) };
    }

    /// Adds an event.
    pub(super) fn add(&mut self, event: &Event, version: u64) {
        match event {
            Event::Run(run) => self.begin(run, version),
            Event::Epoch(epoch) => self.begin_epoch(epoch),
            Event::Step(step) => self.step(step, event, version),
            Event::Eval(eval) => self.eval(eval, event, version),
            Event::End(end) => self.end(end),
        }
        self.facts.elapsed_s = self.clock.elapsed();
        let left = self.facts.total_steps.map(|total| total.saturating_sub(self.facts.step));
        self.facts.left_s =
            left.filter(|_| self.facts.reason.is_none()).and_then(|left| self.clock.left(left));
    }

    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Whether anything was read.
    pub(super) fn has_begun(&self) -> bool {
        self.setup.is_some() || !self.curves.is_empty()
    }

    /// Whether a browser that saw the version `since` has curves that no longer exist.
    pub(super) fn is_reset_since(&self, since: u64) -> bool {
        self.reset > since
    }

    /// What changed after the version `since`.
    pub(super) fn curves_since(&self, since: u64) -> Vec<CurveEnd<'_>> {
        let news = self.curves.iter().filter_map(|((name, phase), curve)| {
            curve.end_since(since).map(|end| CurveEnd { name, phase: *phase, end })
        });
        news.collect()
    }

    /// The setup, for a browser that saw the version `since`.
    pub(super) fn setup_since(&self, since: u64) -> Option<&Setup> {
        self.setup.as_ref().filter(|_| self.setup_version > since)
    }

    /// A process starts to work on the run, or resumes it after some step.
    fn begin(&mut self, run: &RunEvent, version: u64) {
        self.curves.values_mut().for_each(|curve| curve.cut_after(run.step, version));
        self.clock.begin(run.time as f64);
        self.before_epoch = None;
        let RunEvent { seed, num_threads, .. } = *run;
        let (drumline, libtorch) = (run.drumline.clone(), run.libtorch.clone());
        self.setup = Some(Setup { seed, num_threads, drumline, libtorch, config: run.config.clone() });
        self.setup_version = version;
        let best = self.facts.best.take().map(|before| match run.best {
            Some(resumed) => Best { value: resumed.metric, epoch: resumed.epoch, ..before },
            None => before,
        });
        self.facts = Facts {
            world_size: Some(run.world_size).filter(|size| *size > 0),
            num_nodes: run.num_nodes,
            device: run.device.clone(),
            step: run.step,
            epoch: run.epoch,
            best,
            num_left_out: self.facts.num_left_out,
            ..Facts::default()
        };
    }

    fn begin_epoch(&mut self, epoch: &EpochEvent) {
        self.before_epoch = epoch.step.checked_sub(epoch.step_in_epoch);
        let facts = &mut self.facts;
        (facts.epoch, facts.step_in_epoch) = (epoch.epoch, Some(epoch.step_in_epoch));
        facts.epochs = Some(epoch.epochs);
        facts.steps_per_epoch = Some(epoch.steps_per_epoch);
        facts.total_steps = Some(epoch.total_steps);
    }

    fn step(&mut self, step: &StepEvent, event: &Event, version: u64) {
        let time = self.clock.record_step(step.step, step.time);
        (self.facts.step, self.facts.epoch) = (step.step, step.epoch);
        self.facts.step_in_epoch = self.before_epoch.and_then(|before| step.step.checked_sub(before));
        let sample = Sample { step: step.step, time, value: f64::NAN, samples: step.samples };
        self.values(Phase::Step, sample, event, version);
    }

    fn eval(&mut self, eval: &EvalEvent, event: &Event, version: u64) {
        let time = self.clock.record(eval.time);
        self.facts.step = eval.step;
        let named = eval.metric_key.as_ref().filter(|_| eval.is_best);
        let best = named.and_then(|name| Some((name.clone(), (*eval.metrics.get(name)?)?)));
        if let Some((name, value)) = best {
            self.facts.best = Some(Best { name, value, epoch: eval.epoch });
        }
        let sample = Sample { step: eval.step, time, value: f64::NAN, samples: eval.samples };
        self.values(Phase::Eval, sample, event, version);
    }

    fn values(&mut self, phase: Phase, at: Sample, event: &Event, version: u64) {
        if !self.steps.contains(&at.step) {
            return;
        }
        for (name, value) in event.figures() {
            let key = (name.to_owned(), phase);
            if !self.curves.contains_key(&key) && self.curves.len() == MOST_CURVES {
                self.facts.num_left_out += 1;
                continue;
            }
            let curve = self.curves.entry(key).or_insert_with(|| Curve::new(now_of(name, phase)));
            curve.push(Sample { value, ..at }, version);
        }
    }

    fn end(&mut self, end: &EndEvent) {
        self.clock.record(Some(end.time as f64));
        self.facts.reason = Some(end.reason);
        self.facts.error = end.error.clone();
    }
}

fn now_of(name: &str, phase: Phase) -> Now {
    match (phase, name) {
        (Phase::Eval, _) | (Phase::Step, "lr") => Now::Last,
        (Phase::Step, "samples_per_s") => Now::Rate,
        (Phase::Step, _) => Now::Mean,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::ResumedBest;

    fn history(lines: &[&str]) -> History {
        let mut history = History::default();
        lines.iter().for_each(|line| history.add(&serde_json::from_str(line).unwrap(), 1));
        history
    }

    fn names(history: &History) -> Vec<(String, Phase)> {
        history.curves.keys().cloned().collect()
    }

    #[test]
    fn each_number_of_a_step_is_a_curve() {
        let history = history(&[
            r#"{"kind":"run","step":0,"epoch":0,"world_size":2,"num_nodes":1,"device":"cpu","time":5}"#,
            r#"{"kind":"step","step":1,"epoch":0,"loss":2.5,"lr":0.1,"samples":64,"samples_per_s":9.5,"time":7,"note":"x"}"#,
            r#"{"kind":"eval","step":1,"epoch":1,"samples":10,"loss":null,"k":5,"metric_key":"loss"}"#,
        ]);
        let expected = [
            ("loss", Phase::Step),
            ("loss", Phase::Eval),
            ("lr", Phase::Step),
            ("samples_per_s", Phase::Step),
        ];
        assert_eq!(names(&history), expected.map(|(name, phase)| (name.to_owned(), phase)));
        let facts = &history.facts;
        assert_eq!((facts.world_size, facts.step, facts.epoch, facts.elapsed_s), (Some(2), 1, 0, Some(2.0)));
        assert!(facts.reason.is_none());
    }

    #[test]
    fn epoch_and_step_are_those_of_the_log() {
        let epoch = |step: u64, epoch: u64, done: u64| {
            format!(
                r#"{{"kind":"epoch","step":{step},"epoch":{epoch},"epochs":3,"step_in_epoch":{done},"steps_per_epoch":4,"total_steps":12}}"#
            )
        };
        let step = |step: u64, epoch: u64| {
            format!(r#"{{"kind":"step","step":{step},"epoch":{epoch},"loss":1,"time":{}}}"#, 100 + 2 * step)
        };
        let at = |history: &History| {
            let Facts { epoch, step_in_epoch, steps_per_epoch, step, total_steps, .. } = history.facts;
            (epoch, step_in_epoch, steps_per_epoch, step, total_steps)
        };
        let mut history =
            super::tests::history(&[&epoch(0, 0, 0), &step(1, 0), &step(2, 0), &step(3, 0), &step(4, 0)]);
        assert_eq!(at(&history), (0, Some(4), Some(4), 4, Some(12)));
        assert_eq!(history.facts.left_s, Some(16.0));
        // An evaluation counts the epoch as done; the page shows where the run is.
        history.add(&serde_json::from_str(r#"{"kind":"eval","step":4,"epoch":1,"loss":1}"#).unwrap(), 2);
        assert_eq!(at(&history).0, 0);
        // Resumed in the middle of the second epoch.
        for line in [r#"{"kind":"run","step":6,"epoch":1,"world_size":2}"#, &epoch(6, 1, 2), &step(7, 1)] {
            history.add(&serde_json::from_str(line).unwrap(), 3);
        }
        assert_eq!(at(&history), (1, Some(3), Some(4), 7, Some(12)));
        // A program that does not report the length of its epochs.
        let history = super::tests::history(&[&step(5, 1)]);
        assert_eq!(at(&history), (1, None, None, 5, None));
    }

    #[test]
    fn the_best_evaluation_stays() {
        let eval = |epoch: u64, acc: f64, is_best: bool| {
            format!(
                r#"{{"kind":"eval","step":1,"epoch":{epoch},"acc1":{acc},"metric_key":"acc1","is_best":{is_best}}}"#
            )
        };
        let mut history = history(&[&eval(1, 40.0, true), &eval(2, 60.0, true), &eval(3, 50.0, false)]);
        let best = Best { name: "acc1".into(), value: 60.0, epoch: 2 };
        assert_eq!(history.facts.best.as_ref(), Some(&best));
        history.add(&Event::Run(RunEvent::default()), 2);
        assert_eq!(history.facts.best, Some(best), "also after a restart");
        let resumed = ResumedBest { metric: 50.0, step: 3, epoch: 3 };
        history.add(&Event::Run(RunEvent { best: Some(resumed), ..RunEvent::default() }), 3);
        let next = Best { name: "acc1".into(), value: 50.0, epoch: 3 };
        assert_eq!(history.facts.best, Some(next), "the best checkpoint was damaged");
    }

    #[test]
    fn a_part_of_the_steps_in_full() {
        let mut history = History::within(3..=4);
        for step in 1..=9 {
            let line = format!(r#"{{"kind":"step","step":{step},"loss":{step}}}"#);
            history.add(&serde_json::from_str(&line).unwrap(), 1);
        }
        let steps: Vec<_> = history.curves_since(0)[0].end.points.iter().map(|point| point.0).collect();
        assert_eq!(steps, [3, 4]);
    }

    #[test]
    fn a_restart_removes_the_end_and_the_repeated_steps() {
        let step = |step: u64| format!(r#"{{"kind":"step","step":{step},"loss":1}}"#);
        let (first, second, third) = (step(1), step(2), step(3));
        let failed = r#"{"kind":"end","step":3,"reason":"failed","error":"boom","time":9}"#;
        let mut history = history(&[&first, &second, &third, failed]);
        assert_eq!(
            (history.facts.reason, history.facts.error.as_deref()),
            (Some(Reason::Failed), Some("boom"))
        );
        history.add(&Event::Run(RunEvent { step: 2, ..RunEvent::default() }), 2);
        assert_eq!(history.facts.world_size, None, "not reported: no rank is hidden");
        assert!(history.facts.reason.is_none() && history.facts.error.is_none());
        let ends = history.curves_since(1);
        assert_eq!((ends[0].end.from, ends[0].end.points.len()), (2, 0));
    }

    #[test]
    fn an_endless_number_of_names_does_not_fill_memory() {
        let lines: Vec<_> =
            (0..1000).map(|name| format!(r#"{{"kind":"step","step":1,"m{name}":1}}"#)).collect();
        let history = history(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!((history.curves.len(), history.facts.num_left_out), (MOST_CURVES, 1000 - MOST_CURVES));
    }
}
