//! `cargo xtask bench ddp`: training steps of ResNet-18 on two CPU ranks, ours and PyTorch's in turns.
//!
//! ```text
//!   block n: (ours, ours without communication, PyTorch, PyTorch tuned, and each with one rank) × batch sizes, order rotated
//! ```
//! All begin with the same weights and see the same images; a contender whose losses differ from the others' fails.

mod goals;
mod training;

use super::contest::{self, TallyOf, Unit};
use super::machine;
use super::pace::Pace;
use super::report::{self, row};
use super::sides::Sides;
use super::tally::Turn;
use std::fmt::Write;
use training::{ALL, Batch, Figures, Training};

/// Compare training steps with PyTorch DDP, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct DdpArgs {
    #[command(flatten)]
    pace: Pace<7>,
    /// Timed steps of a turn; five more come before them
    #[arg(long, default_value_t = 15)]
    steps: usize,
    /// Images of a rank's batch
    #[arg(long, value_delimiter = ',', default_value = "32,16")]
    batches: Vec<usize>,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

impl DdpArgs {
    fn steps(&self) -> usize {
        self.pace.at_most(self.steps, 3)
    }
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &DdpArgs) -> anyhow::Result<()> {
    let mut contest = Training { sides: Sides::build("ddp.py")?, steps: args.steps() };
    let cases: Vec<_> = args.batches.iter().copied().map(Batch).collect();
    let tally = contest::hold(&mut contest, &cases, &args.pace);
    let text = markdown(&tally, args);
    if args.save {
        report::save(&report::name("ddp", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Training>, args: &DdpArgs) -> String {
    let about = [
        machine::describe(),
        format!("peer: DistributedDataParallel of torch {}, backend gloo", crate::libtorch::VERSION),
        "ResNet-18 (7x7 stem, 10 classes) on 32x32 images: forward, backward, SGD with momentum 0.9, Nesterov, weight decay 5e-5; one thread a rank".to_owned(),
        "a step is timed on each rank from a barrier on, and the slowest rank's time counts; PyTorch by torchrun, PyTorch tuned and ours pinned to a core each by `drumline run`".to_owned(),
        format!("{} blocks of {} steps, order rotated; {} were taken while the machine was not quiet", args.pace.blocks(), args.steps(), tally.unsteady()),
    ];
    let title = "Data parallel training: ours and PyTorch's in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&rows(tally));
    text + &goals::section(tally, &args.batches)
}

fn rows(tally: &TallyOf<Training>) -> Vec<Vec<String>> {
    let mut rows = vec![row!["contender", "batch a rank", "step ms", "images/s", "peak MB a rank"]];
    let mut batches: Vec<usize> = tally.all().map(|turn| turn.unit.case.0).collect();
    batches.sort_unstable_by(|a, b| b.cmp(a));
    batches.dedup();
    for (batch, contender) in batches.iter().flat_map(|batch| ALL.map(|contender| (*batch, contender))) {
        let unit = Unit { case: Batch(batch), contender };
        let column = |value: fn(&Figures) -> f64| tally.spread(unit, |figures| Some(value(figures)));
        let Some(step) = column(|f| f.step_ms) else { continue };
        let middle = |value| column(value).map_or("-".to_owned(), |spread| format!("{:.0}", spread.median));
        let (rate, peak) = (middle(|f| f.images_per_s), middle(|f| f.peak_bytes / 1e6));
        rows.push(row![contender, batch, step.shown(1), rate, peak]);
    }
    rows
}

fn csv(tally: &TallyOf<Training>) -> String {
    let mut text = String::from("contender,batch,block,steady,step_ms,images_per_s,peak_bytes\n");
    for Turn { unit: Unit { case: Batch(batch), contender }, block, steady, figures } in tally.all() {
        let Figures { step_ms, images_per_s, peak_bytes, .. } = figures;
        let _ =
            writeln!(text, "\"{contender}\",{batch},{block},{steady},{step_ms},{images_per_s},{peak_bytes}");
    }
    text
}
