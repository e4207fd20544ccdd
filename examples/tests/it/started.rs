//! The training examples, started in each of the ways that they are made for, on a small data set; and what they print.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use drumline_launch::{LocalJob, Output};
use drumline_zoo::synth_cifar;
use tempfile::TempDir;

pub(super) const LONGEST: Duration = Duration::from_secs(240);

/// Pictures for one test.
pub(super) struct Data(TempDir);

impl Data {
    pub(super) fn new(train: usize, test: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        synth_cifar::write(folder.path(), train, test, 1).unwrap();
        Self(folder)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// `words` split at spaces, behind the data set's place.
    pub(super) fn args(&self, words: &str) -> Vec<String> {
        let data = ["--data".to_owned(), self.path().display().to_string()];
        data.into_iter().chain(words.split_whitespace().map(str::to_owned)).collect()
    }
}

/// What a command says when it ends well.
pub(super) fn output_of(command: &mut Command) -> String {
    let command = command.env_remove("RANK").env("OMP_NUM_THREADS", "1");
    let output = command.output().unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    stdout
}

/// What a program says that is run by itself.
pub(super) fn alone(program: &str, args: Vec<String>) -> String {
    output_of(Command::new("timeout").arg(LONGEST.as_secs().to_string()).arg(program).args(args))
}

/// What each rank of a job says.
pub(super) fn as_ranks(ranks: usize, program: &str, args: Vec<String>) -> Vec<String> {
    let job = LocalJob::new(ranks, program, args).env("OMP_NUM_THREADS", "1").output(Output::Capture);
    let report = job.deadline(LONGEST).start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    report.ranks.iter().map(|rank| rank.stdout_text().into_owned()).collect()
}

/// The command `drumline`, which a test of the whole workspace builds beside the examples.
pub(super) fn drumline() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_BIN_EXE_launch_try")).with_file_name("drumline");
    if !beside.is_file() {
        rank_test::skipped("the command `drumline` has not been built; try cargo build -p drumline-cli");
        return None;
    }
    Some(beside)
}

/// What a run must have said: each rank its line, and one of them the beginning, a falling loss for each epoch, and the end.
pub(super) fn check(said: &str, ranks: usize, epochs: usize) {
    for rank in 0..ranks {
        let init = format!("global rank: {rank} ==");
        assert_eq!(said.matches(&init).count(), 1, "{init}: {said}");
    }
    assert_eq!(said.matches("[init] == local rank: ").count(), ranks, "{said}");
    for words in ["=======  Training  =======", "=======  Training Finished  ======="] {
        assert_eq!(said.matches(words).count(), 1, "{words}: {said}");
    }
    check_steps(said, epochs);
}

/// The steps' lines alone: one an epoch, where an epoch is shorter than the way from line to line.
pub(super) fn check_steps(said: &str, epochs: usize) {
    let losses = numbers_after(said, "| loss: ");
    assert_eq!((losses.len(), said.matches("== step: [").count()), (epochs, epochs), "{said}");
    assert!(losses.last() < losses.first(), "the loss falls: {said}");
}

/// The number behind each place where `words` stand.
pub(super) fn numbers_after(said: &str, words: &str) -> Vec<f64> {
    let number = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        text[..end].parse().unwrap_or_else(|_| panic!("no number after `{words}`: {text}"))
    };
    said.split(words).skip(1).map(number).collect()
}
