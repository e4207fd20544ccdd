//! Who loads, what each must print, and the check that nobody leaves out a step.

use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, TallyOf, UnitOf};
use crate::bench::json_line::JsonLine;
use crate::bench::{build, child};
use crate::{python, workspace};
use anyhow::{Context, ensure};
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// For the start of a Python program and the making of data, beside what is measured.
const MARGIN: Duration = Duration::from_secs(180);
/// Means of batches differ by what is random in them, but not by a missing step.
const MEAN_TOLERANCE: f64 = 0.2;

/// Who loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loader {
    Ours,
    /// torchvision's transforms on PIL images, as most programs do.
    TorchPil,
    /// Bytes and tensors only.
    TorchTensor,
}

pub(crate) const OURS: Contender<Loader> = Contender::new("ours", Loader::Ours);
pub(crate) const TORCH: Contender<Loader> = Contender::new("torch", Loader::TorchPil);
const TORCH_TENSOR: Contender<Loader> = Contender::new("torch without PIL", Loader::TorchTensor);
pub(crate) const ALL: [Contender<Loader>; 3] = [OURS, TORCH, TORCH_TENSOR];

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
    fn shape(self) -> [f64; 4] {
        match self {
            Self::Cifar => [128.0, 3.0, 32.0, 32.0],
            Self::Jpeg => [32.0, 3.0, 224.0, 224.0],
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

/// What a run said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) samples_per_s: f64,
    pub(crate) shape: Vec<f64>,
    pub(crate) mean: f64,
}

/// The contest, with the programs and the data that they read.
#[derive(Debug)]
pub(crate) struct Loading {
    ours: PathBuf,
    python: PathBuf,
    script: PathBuf,
    data: PathBuf,
    workers: usize,
    seconds: f64,
}

impl Contest for Loading {
    type Case = Subject;
    type Kind = Loader;
    type Figures = Line;

    fn contenders(&self, subject: Subject) -> Vec<Contender<Loader>> {
        match subject {
            Subject::Cifar => ALL.to_vec(),
            Subject::Jpeg => vec![OURS, TORCH],
        }
    }

    /// Runs one of them and holds the batch it says it made against what it must be.
    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Line> {
        let command = self.command(unit.case, unit.contender.kind);
        let printed = child::run(command, MARGIN + Duration::from_secs_f64(self.seconds))?;
        let line =
            parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))?;
        let expected = unit.case.shape();
        ensure!(line.shape == expected, "expected batches of {expected:?}, got {:?}", line.shape);
        Ok(line)
    }

    /// Returns an error if a mean is far from what the others found.
    fn check(&self, unit: &UnitOf<Self>, line: &Line, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        let is_other = |other: &UnitOf<Self>| other.case == unit.case && other.contender != unit.contender;
        if let Some(other) = tally.all().filter(|turn| is_other(&turn.unit)).last() {
            let (mean, expected, who) = (line.mean, other.figures.mean, other.unit.contender);
            ensure!(
                (mean - expected).abs() <= MEAN_TOLERANCE,
                "a batch's mean is {mean:.3}, but {expected:.3} by {who}: one of them leaves out a step"
            );
        }
        Ok(())
    }
}

impl Loading {
    pub(crate) fn build(workers: usize, seconds: f64) -> anyhow::Result<Self> {
        let [ours] = build::release([build::BENCHED])?;
        let contest = Self {
            ours,
            python: python::with_torch()?,
            script: workspace::root().join("bench/peers/loader.py"),
            data: build::output_folder()?.join("loader-data"),
            workers,
            seconds,
        };
        contest.make_data()?;
        Ok(contest)
    }

    fn command(&self, subject: Subject, loader: Loader) -> Command {
        let mut command = Command::new(if loader == Loader::Ours { &self.ours } else { &self.python });
        match loader {
            Loader::Ours => command.args(["loader", subject.name()]),
            Loader::TorchPil | Loader::TorchTensor => {
                command.args(["-W", "ignore"]).arg(&self.script).arg(subject.name())
            }
        };
        if loader == Loader::TorchTensor {
            command.args(["--manner", "tensor"]);
        }
        command.arg("--data").arg(&self.data);
        let (workers, batch_size) = (self.workers.to_string(), subject.shape()[0].to_string());
        command.args(["--workers", &workers, "--batch-size", &batch_size]);
        command.args(["--seconds", &self.seconds.to_string()]);
        command
    }

    fn make_data(&self) -> anyhow::Result<()> {
        if self.data.is_dir() {
            return Ok(());
        }
        eprintln!("making data in {} ...", self.data.display());
        // Renamed when whole, so that half of it is never measured.
        let part = self.data.with_extension("part");
        let mut command = Command::new(&self.python);
        command.arg(&self.script).args(["make", "--out"]).arg(&part);
        let printed = child::run(command, MARGIN).context("cannot make the data")?;
        eprint!("{}", printed.stderr);
        std::fs::rename(&part, &self.data).with_context(|| format!("cannot keep {}", self.data.display()))
    }
}

fn parse(stdout: &str) -> anyhow::Result<Line> {
    let line = JsonLine::find(stdout)?;
    let samples_per_s = line.number("samples_per_s")?;
    ensure!(samples_per_s > 0.0, "no samples");
    Ok(Line { samples_per_s, shape: line.numbers("shape")?, mean: line.number("mean")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};

    fn contest(ours: &str) -> Loading {
        let [ours, python, script, data] = [ours, "python", "loader.py", "data"].map(PathBuf::from);
        Loading { ours, python, script, data, workers: 2, seconds: 5.0 }
    }

    #[test]
    fn both_sides_are_asked_for_the_same() {
        let asked = |loader| {
            let command = contest("ours").command(Subject::Cifar, loader);
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let same = "--data data --workers 2 --batch-size 128 --seconds 5";
        assert_eq!(asked(Loader::Ours), format!("ours loader cifar {same}"));
        assert_eq!(asked(Loader::TorchPil), format!("python -W ignore loader.py cifar {same}"));
        let tensor = format!("python -W ignore loader.py cifar --manner tensor {same}");
        assert_eq!(asked(Loader::TorchTensor), tensor);
    }

    /// A program that stands in for ours and prints `line`.
    fn measured(name: &str, line: &str) -> anyhow::Result<Line> {
        use std::os::unix::fs::PermissionsExt;
        let program = std::env::temp_dir().join(format!("xtask-loader-{name}-{}", std::process::id()));
        std::fs::write(&program, format!("#!/bin/sh\necho '{line}'\n"))?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        let unit = Unit { case: Subject::Cifar, contender: OURS };
        let measured = contest(program.to_str().context("a path that is not UTF-8")?).measure(&unit);
        std::fs::remove_file(program)?;
        measured
    }

    #[test]
    fn a_batch_of_another_shape_is_refused() {
        let good = r#"{"samples_per_s":9,"shape":[128,3,32,32],"mean":0}"#;
        assert_eq!(measured("good", good).unwrap().samples_per_s, 9.0);
        let error = measured("bad", &good.replace("128", "1")).unwrap_err().to_string();
        assert!(error.contains("expected batches of [128.0, 3.0"), "{error}");
    }

    #[test]
    fn a_line_must_be_whole() {
        let good =
            "building\n{\"samples_per_s\":1234.5,\"shape\":[128,3],\"mean\":-0.2,\"with\":\"torch\"}\n";
        let line = Line { samples_per_s: 1234.5, shape: vec![128.0, 3.0], mean: -0.2 };
        assert_eq!(parse(good).unwrap(), line);
        for (bad, why) in [
            ("{\"samples_per_s\":1}", "no list `shape`"),
            ("{\"samples_per_s\":1,\"shape\":[]}", "no number `mean`"),
            ("{\"samples_per_s\":0,\"shape\":[],\"mean\":0}", "no samples"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_batch_that_is_not_normalised_is_found_out() {
        let mut tally = Tally::default();
        let line = |mean| Line { samples_per_s: 1.0, shape: Vec::new(), mean };
        let unit = |case, contender| Unit { case, contender };
        let figures = line(-0.2);
        tally.add(Turn { unit: unit(Subject::Cifar, TORCH), block: 0, figures, steady: true });
        let check = |case, mean| contest("ours").check(&unit(case, OURS), &line(mean), &tally);
        assert!(check(Subject::Cifar, -0.15).is_ok() && check(Subject::Jpeg, 9.0).is_ok());
        let error = check(Subject::Cifar, 0.45).unwrap_err().to_string();
        assert!(error.contains("mean is 0.450, but -0.200 by torch"), "{error}");
    }
}
