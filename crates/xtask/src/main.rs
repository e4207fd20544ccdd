//! The project's own commands, run as `cargo xtask <command>`.
//!
//! ```text
//!   demo       train a ResNet-18 on two processes                demo.rs
//!   check      format, lints, arrows, unsafe, headers           check.rs   ─┐ steps run by step.rs,
//!   test       check + docs + book + tests + loom + fuzz        test.rs    ─┘ added up by summary.rs
//!   test --quick   check + unit tests + two ranks that train    test/two_ranks.rs
//!   book       the pages as a site                              book.rs
//!   bench      ours and the peers in one run                    bench/
//!   outages    training while the cable is pulled               faults.rs
//!   soak       training under random faults, for hours          faults.rs
//!   gpu-test   what needs a GPU, packed for one                 gpu_test.rs
//!   libtorch   fetch the pinned libtorch once per user          libtorch.rs
//!   python     make a Python with that PyTorch once per user    python.rs
//! ```

#![forbid(unsafe_code)]

mod bench;
mod book;
mod check;
mod demo;
mod family;
#[cfg_attr(not(feature = "faults"), path = "faults_by_cargo.rs")]
mod faults;
mod gpu_test;
mod libtorch;
mod python;
mod step;
mod summary;
mod test;
mod workspace;

use clap::Parser;
use std::process::ExitCode;
use workspace::Workspace;

/// The project's own commands; start with `demo`
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Xtask {
    /// Set up, make pictures, and train a ResNet-18 on two processes (the first time about eight minutes on two cores, then one)
    Demo,
    /// The quick part of the tests: format, lints, arrows between crates, unsafe code, file headers, names and phrases of pages
    Check,
    /// Everything: check, docs, the book, all tests, loom, short fuzz runs; one summary at the end
    Test(test::TestArgs),
    /// Compare with the peers, interleaved in one run (most of an hour; `--quick` for a try)
    Bench(bench::BenchArgs),
    Book(book::BookArgs),
    #[command(flatten)]
    Faults(faults::Faults),
    GpuTest(gpu_test::GpuTestArgs),
    /// Fetch the pinned libtorch into a cache folder and link it from `.libtorch/`; the others do that by themselves
    Libtorch(libtorch::LibtorchArgs),
    /// Make a Python with the pinned PyTorch (or TensorBoard) in a cache folder, for tests beside it, and print its path
    Python {
        /// What it shall have
        #[arg(value_enum, default_value = "torch")]
        module: python::Module,
    },
}

fn main() -> ExitCode {
    run(Xtask::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(xtask: Xtask) -> anyhow::Result<ExitCode> {
    // The demo fetches libtorch while it builds.
    if !matches!(xtask, Xtask::Demo | Xtask::Libtorch(_) | Xtask::Python { .. } | Xtask::Book(_)) {
        libtorch::ensure()?;
    }
    match xtask {
        Xtask::Demo => demo::run()?,
        Xtask::Check => return Ok(check::run(&Workspace::load()?)),
        Xtask::Test(args) => return Ok(test::run(&Workspace::load()?, &args)),
        Xtask::Bench(args) => bench::run(args)?,
        Xtask::Book(args) => return book::run(&Workspace::load()?, &args),
        Xtask::Faults(faults) => return faults.run(),
        Xtask::GpuTest(args) => gpu_test::run(&args)?,
        Xtask::Libtorch(args) => libtorch::run(&args)?,
        Xtask::Python { module } => println!("{}", python::with(module)?.display()),
    }
    Ok(ExitCode::SUCCESS)
}
