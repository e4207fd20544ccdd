//! `cargo xtask bench`: ours and the peers side by side in one run.
//!
//! ```text
//!   build (peers) ─▶ schedule ─▶ per unit: gate (quiet, placement) ─▶ child ─▶ record ─▶ tally ─▶ goals ─▶ report
//! ```
//! A *unit* is one contender at one size of one operation; a *block* is every unit once. Blocks repeat in rotated
//! order, so that slow changes of the machine meet all contenders alike.

mod child;
mod collectives;
mod contender;
mod goals;
mod peers;
mod placement;
mod progress;
mod quiet;
mod record;
mod report;
mod schedule;
mod session;
mod sizes;
mod tally;

/// Compare with the peers, interleaved in one run
#[derive(clap::Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(clap::Subcommand, Debug)]
enum Subject {
    /// All-reduce and the other collectives against Open MPI, MPICH, gloo and the hardware's floor
    Collectives(collectives::CollectivesArgs),
}

/// Run the comparison that was asked for.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    match args.subject {
        Subject::Collectives(args) => collectives::run(&args),
    }
}
