//! `cargo xtask bench shard`: steps and memory of a GPT with each stage of ZeRO, ours and PyTorch's in turns.
//!
//! ```text
//!   block n: (our stages 0 to 3, ours without communication, FSDP2, DDP, PyTorch without communication) × cases, order rotated
//! ```
//! All begin with the same weights and see the same tokens; a contender whose losses differ from the others' fails.

mod goals;
mod training;

use super::contest::{self, TallyOf, Unit};
use super::machine;
use super::pace::Pace;
use super::report::{self, row};
use super::sides::Sides;
use super::tally::Turn;
use std::fmt::Write;
use training::{ALL, CASES, Case, Figures, Training};

/// Compare sharded training with PyTorch's FSDP2, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct ShardArgs {
    #[command(flatten)]
    pace: Pace<5>,
    /// Timed steps of a turn; two more come before them
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

impl ShardArgs {
    fn steps(&self) -> usize {
        self.pace.at_most(self.steps, 2)
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &ShardArgs) -> anyhow::Result<()> {
    let mut contest = Training { sides: Sides::build("shard.py")?, steps: args.steps() };
    let cases = if args.pace.quick { &CASES[..1] } else { &CASES[..] };
    let tally = contest::hold(&mut contest, cases, &args.pace);
    let text = markdown(&tally, args, cases);
    if args.save {
        report::save(&report::name("shard", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Training>, args: &ShardArgs, cases: &[Case]) -> String {
    let steps = args.steps();
    let about = [
        format!("`cargo xtask bench shard --blocks {} --steps {steps} --save`", args.pace.blocks()),
        machine::describe(),
        format!("peer: FSDP2 (fully_shard on each block and the rest) and DistributedDataParallel of torch {}, backend gloo, fused AdamW", crate::libtorch::VERSION),
        "GPT in f32: forward, backward, AdamW; one thread a rank; a step is timed on each rank from a barrier on, and the slowest rank's time counts".to_owned(),
        "without communication: each rank steps as many parameters as if they were divided, so that the rest of a step is communication".to_owned(),
        "memory: the sum over ranks of their shares of the pages in use (PSS) after a step of one token, less what they used before the model was made; at most 2 blocks".to_owned(),
        format!("{} blocks, order rotated; {} were taken while the machine was not quiet", args.pace.blocks(), tally.unsteady()),
    ];
    let title = "Sharded training: ours and PyTorch's in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&rows(tally, cases));
    text + &goals::section(tally, cases)
}

fn rows(tally: &TallyOf<Training>, cases: &[Case]) -> Vec<Vec<String>> {
    let mut rows = vec![row!["contender", "case", "step ms", "memory of all ranks, MB"]];
    for (case, contender) in cases.iter().flat_map(|case| ALL.map(|contender| (*case, contender))) {
        let unit = Unit { case, contender };
        let column = |value: fn(&Figures) -> f64| tally.spread(unit, |figures| Some(value(figures)));
        let Some(step) = column(|figures| figures.step_ms) else { continue };
        let memory = column(|figures| figures.pss_bytes / 1e6);
        let memory = memory.map_or("-".to_owned(), |spread| format!("{:.0}", spread.median));
        rows.push(row![contender, case, step.shown(1), memory]);
    }
    rows
}

fn csv(tally: &TallyOf<Training>) -> String {
    let mut text = String::from("contender,case,block,steady,step_ms,pss_bytes\n");
    for Turn { unit: Unit { case, contender }, block, steady, figures } in tally.all() {
        let Figures { step_ms, pss_bytes, .. } = figures;
        let _ = writeln!(text, "\"{contender}\",\"{case}\",{block},{steady},{step_ms},{pss_bytes}");
    }
    text
}
