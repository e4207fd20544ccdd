//! The goals of the launcher, and what the turns say about each.

use super::figures::Kind;
use super::start::{BARE, Launcher, OURS, Starts, Subject, TORCHRUN};
use crate::bench::contender::Contender;
use crate::bench::contest::TallyOf;
use crate::bench::need::Need;
use crate::bench::report::{self, row};

/// A goal, with how its value is computed; `None` where something was not measured.
struct Goal {
    what: &'static str,
    unit: &'static str,
    need: Need,
    value: fn(&TallyOf<Starts>) -> Option<f64>,
}

const GOALS: [Goal; 6] = [
    Goal {
        what: "the launcher's own share of a native program's run (total less the bare program)",
        unit: " ms",
        need: Need::Below(50.0),
        value: |tally| {
            let total = median(tally, Subject::Native, OURS, Kind::Total)?;
            Some(total - median(tally, Subject::Bare, BARE, Kind::Total)?)
        },
    },
    Goal {
        what: "native program's first line, against torchrun",
        unit: "x",
        need: Need::AtLeast(20.0),
        value: |tally| times_faster(tally, Subject::Native),
    },
    Goal {
        what: "Python script's first line, against torchrun",
        unit: "x",
        need: Need::AtLeast(1.0),
        value: |tally| times_faster(tally, Subject::Python),
    },
    Goal {
        what: "restart of a native program, failure to first line",
        unit: " ms",
        need: Need::AtMost(1000.0),
        value: |tally| median(tally, Subject::Restart, OURS, Kind::Restart),
    },
    Goal {
        what: "500 ranks start and end",
        unit: " ms",
        need: Need::AtMost(5000.0),
        value: |tally| median(tally, Subject::Many, OURS, Kind::Total),
    },
    Goal {
        what: "memory beside 100 ranks",
        unit: " MiB",
        need: Need::Below(20.0),
        value: |tally| median(tally, Subject::Memory, OURS, Kind::Pss),
    },
];

fn median(
    tally: &TallyOf<Starts>,
    subject: Subject,
    launcher: Contender<Launcher>,
    kind: Kind,
) -> Option<f64> {
    Some(super::spread(tally, subject, launcher, kind)?.median)
}

/// How much sooner the first line comes.
fn times_faster(tally: &TallyOf<Starts>, subject: Subject) -> Option<f64> {
    let theirs = median(tally, subject, TORCHRUN, Kind::FirstLine)?;
    Some(theirs / median(tally, subject, OURS, Kind::FirstLine)?)
}

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Starts>) -> String {
    let mut rows = vec![row!["", "what", "goal", "measured"]];
    rows.extend(GOALS.iter().map(|goal| goal.judge(tally)));
    report::goals(&rows)
}

impl Goal {
    fn judge(&self, tally: &TallyOf<Starts>) -> Vec<String> {
        let value = (self.value)(tally);
        let measured = value.map_or("not measured".to_owned(), |value| format!("{value:.1}{}", self.unit));
        row![self.need.word(value), self.what, self.need.shown(self.unit), measured]
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Figures;
    use super::*;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};
    use std::time::Duration;

    fn tally(ours: u64, theirs: u64) -> TallyOf<Starts> {
        let mut tally = Tally::default();
        for (case, contender, time) in
            [(Subject::Bare, BARE, 1), (Subject::Native, OURS, ours), (Subject::Native, TORCHRUN, theirs)]
        {
            let time = Some(Duration::from_millis(time));
            let figures = Figures { first_line: time, total: time, ..Figures::default() };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
        }
        tally
    }

    #[test]
    fn a_goal_is_met_missed_or_not_measured() {
        let good = section(&tally(20, 2000));
        assert!(good.contains("2 PASS, 0 MISS, 4 not measured"), "{good}");
        assert!(good.contains("19.0 ms") && good.contains("100.0x"), "{good}");
        let bad = section(&tally(60, 600));
        assert!(bad.contains("0 PASS, 2 MISS, 4 not measured"), "{bad}");
    }
}
