//! Who takes part: the programs, the data they read, and one run of one of them.

use super::line::{self, Line};
use super::samples::{Contender, Subject};
use crate::bench::{child, peers};
use crate::{python, workspace};
use anyhow::{Context, ensure};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Ours: a program of `drumline-zoo`, and its subcommand. Then come `cifar|jpeg --data DIR --workers N --batch-size B
/// --seconds S`, as for the peer.
const OURS: (&str, &str) = ("drumline-train", "bench-loader");
/// For the start of a Python program and the making of data, beside what is measured.
const MARGIN: Duration = Duration::from_secs(180);

#[derive(Debug)]
pub(crate) struct Contest {
    ours: Option<PathBuf>,
    python: PathBuf,
    script: PathBuf,
    data: PathBuf,
    workers: usize,
    seconds: f64,
    missing: Vec<String>,
}

impl Contest {
    /// What cannot be built is left out, and told.
    pub(crate) fn build(workers: usize, seconds: f64) -> anyhow::Result<Self> {
        let mut contest = Self {
            ours: None,
            python: python::with_torch()?,
            script: workspace::root().join("bench/peers/loader.py"),
            data: workspace::root().join("bench/.peers/loader-data"),
            workers,
            seconds,
            missing: Vec::new(),
        };
        match peers::build_package("drumline-zoo", OURS.0) {
            Ok(program) => contest.ours = Some(program),
            Err(error) => {
                eprintln!("ours is left out: {error:#}");
                contest.missing.push(format!("ours: {error:#}"));
            }
        }
        contest.make_data()?;
        Ok(contest)
    }

    pub(crate) fn missing(&self) -> &[String] {
        &self.missing
    }

    pub(crate) fn contenders(&self, subject: Subject) -> Vec<Contender> {
        let peers = match subject {
            Subject::Cifar => &[Contender::TorchPil, Contender::TorchTensor][..],
            Subject::Jpeg => &[Contender::TorchPil],
        };
        self.ours.iter().map(|_| Contender::Ours).chain(peers.iter().copied()).collect()
    }

    /// Runs one of them and holds the batch it says it made against what it must be.
    pub(crate) fn measure(&self, subject: Subject, contender: Contender) -> anyhow::Result<Line> {
        let command = self.command(subject, contender).context("it was not built")?;
        let printed = child::run(command, MARGIN + Duration::from_secs_f64(self.seconds))?;
        let line = line::parse(&printed.stdout)?;
        let expected = subject.shape();
        ensure!(line.shape == expected, "expected batches of {expected:?}, got {:?}", line.shape);
        Ok(line)
    }

    fn command(&self, subject: Subject, contender: Contender) -> Option<Command> {
        let mut command = match contender {
            Contender::Ours => {
                let mut command = Command::new(self.ours.as_ref()?);
                command.args([OURS.1, subject.name()]);
                command
            }
            Contender::TorchPil | Contender::TorchTensor => {
                let mut command = Command::new(&self.python);
                command.args(["-W", "ignore"]).arg(&self.script).arg(subject.name());
                command
            }
        };
        if contender == Contender::TorchTensor {
            command.args(["--manner", "tensor"]);
        }
        command.arg("--data").arg(&self.data);
        let (workers, batch_size) = (self.workers.to_string(), subject.shape()[0].to_string());
        command.args(["--workers", &workers, "--batch-size", &batch_size]);
        command.args(["--seconds", &self.seconds.to_string()]);
        Some(command)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn contest(ours: Option<&str>) -> Contest {
        Contest {
            ours: ours.map(PathBuf::from),
            python: "python".into(),
            script: "loader.py".into(),
            data: "data".into(),
            workers: 2,
            seconds: 5.0,
            missing: Vec::new(),
        }
    }

    fn words(command: &Command) -> String {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn both_sides_are_asked_for_the_same() {
        let contest = contest(Some("drumline-train"));
        let asked = |contender| words(&contest.command(Subject::Cifar, contender).unwrap());
        let same = "--data data --workers 2 --batch-size 128 --seconds 5";
        assert_eq!(asked(Contender::Ours), format!("drumline-train bench-loader cifar {same}"));
        assert_eq!(asked(Contender::TorchPil), format!("python -W ignore loader.py cifar {same}"));
        assert_eq!(
            asked(Contender::TorchTensor),
            format!("python -W ignore loader.py cifar --manner tensor {same}")
        );
    }

    #[test]
    fn without_ours_the_peers_are_still_measured() {
        assert_eq!(contest(None).contenders(Subject::Jpeg), [Contender::TorchPil]);
        assert!(contest(None).command(Subject::Jpeg, Contender::Ours).is_none());
        assert_eq!(contest(Some("x")).contenders(Subject::Cifar).len(), 3);
    }

    /// A program that stands in for ours and prints `line`.
    fn measured(name: &str, line: &str) -> anyhow::Result<Line> {
        use std::os::unix::fs::PermissionsExt;
        let program = std::env::temp_dir().join(format!("xtask-loader-{name}-{}", std::process::id()));
        std::fs::write(&program, format!("#!/bin/sh\necho '{line}'\n"))?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        let measured = contest(program.to_str()).measure(Subject::Cifar, Contender::Ours);
        std::fs::remove_file(program)?;
        measured
    }

    #[test]
    fn a_batch_of_another_shape_is_refused() {
        let good = r#"{"samples_per_s":9,"shape":[128,3,32,32],"mean":0}"#;
        assert_eq!(measured("good", good).unwrap().samples_per_s, 9.0);
        let error = measured("bad", &good.replace("128", "1")).unwrap_err().to_string();
        assert!(error.contains("expected batches of [128, 3, 32, 32], got [1, 3, 32, 32]"), "{error}");
    }
}
