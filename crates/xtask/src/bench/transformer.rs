//! `cargo xtask bench transformer`: training steps of a Transformer on two CPU ranks and translations on one, ours and PyTorch's in turns.
//!
//! ```text
//!   check: losses without dropout, and scores of translations, are the same ─▶ block n: (ours, PyTorch, PyTorch tuned) × cases, order rotated
//! ```
//! All begin with the same weights and see the same batches, which come from a file that ours writes first.

mod work;

use super::contest::{self, TallyOf, Unit};
use super::machine;
use super::need::Need;
use super::pace::Pace;
use super::report::{self, row};
use super::sides::Side;
use super::spread::Spread;
use super::tally::Turn;
use crate::bench::contender::Contender;
use std::fmt::Write;
use work::{Case, Figures, OURS, TORCH, Work};

/// How many times as fast as PyTorch.
const TRAINING_GOAL: f64 = 1.2;
const DECODING_GOAL: f64 = 2.0;

/// Compare a Transformer's training and translating with PyTorch's, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct TransformerArgs {
    #[command(flatten)]
    pace: Pace<5>,
    /// Which of them: small, middle, base, decode-small, decode-base
    #[arg(long, value_delimiter = ',', default_value = "small,middle,base,decode-small,decode-base")]
    cases: Vec<Case>,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Builds, checks, measures, judges, prints.
pub(crate) fn run(args: &TransformerArgs) -> anyhow::Result<()> {
    let mut contest = Work::build(&args.cases)?;
    args.cases.iter().try_for_each(|case| contest.compare(*case))?;
    let tally = contest::hold(&mut contest, &args.cases, &args.pace);
    let text = markdown(&tally, args);
    if args.save {
        report::save(&report::name("transformer", args.pace.quick), &text, &csv(&tally))?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &TallyOf<Work>, args: &TransformerArgs) -> String {
    let about = [
        machine::describe(),
        format!("peer: nn.Transformer's layers in torch {}, DistributedDataParallel with gloo; beam search by a plain loop without a cache", crate::libtorch::VERSION),
        "training: 2 ranks of one thread; forward, loss with label smoothing 0.1, backward, Adam; dropout 0.1; batches by tokens of sentences of like length, from the task of `drumline_text::synth`".to_owned(),
        "a step is timed on each rank from a barrier on, and the slowest rank's time counts; processor time is that of both ranks with all their threads; PyTorch by torchrun, PyTorch tuned and ours pinned to a core each by `drumline run`".to_owned(),
        "decoding: one process of one thread, 16 sentences at once, beam 5".to_owned(),
        "checked first: without dropout, losses of the first steps are the same to 1e-3, and so are the scores of translations".to_owned(),
        format!("{} blocks, order rotated; {} were taken while the machine was not quiet", args.pace.blocks(), tally.unsteady()),
    ];
    let title = "Transformer: ours and PyTorch's in one run";
    let mut text = report::head(title, args.pace.warning().into_iter().chain(about));
    text += &tally.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&rows(tally, &args.cases));
    text + &goals(tally, &args.cases)
}

fn rows(tally: &TallyOf<Work>, cases: &[Case]) -> Vec<Vec<String>> {
    let mut rows =
        vec![row!["", "contender", "step or batch, ms", "tokens/s", "processor ms a step", "peak MB a rank"]];
    for &case in cases {
        for &contender in case.contenders() {
            let unit = Unit { case, contender };
            let column = |value: fn(&Figures) -> Option<f64>| tally.spread(unit, value);
            let Some(step) = column(|f| Some(f.step_ms)) else { continue };
            let middle = |value| column(value).map_or("-".to_owned(), |s| format!("{:.0}", s.median));
            let rate = middle(|f| Some(f.tokens_per_s));
            let (processor, peak) = (middle(|f| f.cpu_ms), middle(|f| f.peak_bytes.map(|bytes| bytes / 1e6)));
            rows.push(row![case, contender, step.shown(1), rate, processor, peak]);
        }
    }
    rows
}

/// The section on goals: medians of the ratios within a block.
fn goals(tally: &TallyOf<Work>, cases: &[Case]) -> String {
    let mut rows = vec![row!["", "", "Drumline against", "goal", "tokens/s", "processor time"]];
    for &case in cases {
        let others = case.contenders().iter().filter(|contender| **contender != OURS);
        rows.extend(others.map(|other| judge(tally, case, *other)));
    }
    report::goals(&rows)
}

fn judge(tally: &TallyOf<Work>, case: Case, other: Contender<Side>) -> Vec<String> {
    let [us, them] = [OURS, other].map(|contender| Unit { case, contender });
    let rate = tally.ratio(us, them, |ours, other| Some(ours.tokens_per_s / other.tokens_per_s));
    let processor = tally.ratio(us, them, |ours, other| Some(other.cpu_ms? / ours.cpu_ms?));
    let need = if other != TORCH {
        Need::Shown
    } else {
        Need::AtLeast(if case.is_training() { TRAINING_GOAL } else { DECODING_GOAL })
    };
    let word = need.word(rate.map(|rate| rate.median));
    let shown = |ratio: Option<Spread>| {
        ratio.map_or("-".to_owned(), |r| format!("{:.2}x ({:.2} to {:.2})", r.median, r.least, r.most))
    };
    row![word, case, other, need.shown("x"), shown(rate), shown(processor)]
}

fn csv(tally: &TallyOf<Work>) -> String {
    let mut text = String::from("case,contender,block,steady,step_ms,tokens_per_s,cpu_ms,peak_bytes\n");
    for Turn { unit: Unit { case, contender }, block, steady, figures } in tally.all() {
        let Figures { step_ms, tokens_per_s, .. } = figures;
        let optional = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
        let (cpu, peak) = (optional(figures.cpu_ms), optional(figures.peak_bytes));
        let _ = writeln!(text, "{case},{contender},{block},{steady},{step_ms},{tokens_per_s},{cpu},{peak}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tally::Tally;
    use super::*;

    #[test]
    fn a_goal_is_reached_once_both_sides_are_measured() {
        let mut tally = Tally::default();
        let mut add = |contender, tokens_per_s| {
            let figures = Figures {
                step_ms: 1.0,
                tokens_per_s,
                cpu_ms: Some(2.0),
                peak_bytes: None,
                results: Vec::new(),
            };
            let unit = Unit { case: Case::Small, contender };
            tally.add(Turn { unit, block: 0, figures, steady: true });
            goals(&tally, &[Case::Small])
        };
        assert!(add(OURS, 130.0).contains("0 PASS, 0 MISS"));
        let text = add(TORCH, 100.0);
        assert!(text.contains("1 PASS, 0 MISS") && text.contains("1.30x"), "{text}");
    }
}
