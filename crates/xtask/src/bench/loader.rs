//! `cargo xtask bench loader`: samples a second, ours beside torch's DataLoader with as many worker processes.
//!
//! ```text
//!   data, made once ─▶ turn n: cifar, jpeg × (ours, torch), order rotated each turn ─▶ medians ─▶ ratio ─▶ goals
//! ```
//! Both sides read the same files and print one JSON line, `{"samples_per_s", "shape", "mean"}`: the rate at which batches
//! reach the caller, a batch's shape and the mean of its values. Every run is held against what the shape must be, and the
//! means of both sides against each other, so that nobody is fast by leaving out a step.

mod contest;
mod line;
mod samples;
mod verdicts;

use super::{machine, quiet, report, schedule};
use contest::Contest;
use samples::{Sample, Samples, Subject};
use std::time::Duration;

/// Compare the loader with torch's DataLoader, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct LoaderArgs {
    /// How often all take turns
    #[arg(long, default_value_t = 7)]
    turns: usize,
    /// Seconds measured in each run, after its warm-up
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Threads of ours, worker processes of torch
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Longest wait of a run for a quiet machine, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// One short turn, to see that everything works
    #[arg(long)]
    quick: bool,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

impl LoaderArgs {
    fn turns(&self) -> usize {
        if self.quick { 1 } else { self.turns }
    }

    fn seconds(&self) -> f64 {
        if self.quick { self.seconds.min(1.0) } else { self.seconds }
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(if self.quick { self.patience.min(2) } else { self.patience })
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &LoaderArgs) -> anyhow::Result<()> {
    let contest = Contest::build(args.workers, args.seconds())?;
    let mut samples = Samples::default();
    contest.missing().iter().for_each(|what| samples.fail(what.clone()));
    for turn in 0..args.turns() {
        eprintln!("turn {} of {}", turn + 1, args.turns());
        for subject in Subject::ALL {
            take_turn(&contest, args, (subject, turn), &mut samples);
        }
    }
    let text = markdown(args, &samples);
    if args.save {
        let name = if args.quick { "loader-quick" } else { "loader" };
        report::save(name, &text, &samples.csv())?;
    }
    print!("{text}");
    Ok(())
}

fn take_turn(contest: &Contest, args: &LoaderArgs, (subject, turn): (Subject, usize), samples: &mut Samples) {
    let contenders = contest.contenders(subject);
    for place in schedule::order(contenders.len(), turn) {
        let contender = contenders[place];
        let steady = quiet::wait(args.patience());
        let measured = contest.measure(subject, contender).and_then(|line| {
            samples.check_mean(subject, contender, line.mean)?;
            Ok(line)
        });
        match measured {
            Ok(line) => samples.add(Sample { subject, contender, turn, line, steady }),
            Err(error) => {
                let failure = format!("{subject} by {contender}: {error:#}");
                eprintln!("failed: {failure}");
                samples.fail(failure);
            }
        }
    }
}

fn markdown(args: &LoaderArgs, samples: &Samples) -> String {
    let mut text = String::from("# Loader: ours and torch's DataLoader in one run\n\n");
    let (all, unsteady) = (samples.all().count(), samples.all().filter(|sample| !sample.steady).count());
    let mut about = vec![
        machine::describe(),
        format!("peer: DataLoader of torch {}", crate::libtorch::VERSION),
        format!(
            "{} workers, {} turns of {} s each, the order rotated each turn",
            args.workers,
            args.turns(),
            args.seconds()
        ),
        format!("{unsteady} of {all} samples were taken while the machine was not quiet"),
    ];
    if args.quick {
        about.insert(0, "**quick run: shows that everything works; its figures are no result**".to_owned());
    }
    about.iter().for_each(|line| text += &format!("- {line}\n"));
    samples.failures().for_each(|line| text += &format!("- failed: {line}\n"));
    text += "\nSamples a second, median (least to most). *Ratio*: ours to that one.\n\n";
    text += &report::table(&samples.rows());
    text + &verdicts::markdown(samples)
}
