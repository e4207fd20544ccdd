//! What `metrics.jsonl` tells of a run: its curves, how far it is, how it ended.
//!
//! In: the file's events, one after the other. Out: the fields of the page.

use std::collections::BTreeMap;

use serde::Serialize;

use super::curve::{Curve, End};
use crate::events::{EndEvent, Event, Reason, RunEvent};

/// Curves of a run; more names than that are a mistake.
const MOST_CURVES: usize = 64;

/// The run as told so far.
#[derive(Debug, Default)]
pub(super) struct Story {
    pub(super) facts: Facts,
    curves: BTreeMap<(String, Phase), Curve>,
    /// The version at which all curves were dropped.
    reset: u64,
}

/// What there is beside the curves.
#[derive(Debug, Default, Clone, Serialize)]
pub(super) struct Facts {
    pub(super) world_size: Option<usize>,
    num_nodes: usize,
    device: String,
    step: u64,
    epoch: u64,
    /// Seconds since 1970.
    began: Option<u64>,
    ended: Option<u64>,
    /// How it ended, if it told.
    pub(super) reason: Option<Reason>,
    error: Option<String>,
    /// Curves beyond the most that are kept.
    num_left_out: usize,
}

/// Whose value a curve shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Step,
    Eval,
}

/// What is new of a curve.
#[derive(Debug, Serialize)]
pub(super) struct CurveEnd<'a> {
    name: &'a str,
    phase: Phase,
    #[serde(flatten)]
    end: End,
}

impl Story {
    /// The file begins anew.
    pub(super) fn start_over(&mut self, version: u64) {
        *self = Self { reset: version, ..Self::default() };
    }

    /// Takes over an event.
    pub(super) fn hear(&mut self, event: &Event, version: u64) {
        match event {
            Event::Run(run) => self.begin(run, version),
            Event::Step(step) => self.values((Phase::Step, step.step, step.epoch), event, version),
            Event::Eval(eval) => self.values((Phase::Eval, eval.step, eval.epoch), event, version),
            Event::End(end) => self.end(end),
        }
    }

    /// Whether anything was told.
    pub(super) fn has_begun(&self) -> bool {
        self.facts.began.is_some() || !self.curves.is_empty()
    }

    /// Whether a browser that saw the version `since` has curves that are no more.
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

    /// A process begins to work on the run, or goes on after some step.
    fn begin(&mut self, run: &RunEvent, version: u64) {
        self.curves.values_mut().for_each(|curve| curve.cut_after(run.step, version));
        self.facts = Facts {
            world_size: Some(run.world_size).filter(|size| *size > 0),
            num_nodes: run.num_nodes,
            device: run.device.clone(),
            step: run.step,
            epoch: run.epoch,
            began: self.facts.began.or(Some(run.time)),
            num_left_out: self.facts.num_left_out,
            ..Facts::default()
        };
    }

    fn values(&mut self, (phase, step, epoch): (Phase, u64, u64), event: &Event, version: u64) {
        (self.facts.step, self.facts.epoch) = (step, epoch);
        for (name, value) in event.figures() {
            let key = (name.to_owned(), phase);
            if !self.curves.contains_key(&key) && self.curves.len() == MOST_CURVES {
                self.facts.num_left_out += 1;
                continue;
            }
            self.curves.entry(key).or_insert_with(Curve::new).push(step, value, version);
        }
    }

    fn end(&mut self, end: &EndEvent) {
        self.facts.reason = Some(end.reason);
        self.facts.error = end.error.clone();
        self.facts.ended = Some(end.time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &[&str]) -> Story {
        let mut story = Story::default();
        lines.iter().for_each(|line| story.hear(&serde_json::from_str(line).unwrap(), 1));
        story
    }

    fn names(story: &Story) -> Vec<(String, Phase)> {
        story.curves.keys().cloned().collect()
    }

    #[test]
    fn each_number_of_a_step_is_a_curve() {
        let story = told(&[
            r#"{"kind":"run","step":0,"epoch":0,"world_size":2,"num_nodes":1,"device":"cpu","time":5}"#,
            r#"{"kind":"step","step":1,"epoch":0,"loss":2.5,"lr":0.1,"samples":64,"samples_per_s":9.5,"note":"x"}"#,
            r#"{"kind":"eval","step":1,"epoch":1,"samples":10,"loss":null,"k":5}"#,
        ]);
        let expected = [
            ("loss", Phase::Step),
            ("loss", Phase::Eval),
            ("lr", Phase::Step),
            ("samples_per_s", Phase::Step),
        ];
        assert_eq!(names(&story), expected.map(|(name, phase)| (name.to_owned(), phase)));
        let facts = &story.facts;
        assert_eq!((facts.world_size, facts.step, facts.epoch, facts.began), (Some(2), 1, 1, Some(5)));
        assert!(facts.reason.is_none());
    }

    #[test]
    fn a_restart_takes_back_the_end_and_the_steps_done_again() {
        let step = |step: u64| format!(r#"{{"kind":"step","step":{step},"loss":1}}"#);
        let (first, second, third) = (step(1), step(2), step(3));
        let failed = r#"{"kind":"end","step":3,"reason":"failed","error":"boom","time":9}"#;
        let mut story = told(&[&first, &second, &third, failed]);
        assert_eq!((story.facts.reason, story.facts.error.as_deref()), (Some(Reason::Failed), Some("boom")));
        story.hear(&Event::Run(RunEvent { step: 2, ..RunEvent::default() }), 2);
        assert_eq!(story.facts.world_size, None, "not told: no rank is hidden");
        assert!(story.facts.reason.is_none() && story.facts.error.is_none());
        let ends = story.curves_since(1);
        assert_eq!((ends[0].end.from, ends[0].end.points.len()), (2, 0));
    }

    #[test]
    fn names_without_end_do_not_fill_memory() {
        let lines: Vec<_> =
            (0..1000).map(|name| format!(r#"{{"kind":"step","step":1,"m{name}":1}}"#)).collect();
        let story = told(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!((story.curves.len(), story.facts.num_left_out), (MOST_CURVES, 1000 - MOST_CURVES));
    }
}
