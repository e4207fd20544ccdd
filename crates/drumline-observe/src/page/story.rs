//! What `metrics.jsonl` tells of a run: its curves, how far it is, how it ended.
//!
//! In: the file's lines, one after the other. Out: the fields of the page. Lines that are no events are skipped.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

use super::curve::{Curve, End};

/// Curves of a run; more names than that are a mistake.
const MOST_CURVES: usize = 64;
/// Fields of a step or an evaluation that are no curves.
const NO_CURVES: [&str; 5] = ["kind", "step", "epoch", "samples", "k"];

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
    num_nodes: Option<u64>,
    device: Option<String>,
    step: u64,
    epoch: u64,
    /// Seconds since 1970.
    began: Option<f64>,
    ended: Option<f64>,
    /// How it ended, if it told.
    pub(super) reason: Option<String>,
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

    /// Takes over a line.
    pub(super) fn hear(&mut self, line: &[u8], version: u64) {
        let Ok(event) = serde_json::from_slice::<Map<String, Value>>(line) else { return };
        match event.get("kind").and_then(Value::as_str) {
            Some("run") => self.begin(&event, version),
            Some("step") => self.values(&event, Phase::Step, version),
            Some("eval") => self.values(&event, Phase::Eval, version),
            Some("end") => self.end(&event),
            _ => {}
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
    fn begin(&mut self, event: &Map<String, Value>, version: u64) {
        let number = |name: &str| event.get(name).and_then(Value::as_u64);
        let step = number("step").unwrap_or(0);
        self.curves.values_mut().for_each(|curve| curve.cut_after(step, version));
        self.facts = Facts {
            world_size: number("world_size").and_then(|size| usize::try_from(size).ok()),
            num_nodes: number("num_nodes"),
            device: event.get("device").and_then(Value::as_str).map(str::to_owned),
            step,
            epoch: number("epoch").unwrap_or(0),
            began: self.facts.began.or_else(|| event.get("time").and_then(Value::as_f64)),
            num_left_out: self.facts.num_left_out,
            ..Facts::default()
        };
    }

    fn values(&mut self, event: &Map<String, Value>, phase: Phase, version: u64) {
        let Some(step) = event.get("step").and_then(Value::as_u64) else { return };
        self.facts.step = step;
        self.facts.epoch = event.get("epoch").and_then(Value::as_u64).unwrap_or(self.facts.epoch);
        let values = event.iter().filter(|(name, value)| {
            !NO_CURVES.contains(&name.as_str()) && (value.is_number() || value.is_null())
        });
        for (name, value) in values {
            let key = (name.clone(), phase);
            if !self.curves.contains_key(&key) && self.curves.len() == MOST_CURVES {
                self.facts.num_left_out += 1;
                continue;
            }
            self.curves.entry(key).or_insert_with(Curve::new).push(step, value.as_f64(), version);
        }
    }

    fn end(&mut self, event: &Map<String, Value>) {
        let text = |name: &str| event.get(name).and_then(Value::as_str).map(str::to_owned);
        self.facts.reason = Some(text("reason").unwrap_or_else(|| "finished".to_owned()));
        self.facts.error = text("error");
        self.facts.ended = event.get("time").and_then(Value::as_f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &[&str]) -> Story {
        let mut story = Story::default();
        lines.iter().for_each(|line| story.hear(line.as_bytes(), 1));
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
        assert_eq!((facts.world_size, facts.step, facts.epoch, facts.began), (Some(2), 1, 1, Some(5.0)));
        assert!(facts.reason.is_none());
    }

    #[test]
    fn broken_lines_and_unknown_kinds_are_skipped() {
        let good = r#"{"kind":"step","step":1,"loss":2.5}"#;
        let bad = [
            "",
            "{",
            "[1]",
            "\u{0}",
            r#"{"kind":"later"}"#,
            r#"{"kind":7,"step":1,"x":1}"#,
            r#"{"kind":"step","y":1}"#,
        ];
        let story = told(&[&bad[..], &[good]].concat());
        assert_eq!(names(&story), [("loss".to_owned(), Phase::Step)]);
    }

    #[test]
    fn a_restart_takes_back_the_end_and_the_steps_done_again() {
        let step = |step: u64| format!(r#"{{"kind":"step","step":{step},"loss":1}}"#);
        let (first, second, third) = (step(1), step(2), step(3));
        let failed = r#"{"kind":"end","step":3,"reason":"failed","error":"boom","time":9}"#;
        let mut story = told(&[&first, &second, &third, failed]);
        assert_eq!(
            (story.facts.reason.as_deref(), story.facts.error.as_deref()),
            (Some("failed"), Some("boom"))
        );
        story.hear(br#"{"kind":"run","step":2,"world_size":4}"#, 2);
        assert!(story.facts.reason.is_none() && story.facts.error.is_none());
        let ends = story.curves_since(1);
        assert_eq!((ends[0].end.from, ends[0].end.points.len()), (2, 0));
    }

    #[test]
    fn names_without_end_do_not_fill_memory() {
        let mut story = Story::default();
        for name in 0..1000 {
            story.hear(format!(r#"{{"kind":"step","step":1,"m{name}":1}}"#).as_bytes(), 1);
        }
        assert_eq!((story.curves.len(), story.facts.num_left_out), (MOST_CURVES, 1000 - MOST_CURVES));
    }
}
