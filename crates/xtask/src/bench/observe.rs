//! `cargo xtask bench observe`: what the trainer, its callbacks and observers cost a step.
//!
//! One job of two ranks makes the same steps by turns: by a loop on `Ddp`, by a bare trainer, by one with all that `drumline train` has. So what changes on the
//! machine changes for all three.

use serde_json::Value;
use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

use super::pace::Pace;
use super::report::{self, row};
use super::spread::{Spread, median};
use super::tally::{Tally, Turn};
use super::{build, child, machine, quiet};

/// Of a step's time.
const MOST_TIME: f64 = 1.01;
/// Of memory.
const MOST_BYTES: f64 = 50.0 * 1024.0 * 1024.0;
const LIMIT: Duration = Duration::from_secs(900);

/// Compare training steps with and without observers, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct ObserveArgs {
    #[command(flatten)]
    pace: Pace<12>,
    /// Name of the network
    #[arg(long, default_value = "resnet18")]
    arch: String,
    /// Images of a rank's batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Timed steps of a turn
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// What one turn printed.
#[derive(Debug)]
struct Figures {
    times_ms: Vec<f64>,
    gained_bytes: f64,
}

impl Figures {
    fn step_ms(&self) -> f64 {
        median(self.times_ms.clone()).unwrap_or(f64::NAN)
    }
}

/// How the steps are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    /// In what is printed.
    key: &'static str,
    name: &'static str,
}

const LOOP: Way = Way { key: "loop", name: "a loop on Ddp" };
const BARE: Way = Way { key: "bare", name: "DistTrainer, bare" };
const OBSERVED: Way = Way { key: "observed", name: "DistTrainer, observed" };
const WAYS: [Way; 3] = [LOOP, BARE, OBSERVED];

type Turns = Tally<Way, Figures>;

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &ObserveArgs) -> anyhow::Result<()> {
    let [launcher, ours] = build::release([build::DRUMLINE, build::BENCHED])?;
    let folder = build::output_folder()?.join("observed");
    let steady = quiet::wait(args.pace.patience());
    let mut command = Command::new(launcher);
    command.args(["run", "--standalone", "--nproc-per-node", "2"]).arg(ours).arg("observe");
    command.args(["--arch", &args.arch, "--batch", &args.batch.to_string(), "--out-dir"]).arg(&folder);
    command.args(["--turns", &args.pace.blocks().to_string(), "--steps", &args.steps().to_string()]);
    command.env("OMP_NUM_THREADS", "1");
    let turns = parse(&child::run(command, LIMIT)?.stdout, steady)?;
    let text = markdown(&turns, args, steady);
    if args.save {
        let name = format!("observe-{}", args.arch);
        report::save(&report::name(&name, args.pace.quick), &text, &csv(&turns))?;
    }
    print!("{text}");
    Ok(())
}

impl ObserveArgs {
    fn steps(&self) -> usize {
        self.pace.at_most(self.steps, 3)
    }
}

fn parse(stdout: &str, steady: bool) -> anyhow::Result<Turns> {
    let objects = stdout.lines().filter_map(|line| line.find("{\"").map(|start| &line[start..]));
    let mut turns = Turns::default();
    objects.filter_map(|object| turn(object, steady)).for_each(|turn| turns.add(turn));
    anyhow::ensure!(turns.all().next().is_some(), "no turn in `{}`", stdout.trim_end());
    Ok(turns)
}

fn turn(object: &str, steady: bool) -> Option<Turn<Way, Figures>> {
    let value: Value = serde_json::from_str(object).ok()?;
    let times = value["times_ms"].as_array()?;
    Some(Turn {
        unit: *WAYS.iter().find(|way| value["way"].as_str() == Some(way.key))?,
        block: value["turn"].as_u64()? as usize,
        figures: Figures {
            times_ms: times.iter().filter_map(Value::as_f64).collect(),
            gained_bytes: value["gained_bytes"].as_f64()?,
        },
        steady,
    })
}

/// The ratio of two ways' steps, turn by turn.
fn ratio(turns: &Turns, way: Way, to: Way) -> Option<Spread> {
    turns.ratio(way, to, |way, to| Some(way.step_ms() / to.step_ms()))
}

fn markdown(turns: &Turns, args: &ObserveArgs, steady: bool) -> String {
    let ObserveArgs { arch, batch, .. } = args;
    let state = if steady { "quiet" } else { "not quiet" };
    let about = [
        machine::describe(),
        format!("{arch} on 32x32 images, 2 ranks of {batch}, SGD with momentum; one thread a rank"),
        format!("{} turns of {} steps of each, one after another in one job, order rotated; the machine was {state} before", args.pace.blocks(), args.steps()),
        "observed: learning-rate schedule, stop on NaN, accuracy of each step, states of ranks, lines of progress, `metrics.jsonl`, TensorBoard".to_owned(),
    ];
    let title = "What it costs to train with the trainer, and to watch it";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += "\nMedian over turns (least to most).\n\n";
    text += &report::table(&rows(turns));
    text + "\n" + &verdicts(turns)
}

fn rows(turns: &Turns) -> Vec<Vec<String>> {
    let mut rows = vec![row!["", "step, ms", "to the loop by hand", "to the bare trainer"]];
    for way in WAYS {
        let times = turns.spread(way, |figures| Some(figures.step_ms()));
        let shown = |spread: Option<Spread>, digits: usize| {
            spread.map_or("-".to_owned(), |spread| spread.shown(digits))
        };
        let [to_loop, to_bare] = [LOOP, BARE].map(|to| shown(ratio(turns, way, to), 4));
        rows.push(row![way.name, shown(times, 2), to_loop, to_bare]);
    }
    rows
}

fn verdicts(turns: &Turns) -> String {
    let word = |is_met: bool| if is_met { "PASS" } else { "MISS" };
    let time = ratio(turns, OBSERVED, BARE).map_or(f64::NAN, |spread| spread.median);
    let bytes = turns.spread(OBSERVED, |figures| Some(figures.gained_bytes)).map_or(0.0, |bytes| bytes.most);
    let mebibytes = bytes / (1024.0 * 1024.0);
    format!(
        "- {} observed <= {MOST_TIME} of bare: {time:.4}\n- {} memory that an observed turn gains <= {:.0} MiB: {mebibytes:.1} MiB at most\n",
        word(time <= MOST_TIME),
        word(bytes <= MOST_BYTES),
        MOST_BYTES / (1024.0 * 1024.0),
    )
}

fn csv(turns: &Turns) -> String {
    let mut text = String::from("way,turn,step,ms,gained_bytes\n");
    for Turn { unit, block, figures, .. } in turns.all() {
        for (step, time) in figures.times_ms.iter().enumerate() {
            let _ = writeln!(text, "{},{block},{step},{time:.4},{}", unit.key, figures.gained_bytes);
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
        let turns = parse(&text, true).unwrap();
        let ratio = ratio(&turns, OBSERVED, BARE).unwrap();
        assert!((ratio.least - 1.005).abs() < 1e-9 && (ratio.most - 1.01).abs() < 1e-9);
        assert!(verdicts(&turns).contains("PASS observed <= 1.01 of bare: 1.0075"), "{}", verdicts(&turns));
        assert!(parse("nothing", true).is_err());
    }
}
