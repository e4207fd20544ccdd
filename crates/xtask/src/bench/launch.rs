//! `cargo xtask bench launch`: how long the launcher takes, beside torchrun.
//!
//! ```text
//!   turn n: native, python, restart × (ours, torchrun), order swapped each turn; the bare program
//!   then:   500 ranks that do nothing; memory beside 100 ranks that sleep
//! ```
//! The programs say when they begin by the clock that we read before starting the launcher, and every run is checked:
//! all ranks must have said so, once for each attempt.

mod line;
mod memory;
mod samples;
mod unit;
mod verdicts;

use super::{machine, quiet, report};
use samples::{Launcher, Sample, Samples, Subject};
use std::time::Duration;
use unit::Contest;

/// Compare the launcher with torchrun, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct LaunchArgs {
    /// How often the two take turns
    #[arg(long, default_value_t = 20)]
    turns: usize,
    /// Longest wait of a run for a quiet machine, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Ranks of the large job.
const MANY: usize = 500;
/// Ranks beside which the launcher's memory is read.
const SLEEPERS: usize = 100;
/// How often the two are repeated: they are far from their goals' edge or say so.
const REPEATS: usize = 3;

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let mut session = Session {
        contest: Contest::build()?,
        patience: Duration::from_secs(args.patience),
        samples: Samples::default(),
    };
    for turn in 0..args.turns {
        eprintln!("turn {} of {}", turn + 1, args.turns);
        session.take_turn(turn);
    }
    for repeat in 0..REPEATS.min(args.turns) {
        eprintln!("{MANY} ranks, and memory beside {SLEEPERS}: {} of {REPEATS}", repeat + 1);
        session.take_large(repeat);
    }
    let text = session.markdown(args.turns);
    if args.save {
        report::save("launch", &text, &session.samples.csv())?;
    }
    print!("{text}");
    Ok(())
}

struct Session {
    contest: Contest,
    patience: Duration,
    samples: Samples,
}

impl Session {
    fn take_turn(&mut self, turn: usize) {
        let mut launchers = [Launcher::Ours, Launcher::Torchrun];
        if turn % 2 == 1 {
            launchers.reverse();
        }
        self.take(turn, Subject::Bare, Launcher::None);
        for subject in [Subject::Native, Subject::Python, Subject::Restart] {
            launchers.iter().for_each(|launcher| self.take(turn, subject, *launcher));
        }
    }

    fn take_large(&mut self, repeat: usize) {
        self.take(repeat, Subject::Many(MANY), Launcher::Ours);
        for launcher in [Launcher::Ours, Launcher::Torchrun] {
            self.take(repeat, Subject::Memory(SLEEPERS), launcher);
        }
    }

    fn take(&mut self, turn: usize, subject: Subject, launcher: Launcher) {
        let steady = quiet::wait(self.patience);
        match self.contest.measure(subject, launcher) {
            Ok(figures) => self.samples.add(Sample { subject, launcher, turn, figures, steady }),
            Err(error) => {
                let failure = format!("{subject} by {launcher}: {error:#}");
                eprintln!("failed: {failure}");
                self.samples.fail(failure);
            }
        }
    }

    fn markdown(&self, turns: usize) -> String {
        let mut text = String::from("# Launcher: ours and torchrun in one run\n\n");
        let unsteady = self.samples.all().filter(|sample| !sample.steady).count();
        let about = [
            machine::describe(),
            format!("peer: torchrun of torch {}", crate::libtorch::VERSION),
            format!(
                "2 ranks, {turns} turns, the order swapped each turn; a native program and a Python script that do nothing"
            ),
            format!(
                "{unsteady} of {} samples were taken while the machine was not quiet",
                self.samples.all().count()
            ),
        ];
        about.iter().for_each(|line| text += &format!("- {line}\n"));
        self.samples.failures().for_each(|line| text += &format!("- failed: {line}\n"));
        text += "\nMedian (least to most). *First line*: from the launcher's start until the last rank has begun. \
                 *Total*: until the launcher has ended.\n\n";
        text += &report::table(&self.samples.rows());
        text + &verdicts::markdown(&self.samples)
    }
}
