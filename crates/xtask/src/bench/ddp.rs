//! `cargo xtask bench ddp`: training steps of ResNet-18 on two CPU ranks, ours and PyTorch's in turns.
//!
//! ```text
//!   block n: (ours, ours without communication, PyTorch, PyTorch tuned, and each with one rank) × batch sizes, order rotated
//! ```
//! All begin with the same weights and see the same images; a contender whose losses differ from the others' fails.

mod contest;
mod tally;

use super::turns::Turn;
use super::{machine, quiet, report, schedule};
use contest::{Contender, Contest};
use std::time::Duration;
use tally::Tally;

/// Compare training steps with PyTorch DDP, in turns
#[derive(clap::Args, Debug)]
pub(crate) struct DdpArgs {
    /// How often each takes its turn
    #[arg(long, default_value_t = 7)]
    blocks: usize,
    /// Timed steps of a turn; five more come before them
    #[arg(long, default_value_t = 15)]
    steps: usize,
    /// Images of a rank's batch
    #[arg(long, value_delimiter = ',', default_value = "32,16")]
    batches: Vec<usize>,
    /// Longest wait of a turn for a quiet machine, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// Keep the results in bench/results/
    #[arg(long)]
    save: bool,
}

/// Builds, measures, judges, prints.
pub(crate) fn run(args: &DdpArgs) -> anyhow::Result<()> {
    let contest = Contest::build(args.steps)?;
    let mut tally = Tally::default();
    for block in 0..args.blocks {
        for &batch in &args.batches {
            for index in schedule::order(Contender::ALL.len(), block) {
                let contender = Contender::ALL[index];
                let steady = quiet::wait(Duration::from_secs(args.patience));
                match contest.measure(contender, batch) {
                    Ok(figures) => {
                        eprintln!(
                            "block {}, batch {batch}: {contender} {:.1} ms",
                            block + 1,
                            figures.step_ms
                        );
                        tally.add(Turn { unit: (contender, batch), block, figures, steady });
                    }
                    Err(error) => tally.turns.fail(format!("{contender}, batch {batch}: {error:#}")),
                }
            }
        }
    }
    let text = markdown(&tally, args);
    if args.save {
        report::save("ddp", &text, &tally.csv())?;
    }
    print!("{text}");
    Ok(())
}

fn markdown(tally: &Tally, args: &DdpArgs) -> String {
    let about = [
        machine::describe(),
        format!("peer: DistributedDataParallel of torch {}, backend gloo", crate::libtorch::VERSION),
        "ResNet-18 (7x7 stem, 10 classes) on 32x32 images: forward, backward, SGD with momentum 0.9, Nesterov, weight decay 5e-5; one thread a rank".to_owned(),
        "a step is timed on each rank from a barrier on, and the slowest rank's time counts; PyTorch by torchrun, PyTorch tuned and ours pinned to a core each by `drumline run`".to_owned(),
        format!("{} blocks of {} steps, order rotated; {} were taken while the machine was not quiet", args.blocks, args.steps, tally.turns.unsteady()),
    ];
    let mut text = String::from("# Data parallel training: ours and PyTorch's in one run\n\n");
    about.iter().for_each(|line| text += &format!("- {line}\n"));
    text += &tally.turns.failures();
    text += "\nMedian over blocks (least to most).\n\n";
    text += &report::table(&tally.rows());
    text + &tally.verdicts(&args.batches)
}
