//! `cargo xtask bench pipeline`: pipelines of CPU ranks, ours and torch.distributed.pipelining in turns, beside the simulator.
//!
//! ```text
//!   GPT        2 ranks, 1F1B: ours, ours with all stages on one rank, PyTorch's, PyTorch's tuned
//!   sleeping   2, 8 and 32 ranks, all schedules: ours; with 8 ranks PyTorch's too
//! ```
//! All GPTs begin with the same weights and see the same tokens; a contender whose losses differ from the others' fails.

mod contest;
mod goals;

use super::contest::{self as contests, TallyOf};
use super::machine;
use super::pace::Pace;
use super::report::{self, row};
use super::sides::Sides;
use super::tally::Turn;
use contest::{Case, Figures, Pipelines, SLEEP_MICRO_BATCHES, SLEEP_MS, units};
use std::fmt::Write;

/// Compare pipelines with torch.distributed.pipelining and with the simulator, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    pace: Pace<5>,
    /// Timed steps of a turn of a GPT; two more come before them
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

impl PipelineArgs {
    fn steps(&self) -> usize {
        self.pace.at_most(self.steps, 2)
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &PipelineArgs) -> anyhow::Result<()> {
    let mut pipelines = Pipelines { sides: Sides::build("pipeline.py")?, steps: args.steps() };
    let cases = &if args.pace.quick { contest::quick_cases() } else { contest::cases() };
    let tally = contests::hold(&mut pipelines, cases, &args.pace);
    let text = markdown(&tally, args, cases);
    if args.save {
        report::save(&report::name("pipeline", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Pipelines>, args: &PipelineArgs, cases: &[Case]) -> String {
    let steps = args.steps();
    let about = [
        format!("`cargo xtask bench pipeline --blocks {} --steps {steps} --save`", args.pace.blocks()),
        machine::describe(),
        format!("peer: torch.distributed.pipelining of torch {}, backend gloo", crate::libtorch::VERSION),
        "GPT in f32, 6 blocks of 384 and 8000 tokens, cut into two stages by layers, 1F1B: forward and backward of all \
         micro-batches; one thread a rank; a step is timed on each rank from a barrier on, and the slowest rank's time counts"
            .to_owned(),
        "ideal: the simulator with times of stages that wait for nobody, measured on all ranks at once before each step, and \
         messages that take no time; simulated: the same with the measured time of a message"
            .to_owned(),
        format!(
            "sleeping: {SLEEP_MICRO_BATCHES} micro-batches; a rank's forward, input gradients and weight gradients take {SLEEP_MS} \
             ms each; messages of 192 KiB"
        ),
        format!("{} blocks, order rotated; {} were taken while the machine was not quiet", args.pace.blocks(), tally.unsteady()),
    ];
    let title = "Pipelines: ours, PyTorch's and the simulator's in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&rows(tally, cases));
    text + &goals::section(tally, cases)
}

fn rows(tally: &TallyOf<Pipelines>, cases: &[Case]) -> Vec<Vec<String>> {
    let mut rows = vec![row!["contender", "case", "step ms", "ideal ms", "simulated ms", "a message, ms"]];
    for unit in units(cases) {
        let column = |value: fn(&Figures) -> Option<f64>, digits| {
            tally.spread(unit, value).map_or("-".to_owned(), |spread| spread.shown(digits))
        };
        rows.push(row![
            unit.contender,
            unit.case,
            column(|figures| Some(figures.step_ms), 1),
            column(|figures| figures.ideal_ms, 1),
            column(|figures| figures.simulated_ms, 1),
            column(|figures| figures.hop_ms, 3),
        ]);
    }
    rows
}

fn csv(tally: &TallyOf<Pipelines>) -> String {
    let mut text = String::from("contender,case,block,steady,step_ms,ideal_ms,simulated_ms,hop_ms\n");
    for Turn { unit: contests::Unit { case, contender }, block, steady, figures } in tally.all() {
        let Figures { step_ms, ideal_ms, simulated_ms, hop_ms, .. } = figures;
        let others = [ideal_ms, simulated_ms, hop_ms]
            .map(|value| value.map_or_else(String::new, |value| value.to_string()));
        let _ = writeln!(text, "\"{contender}\",\"{case}\",{block},{steady},{step_ms},{}", others.join(","));
    }
    text
}
