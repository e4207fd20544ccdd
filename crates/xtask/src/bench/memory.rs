//! `cargo xtask bench memory`: the memory of a GPT in training against formulas, and steps of Adam against what memory allows.
//!
//! ```text
//!   states      GPT-2 124M: everything in memory, the optimizer's state in files; 1 and 2 ranks
//!   optimizers  what each keeps for its parameters
//!   kept        what a forward keeps for backward, with and without activation checkpointing
//!   Adam        PyTorch's fused kernel and ours, beside a bare loop over the same numbers
//! ```
//! Memory is the sum over ranks of their shares of the pages in use (PSS), less what an empty process uses.

mod contest;
mod goals;

use super::contest::{self as contests, TallyOf, Unit};
use super::pace::Pace;
use super::report::{self, row};
use super::tally::Turn;
use super::{build, machine};
use contest::{CASES, Figures, Memory};
use std::fmt::Write;

/// Compare the memory of a training with formulas, and Adam with PyTorch's
#[derive(clap::Args, Debug)]
pub(crate) struct MemoryArgs {
    #[command(flatten)]
    pace: Pace<3>,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &MemoryArgs) -> anyhow::Result<()> {
    let [launcher, ours] = build::release([build::DRUMLINE, build::BENCHED])?;
    let folder = crate::workspace::root().join("target/bench-memory");
    std::fs::create_dir_all(&folder)?;
    let mut contest = Memory { launcher, ours, folder, is_quick: args.pace.quick };
    let tally = contests::hold(&mut contest, &CASES, &args.pace);
    let text = markdown(&tally, args);
    if args.save {
        report::save(&report::name("memory", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Memory>, args: &MemoryArgs) -> String {
    let about = [
        format!("`cargo xtask bench memory --blocks {} --save`", args.pace.blocks()),
        machine::describe(),
        "states: GPT-2 124M in f32 with AdamW, a token for each rank and step, one thread a rank; PSS of all ranks after 3 steps, less \
         that of empty processes"
            .to_owned(),
        "optimizers: PSS after 4 steps on GPT-2's parameters, less that before the first".to_owned(),
        "kept: bytes of saved tensors in a forward of GPT-2, 4 texts of 256 tokens".to_owned(),
        "Adam: steps of AdamW on 64 million f32 parameters in one tensor; the bare loop reads and writes the same 28 bytes a parameter, \
         before and after each step, and a step counts only if both took the same time to 5 %"
            .to_owned(),
        format!("{} blocks, order rotated; {} were taken while the machine was not quiet", args.pace.blocks(), tally.unsteady()),
    ];
    let title = "Memory of a training, and the speed of its optimizer";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&rows(tally));
    text + &goals::section(tally)
}

fn rows(tally: &TallyOf<Memory>) -> Vec<Vec<String>> {
    let mut rows = vec![row!["contender", "case", "MB", "bytes a parameter", "ms", "of the bare loop"]];
    for unit in contest::units() {
        let column = |value: fn(&Figures) -> Option<f64>, digits| {
            let spread = tally.spread(unit, value);
            spread.map_or("-".to_owned(), |spread| spread.shown(digits))
        };
        rows.push(row![
            unit.contender,
            unit.case,
            column(|figures| Some(figures.bytes? / 1e6), 0),
            column(|figures| Some(figures.bytes? / figures.parameters).filter(|bytes| bytes.is_finite()), 2),
            column(|figures| Some(figures.step_ms), 1),
            column(|figures| figures.of_loop, 3),
        ]);
    }
    rows
}

fn csv(tally: &TallyOf<Memory>) -> String {
    let mut text = String::from("contender,case,block,steady,bytes,parameters,step_ms,of_loop\n");
    for Turn { unit: Unit { case, contender }, block, steady, figures } in tally.all() {
        let Figures { bytes, parameters, step_ms, of_loop, .. } = figures;
        let [bytes, of_loop] =
            [bytes, of_loop].map(|value| value.map_or_else(String::new, |value| value.to_string()));
        let _ = writeln!(
            text,
            "\"{contender}\",\"{case}\",{block},{steady},{bytes},{parameters},{step_ms},{of_loop}"
        );
    }
    text
}
