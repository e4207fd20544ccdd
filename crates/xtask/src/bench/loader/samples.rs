//! What was measured, run by run, and its table.

use super::line::Line;
use crate::bench::tally::median;
use anyhow::ensure;
use std::fmt::{self, Write};

/// Means of batches differ by what is random in them, but not by a missing step.
const MEAN_TOLERANCE: f64 = 0.2;

/// Who loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    Ours,
    /// torchvision's transforms on PIL images, as most programs do.
    TorchPil,
    /// Bytes and tensors only.
    TorchTensor,
}

impl Contender {
    const ALL: [Self; 3] = [Self::Ours, Self::TorchPil, Self::TorchTensor];
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "ours",
            Self::TorchPil => "torch",
            Self::TorchTensor => "torch without PIL",
        })
    }
}

/// What is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// CIFAR-10's binary files: crop with padding, flip, normalise.
    Cifar,
    /// A folder of JPEG files: random resized crop to 224, flip, normalise.
    Jpeg,
}

impl Subject {
    pub(crate) const ALL: [Self; 2] = [Self::Cifar, Self::Jpeg];

    /// On the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cifar => "cifar",
            Self::Jpeg => "jpeg",
        }
    }

    /// Of a batch: samples, channels, rows, columns.
    pub(crate) fn shape(self) -> [u64; 4] {
        match self {
            Self::Cifar => [128, 3, 32, 32],
            Self::Jpeg => [32, 3, 224, 224],
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cifar => "CIFAR, augmented",
            Self::Jpeg => "JPEG folder, random resized crop",
        })
    }
}

/// One run.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) subject: Subject,
    pub(crate) contender: Contender,
    pub(crate) turn: usize,
    pub(crate) line: Line,
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

    /// An error if a mean is far from what the others found.
    pub(crate) fn check_mean(&self, subject: Subject, contender: Contender, mean: f64) -> anyhow::Result<()> {
        let others = self.all().filter(|s| s.subject == subject && s.contender != contender);
        if let Some(other) = others.last() {
            let (expected, who) = (other.line.mean, other.contender);
            ensure!(
                (mean - expected).abs() <= MEAN_TOLERANCE,
                "a batch's mean is {mean:.3}, but {expected:.3} by {who}: one of them leaves out a step"
            );
        }
        Ok(())
    }

    /// Median, least and most samples a second.
    pub(crate) fn rates(&self, subject: Subject, contender: Contender) -> Option<[f64; 3]> {
        let of = self.all().filter(|s| (s.subject, s.contender) == (subject, contender));
        let rates: Vec<_> = of.map(|sample| sample.line.samples_per_s).collect();
        let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let most = rates.iter().copied().fold(0.0, f64::max);
        Some([median(rates)?, least, most])
    }

    /// How many times as fast ours is.
    pub(crate) fn ratio(&self, subject: Subject, peer: Contender) -> Option<f64> {
        Some(self.rates(subject, Contender::Ours)?[0] / self.rates(subject, peer)?[0])
    }

    /// The figures, with a heading.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![["what", "loader", "samples/s", "ratio"].map(str::to_owned).to_vec()];
        for (subject, contender) in
            Subject::ALL.into_iter().flat_map(|s| Contender::ALL.into_iter().map(move |c| (s, c)))
        {
            let Some([middle, least, most]) = self.rates(subject, contender) else { continue };
            let ratio = self.ratio(subject, contender).map_or("-".to_owned(), |ratio| format!("{ratio:.1}x"));
            let rates = format!("{middle:.0} ({least:.0} to {most:.0})");
            rows.push(vec![subject.to_string(), contender.to_string(), rates, ratio]);
        }
        rows
    }

    /// Every run, one a line.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("what,loader,turn,samples_per_s,mean,steady\n");
        for Sample { subject, contender, turn, line, steady } in &self.samples {
            let (name, rate, mean) = (subject.name(), line.samples_per_s, line.mean);
            let _ = writeln!(text, "{name},{contender},{turn},{rate:.1},{mean:.4},{steady}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_medians_and_ratios() {
        let mut samples = Samples::default();
        for (contender, rate) in
            [(Contender::Ours, 300.0), (Contender::TorchPil, 10.0), (Contender::TorchPil, 20.0)]
        {
            let line = Line { samples_per_s: rate, shape: Subject::Cifar.shape().to_vec(), mean: -0.2 };
            samples.add(Sample { subject: Subject::Cifar, contender, turn: 0, line, steady: true });
        }
        let rows = samples.rows();
        assert_eq!(rows[1][2..], ["300 (300 to 300)", "1.0x"]);
        assert_eq!(rows[2][1..], ["torch", "15 (10 to 20)", "20.0x"]);
        assert_eq!(rows.len(), 3);
        assert!(samples.csv().ends_with("cifar,torch,0,20.0,-0.2000,true\n"), "{}", samples.csv());
    }

    #[test]
    fn a_batch_that_is_not_normalised_is_found_out() {
        let mut samples = Samples::default();
        let line = Line { samples_per_s: 1.0, shape: vec![], mean: -0.2 };
        let (subject, contender) = (Subject::Cifar, Contender::TorchPil);
        samples.add(Sample { subject, contender, turn: 0, line, steady: true });
        assert!(samples.check_mean(subject, Contender::Ours, -0.15).is_ok());
        assert!(samples.check_mean(Subject::Jpeg, Contender::Ours, 9.0).is_ok());
        let error = samples.check_mean(subject, Contender::Ours, 0.45).unwrap_err().to_string();
        assert!(error.contains("mean is 0.450, but -0.200 by torch"), "{error}");
    }
}
