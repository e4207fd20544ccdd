//! The project's own commands, run as `cargo xtask <command>`.
//!
//! ```text
//!   libtorch   fetch the pinned libtorch once per user          libtorch.rs
//!   check      format, lints, arrows, unsafe, headers           check.rs   ─┐ steps run by step.rs,
//!   test       check + docs + tests + loom + fuzz               test.rs    ─┘ added up by summary.rs
//!   demo       build and run the collectives demonstration      demo.rs
//!   bench      ours and the peers in one run                    bench/
//! ```

#![forbid(unsafe_code)]

mod bench;
mod check;
mod demo;
mod libtorch;
mod step;
mod summary;
mod test;
mod workspace;

use clap::Parser;
use std::process::ExitCode;
use workspace::Workspace;

/// The project's own commands
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Xtask {
    /// Fetch the pinned libtorch into a cache folder and link it from `.libtorch/`
    Libtorch(libtorch::LibtorchArgs),
    /// The quick part: format, lints, arrows between crates, unsafe code, file headers
    Check,
    /// Everything: check, docs, all tests, loom, short fuzz runs; one summary at the end
    Test,
    /// Build and run the collectives demonstration with four processes
    Demo,
    /// Compare with the peers, interleaved in one run
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    run(Xtask::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(xtask: Xtask) -> anyhow::Result<ExitCode> {
    match xtask {
        Xtask::Libtorch(args) => libtorch::run(&args)?,
        Xtask::Check => return Ok(check::run(&Workspace::load()?)),
        Xtask::Test => return Ok(test::run(&Workspace::load()?)),
        Xtask::Demo => demo::run()?,
        Xtask::Bench(args) => bench::run(args)?,
    }
    Ok(ExitCode::SUCCESS)
}
