//! What was measured, sample by sample, and its table.

use crate::bench::spread::Spread;
use std::fmt::{self, Write};
use std::time::Duration;

/// Who started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    Ours,
    Torchrun,
    /// The program by itself.
    None,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "ours",
            Self::Torchrun => "torchrun",
            Self::None => "none",
        })
    }
}

/// What was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// The native program without a launcher.
    Bare,
    Native,
    Python,
    /// A native program that fails once.
    Restart,
    /// So many ranks of the native program.
    Many(usize),
    /// The launcher's memory beside so many sleeping ranks.
    Memory(usize),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bare => f.write_str("native program alone"),
            Self::Native => f.write_str("native program"),
            Self::Python => f.write_str("Python script"),
            Self::Restart => f.write_str("restart"),
            Self::Many(world) => write!(f, "{world} ranks"),
            Self::Memory(world) => write!(f, "memory beside {world} ranks"),
        }
    }
}

/// What one run gave; which of them depends on the subject.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Figures {
    pub(crate) first_line: Option<Duration>,
    pub(crate) total: Option<Duration>,
    pub(crate) restart: Option<Duration>,
    pub(crate) pss: Option<u64>,
}

/// A kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    FirstLine,
    Total,
    Restart,
    Pss,
}

impl Kind {
    const ALL: [Self; 4] = [Self::FirstLine, Self::Total, Self::Restart, Self::Pss];

    fn name(self) -> &'static str {
        match self {
            Self::FirstLine => "first line",
            Self::Total => "total",
            Self::Restart => "failure to first line",
            Self::Pss => "PSS",
        }
    }

    fn unit(self) -> &'static str {
        if self == Self::Pss { "MiB" } else { "ms" }
    }

    /// In its unit.
    fn of(self, figures: &Figures) -> Option<f64> {
        match self {
            Self::FirstLine => figures.first_line.map(milliseconds),
            Self::Total => figures.total.map(milliseconds),
            Self::Restart => figures.restart.map(milliseconds),
            Self::Pss => figures.pss.map(|bytes| bytes as f64 / f64::from(1 << 20)),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// One run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) subject: Subject,
    pub(crate) launcher: Launcher,
    pub(crate) turn: usize,
    pub(crate) figures: Figures,
    /// The machine was quiet when it began.
    pub(crate) steady: bool,
}

/// All runs, and what failed.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    samples: Vec<Sample>,
    failures: Vec<String>,
}

impl Samples {
    pub(crate) fn add(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// Keeps what failed, each once.
    pub(crate) fn fail(&mut self, failure: String) {
        let failure = failure.lines().next().unwrap_or_default().to_owned();
        if !self.failures.contains(&failure) {
            self.failures.push(failure);
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter()
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = &str> {
        self.failures.iter().map(String::as_str)
    }

    /// The spread of a kind of figure; `None` if there is no sample.
    pub(crate) fn spread(&self, subject: Subject, launcher: Launcher, kind: Kind) -> Option<Spread> {
        let of = self.samples.iter().filter(|s| (s.subject, s.launcher) == (subject, launcher));
        Spread::of(of.filter_map(|sample| kind.of(&sample.figures)).collect())
    }

    /// Every subject that was measured, in the order of the first sample.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        let mut subjects = Vec::new();
        for sample in &self.samples {
            if !subjects.contains(&sample.subject) {
                subjects.push(sample.subject);
            }
        }
        subjects
    }

    /// The figures, with a heading, a row for each subject and kind.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![["what", "figure", "ours", "torchrun", "ratio"].map(str::to_owned).to_vec()];
        for subject in self.subjects() {
            for kind in Kind::ALL {
                let [ours, theirs, bare] = [Launcher::Ours, Launcher::Torchrun, Launcher::None]
                    .map(|launcher| self.spread(subject, launcher, kind));
                let (Some(ours), theirs) = (ours.or(bare), theirs) else { continue };
                let ratio =
                    theirs.map_or("-".to_owned(), |theirs| format!("{:.1}x", theirs.median / ours.median));
                let theirs = theirs.map_or("-".to_owned(), |theirs| cell(theirs, kind));
                rows.push(vec![subject.to_string(), kind.name().to_owned(), cell(ours, kind), theirs, ratio]);
            }
        }
        rows
    }

    /// Every sample, one a line.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("what,launcher,turn,first_line_ms,total_ms,restart_ms,pss_mib,steady\n");
        for sample in &self.samples {
            let figures =
                Kind::ALL.map(|kind| kind.of(&sample.figures).map_or(String::new(), |v| format!("{v:.3}")));
            let Sample { subject, launcher, turn, steady, .. } = sample;
            let _ = writeln!(text, "{subject},{launcher},{turn},{},{steady}", figures.join(","));
        }
        text
    }
}

fn cell(spread: Spread, kind: Kind) -> String {
    format!("{:.1} {} ({:.1} to {:.1})", spread.median, kind.unit(), spread.least, spread.most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_both_launchers_and_their_ratio() {
        let mut samples = Samples::default();
        for (launcher, total) in [(Launcher::Ours, 10), (Launcher::Torchrun, 25)] {
            let figures = Figures { total: Some(Duration::from_millis(total)), ..Figures::default() };
            samples.add(Sample { subject: Subject::Native, launcher, turn: 0, figures, steady: true });
        }
        let row = &samples.rows()[1];
        assert_eq!(row[0..2], ["native program", "total"]);
        assert_eq!(row[4], "2.5x");
        assert!(samples.csv().ends_with("native program,torchrun,0,,25.000,,,true\n"), "{}", samples.csv());
    }
}
