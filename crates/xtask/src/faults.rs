//! What needs hosts that can be disturbed: `cargo xtask outages` and `cargo xtask soak`.
//!
//! ```text
//!   outages    training while the cable is pulled     ─┐ both over two hosts,
//!   soak       training under random faults, for hours ─┘ by training.rs
//! ```
//! These use the crate `rank-test` and with it the launcher, so the feature `faults` holds them. `cargo xtask` is built
//! without it, and `faults_by_cargo.rs` then takes the place of this file.

mod outages;
mod soak;
mod training;

use std::process::ExitCode;

/// The commands.
#[derive(clap::Subcommand)]
pub(crate) enum Faults {
    Outages(outages::OutagesArgs),
    Soak(soak::SoakArgs),
}

impl Faults {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Outages(args) => outages::run(&args),
            Self::Soak(args) => soak::run(&args),
        }
    }
}
