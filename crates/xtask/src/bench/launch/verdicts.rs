//! The goals of the launcher, and what the samples say about each.

use super::samples::{Kind, Launcher, Samples, Subject};
use super::{MANY, SLEEPERS};
use crate::bench::report;

/// What a goal asks of a measured value.
#[derive(Debug, Clone, Copy)]
enum Need {
    AtMost(f64),
    Below(f64),
    AtLeast(f64),
}

/// A goal, with how its value is computed; `None` where something was not measured.
struct Goal {
    what: &'static str,
    unit: &'static str,
    need: Need,
    value: fn(&Samples) -> Option<f64>,
}

const GOALS: [Goal; 6] = [
    Goal {
        what: "the launcher's own share of a native program's run (total less the bare program)",
        unit: " ms",
        need: Need::Below(50.0),
        value: |samples| {
            let total = median(samples, Subject::Native, Launcher::Ours, Kind::Total)?;
            Some(total - median(samples, Subject::Bare, Launcher::None, Kind::Total)?)
        },
    },
    Goal {
        what: "native program's first line, against torchrun",
        unit: "x",
        need: Need::AtLeast(20.0),
        value: |samples| times_faster(samples, Subject::Native, Kind::FirstLine),
    },
    Goal {
        what: "Python script's first line, against torchrun",
        unit: "x",
        need: Need::AtLeast(1.0),
        value: |samples| times_faster(samples, Subject::Python, Kind::FirstLine),
    },
    Goal {
        what: "restart of a native program, failure to first line",
        unit: " ms",
        need: Need::AtMost(1000.0),
        value: |samples| median(samples, Subject::Restart, Launcher::Ours, Kind::Restart),
    },
    Goal {
        what: "500 ranks start and end",
        unit: " ms",
        need: Need::AtMost(5000.0),
        value: |samples| median(samples, Subject::Many(MANY), Launcher::Ours, Kind::Total),
    },
    Goal {
        what: "memory beside 100 ranks",
        unit: " MiB",
        need: Need::Below(20.0),
        value: |samples| median(samples, Subject::Memory(SLEEPERS), Launcher::Ours, Kind::Pss),
    },
];

fn median(samples: &Samples, subject: Subject, launcher: Launcher, kind: Kind) -> Option<f64> {
    Some(samples.spread(subject, launcher, kind)?.median)
}

fn times_faster(samples: &Samples, subject: Subject, kind: Kind) -> Option<f64> {
    let theirs = median(samples, subject, Launcher::Torchrun, kind)?;
    Some(theirs / median(samples, subject, Launcher::Ours, kind)?)
}

/// The section on goals.
pub(crate) fn markdown(samples: &Samples) -> String {
    let mut rows = vec![["", "what", "goal", "measured"].map(str::to_owned).to_vec()];
    let verdicts = GOALS.iter().map(|goal| goal.judge(samples));
    rows.extend(verdicts);
    report::goals(&rows)
}

impl Goal {
    fn judge(&self, samples: &Samples) -> Vec<String> {
        let unit = self.unit;
        let (goal, reached): (String, fn(f64, f64) -> bool) = match self.need {
            Need::AtMost(limit) => (format!("<= {limit}{unit}"), |value, limit| value <= limit),
            Need::Below(limit) => (format!("< {limit}{unit}"), |value, limit| value < limit),
            Need::AtLeast(limit) => (format!(">= {limit}{unit}"), |value, limit| value >= limit),
        };
        let (Need::AtMost(limit) | Need::Below(limit) | Need::AtLeast(limit)) = self.need;
        let (word, measured) = match (self.value)(samples) {
            None => ("none", "not measured".to_owned()),
            Some(value) if reached(value, limit) => ("PASS", format!("{value:.1}{unit}")),
            Some(value) => ("MISS", format!("{value:.1}{unit}")),
        };
        vec![word.to_owned(), self.what.to_owned(), goal, measured]
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::{Figures, Sample};
    use super::*;
    use std::time::Duration;

    fn samples(ours: u64, theirs: u64) -> Samples {
        let mut samples = Samples::default();
        for (subject, launcher, time) in [
            (Subject::Bare, Launcher::None, 1),
            (Subject::Native, Launcher::Ours, ours),
            (Subject::Native, Launcher::Torchrun, theirs),
        ] {
            let time = Some(Duration::from_millis(time));
            let figures = Figures { first_line: time, total: time, ..Figures::default() };
            samples.add(Sample { subject, launcher, turn: 0, figures, steady: true });
        }
        samples
    }

    #[test]
    fn a_goal_is_met_missed_or_not_measured() {
        let good = markdown(&samples(20, 2000));
        assert!(good.contains("2 PASS, 0 MISS, 4 not measured"), "{good}");
        assert!(good.contains("19.0 ms") && good.contains("100.0x"), "{good}");
        let bad = markdown(&samples(60, 600));
        assert!(bad.contains("0 PASS, 2 MISS, 4 not measured"), "{bad}");
    }
}
