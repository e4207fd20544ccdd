//! `cargo xtask bench observe`: what the trainer, its callbacks and observers cost a step.
//!
//! One job of two ranks makes the same steps by turns: by a loop on `Ddp`, by a bare trainer, by one with all that `drumline train` has. So what changes on the
//! machine changes for all three.

use serde_json::Value;
use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

use super::spread::Spread;
use super::tally::median;
use super::{child, machine, peers, quiet, report};

/// Of a step's time.
const MOST_TIME: f64 = 1.01;
/// Of memory.
const MOST_BYTES: f64 = 50.0 * 1024.0 * 1024.0;
const LIMIT: Duration = Duration::from_secs(900);

/// Compare training steps with and without observers, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct ObserveArgs {
    /// Name of the network
    #[arg(long, default_value = "resnet18")]
    arch: String,
    /// Images of a rank's batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Turns of each
    #[arg(long, default_value_t = 12)]
    turns: usize,
    /// Timed steps of a turn
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Longest wait for a quiet machine, in seconds
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// What one turn printed.
#[derive(Debug)]
struct Turn {
    way: String,
    turn: usize,
    times_ms: Vec<f64>,
    gained_bytes: f64,
}

impl Turn {
    fn step_ms(&self) -> f64 {
        median(self.times_ms.clone()).unwrap_or(f64::NAN)
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &ObserveArgs) -> anyhow::Result<()> {
    let (launcher, ours) = (peers::build_ours()?, peers::build_package("drumline-zoo", "drumline-train")?);
    let folder = peers::output_folder()?.join("observed");
    let steady = quiet::wait(Duration::from_secs(args.patience));
    let mut command = Command::new(launcher);
    command.args(["run", "--standalone", "--nproc-per-node", "2"]).arg(ours).arg("bench-observe");
    command.args(["--arch", &args.arch, "--batch", &args.batch.to_string(), "--out-dir"]).arg(&folder);
    command.args(["--turns", &args.turns.to_string(), "--steps", &args.steps.to_string()]);
    command.env("OMP_NUM_THREADS", "1");
    let printed = child::run(command, LIMIT)?;
    let turns = parse(&printed.stdout)?;
    let text = markdown(&turns, args, steady);
    if args.save {
        report::save(&format!("observe-{}", args.arch), &text, &csv(&turns))?;
    }
    print!("{text}");
    Ok(())
}

fn parse(stdout: &str) -> anyhow::Result<Vec<Turn>> {
    let objects = stdout.lines().filter_map(|line| line.find("{\"").map(|start| &line[start..]));
    let turns: Vec<_> = objects.filter_map(turn).collect();
    anyhow::ensure!(!turns.is_empty(), "no turn in `{}`", stdout.trim_end());
    Ok(turns)
}

fn turn(object: &str) -> Option<Turn> {
    let value: Value = serde_json::from_str(object).ok()?;
    Some(Turn {
        way: value["way"].as_str()?.to_owned(),
        turn: value["turn"].as_u64()? as usize,
        times_ms: value["times_ms"].as_array()?.iter().filter_map(Value::as_f64).collect(),
        gained_bytes: value["gained_bytes"].as_f64()?,
    })
}

/// The ratio of two ways' steps, turn by turn.
fn ratio(turns: &[Turn], way: &str, to: &str) -> Option<Spread> {
    let find = |way: &str, turn: usize| turns.iter().find(|t| t.way == way && t.turn == turn);
    let last = turns.iter().map(|turn| turn.turn).max()?;
    let ratios = (0..=last).filter_map(|turn| Some(find(way, turn)?.step_ms() / find(to, turn)?.step_ms()));
    Spread::of(ratios.collect())
}

fn markdown(turns: &[Turn], args: &ObserveArgs, steady: bool) -> String {
    let ObserveArgs { arch, batch, steps, .. } = args;
    let mut text = String::from("# What it costs to train with the trainer, and to watch it\n\n");
    let state = if steady { "quiet" } else { "not quiet" };
    for line in [
        machine::describe(),
        format!("{arch} on 32x32 images, 2 ranks of {batch}, SGD with momentum; one thread a rank"),
        format!("{} turns of {steps} steps of each, one after another in one job, order rotated; the machine was {state} before", args.turns),
        "observed: learning-rate schedule, stop on NaN, accuracy of each step, states of ranks, lines of progress, `metrics.jsonl`, TensorBoard".to_owned(),
    ] {
        let _ = writeln!(text, "- {line}");
    }
    text += "\nMedian over turns (least to most).\n\n";
    text += &report::table(&rows(turns));
    text + "\n" + &verdicts(turns)
}

fn rows(turns: &[Turn]) -> Vec<Vec<String>> {
    let mut rows =
        vec![["", "step, ms", "to the loop by hand", "to the bare trainer"].map(str::to_owned).to_vec()];
    for (way, name) in
        [("loop", "a loop on Ddp"), ("bare", "DistTrainer, bare"), ("observed", "DistTrainer, observed")]
    {
        let times = Spread::of(turns.iter().filter(|turn| turn.way == way).map(Turn::step_ms).collect());
        let shown = |spread: Option<Spread>, digits: usize| {
            spread.map_or("-".to_owned(), |spread| spread.shown(digits))
        };
        rows.push(vec![
            name.into(),
            shown(times, 2),
            shown(ratio(turns, way, "loop"), 4),
            shown(ratio(turns, way, "bare"), 4),
        ]);
    }
    rows
}

fn verdicts(turns: &[Turn]) -> String {
    let word = |is_met: bool| if is_met { "PASS" } else { "MISS" };
    let time = ratio(turns, "observed", "bare").map_or(f64::NAN, |spread| spread.median);
    let observed = turns.iter().filter(|turn| turn.way == "observed");
    let bytes = observed.map(|turn| turn.gained_bytes).fold(0.0, f64::max);
    let mebibytes = bytes / (1024.0 * 1024.0);
    format!(
        "- {} observed <= {MOST_TIME} of bare: {time:.4}\n- {} memory that an observed turn gains <= {:.0} MiB: {mebibytes:.1} MiB at most\n",
        word(time <= MOST_TIME),
        word(bytes <= MOST_BYTES),
        MOST_BYTES / (1024.0 * 1024.0),
    )
}

fn csv(turns: &[Turn]) -> String {
    let mut text = String::from("way,turn,step,ms,gained_bytes\n");
    for turn in turns {
        for (step, time) in turn.times_ms.iter().enumerate() {
            let _ = writeln!(text, "{},{},{step},{time:.4},{}", turn.way, turn.turn, turn.gained_bytes);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_compared_turn_by_turn() {
        let line = |way: &str, turn: usize, ms: f64, bytes: i64| {
            format!(
                "[rank 0]: {{\"way\": \"{way}\", \"turn\": {turn}, \"times_ms\": [{ms}, {ms}], \"gained_bytes\": {bytes}}}\n"
            )
        };
        // A machine that gets slower tells nothing.
        let text = line("bare", 0, 10.0, 0)
            + "noise\n"
            + &line("observed", 0, 10.05, 5)
            + &line("bare", 1, 20.0, 0)
            + &line("observed", 1, 20.2, 0);
        let turns = parse(&text).unwrap();
        let ratio = ratio(&turns, "observed", "bare").unwrap();
        assert!((ratio.least - 1.005).abs() < 1e-9 && (ratio.most - 1.01).abs() < 1e-9);
        assert!(verdicts(&turns).contains("PASS observed <= 1.01 of bare: 1.0075"), "{}", verdicts(&turns));
        assert!(parse("nothing").is_err());
    }
}
