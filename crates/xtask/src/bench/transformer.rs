//! `cargo xtask bench transformer`: training steps of a Transformer on two CPU ranks and translations on one, ours and PyTorch's in turns.
//!
//! ```text
//!   check: losses without dropout, and scores of translations, are the same ─▶ block n: (ours, PyTorch, PyTorch tuned) × cases, order rotated
//! ```
//! All begin with the same weights and see the same batches, which come from a file that ours writes first.

mod contest;
mod tally;

use super::turns::Turn;
use super::{machine, quiet, report, schedule};
use contest::{Case, Contest, Purpose};
use std::time::Duration;
use tally::Tally;

/// Compare a Transformer's training and translating with PyTorch's, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct TransformerArgs {
    /// How often each takes its turn
    #[arg(long, default_value_t = 5)]
    blocks: usize,
    /// Which of them: small, middle, base, decode-small, decode-base
    #[arg(long, value_delimiter = ',', default_value = "small,middle,base,decode-small,decode-base")]
    cases: Vec<Case>,
    /// Longest wait of a turn for a quiet machine, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Builds, checks, measures, judges, prints.
pub(crate) fn run(args: &TransformerArgs) -> anyhow::Result<()> {
    let contest = Contest::build(&args.cases)?;
    let mut tally = Tally::default();
    for &case in &args.cases {
        for &contender in case.contenders() {
            let figures = contest.measure(contender, case, Purpose::Check)?;
            eprintln!("{case}: {contender} computes {}", figures.shown_results());
            tally.check(case, contender, figures)?;
        }
    }
    for block in 0..args.blocks {
        for &case in &args.cases {
            let contenders = case.contenders();
            for index in schedule::order(contenders.len(), block) {
                let contender = contenders[index];
                let steady = quiet::wait(Duration::from_secs(args.patience));
                match contest.measure(contender, case, Purpose::Time) {
                    Ok(figures) => {
                        eprintln!("block {}, {case}: {contender} {:.1} ms", block + 1, figures.step_ms);
                        tally.add(Turn { unit: (contender, case), block, figures, steady });
                    }
                    Err(error) => tally.turns.fail(format!("{contender}, {case}: {error:#}")),
                }
            }
        }
    }
    let text = markdown(&tally, args);
    if args.save {
        report::save("transformer", &text, &tally.csv())?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &Tally, args: &TransformerArgs) -> String {
    let about = [
        machine::describe(),
        format!("peer: nn.Transformer's layers in torch {}, DistributedDataParallel with gloo; beam search by a plain loop without a cache", crate::libtorch::VERSION),
        "training: 2 ranks of one thread; forward, loss with label smoothing 0.1, backward, Adam; dropout 0.1; batches by tokens of sentences of like length, from the task of `drumline_text::synth`".to_owned(),
        "a step is timed on each rank from a barrier on, and the slowest rank's time counts; processor time is that of both ranks with all their threads; PyTorch by torchrun, PyTorch tuned and ours pinned to a core each by `drumline run`".to_owned(),
        "decoding: one process of one thread, 16 sentences at once, beam 5".to_owned(),
        "checked first: without dropout, losses of the first steps are the same to 1e-3, and so are the scores of translations".to_owned(),
        format!("{} blocks, order rotated; {} were taken while the machine was not quiet", args.blocks, tally.turns.unsteady()),
    ];
    let mut text = String::from("# Transformer: ours and PyTorch's in one run\n\n");
    about.iter().for_each(|line| text += &format!("- {line}\n"));
    text += &tally.turns.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&tally.rows());
    text + &tally.verdicts()
}
