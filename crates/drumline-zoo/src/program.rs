//! The ready programs, as `drumline-train` offers them.
//!
//! ```text
//!   main ─▶ args ─┬▶ train ─▶ kind: images, text, … ─▶ pieces ─▶ course, callbacks, shown ─▶ drumline's DistTrainer
//!                 ├▶ test  ─▶ evaluate
//!                 ├▶ generate ─▶ text, token after token
//!                 ├▶ export ─▶ a folder as Hugging Face's
//!                 ├▶ data  ─▶ a data set on disk
//!                 ├▶ keys  ─▶ the configuration's keys, for people
//!                 └▶ doctor ─▶ what this machine has of GPUs
//!   job: all ranks of a run, and how they agree on what went wrong
//! ```

mod args;
mod bench_gpu;
mod bench_loader;
mod bench_observe;
mod bench_step;
mod bench_transformer;
mod callbacks;
mod checked;
mod course;
mod data_kind;
mod doctor;
mod ending;
mod evaluate;
mod gpt;
mod job;
mod keys;
mod kind;
mod nmt;
mod parity;
mod pieces;
mod predict;
mod resumed;
mod shown;
mod step;
mod test;
mod text;
mod train;
mod translate;

use std::process::ExitCode;

use clap::Parser;
use drumline::LogOptions;

use crate::config::Config;
use crate::gpt::GptConfig;
use crate::nmt::NmtConfig;
use crate::text::TextConfig;
use args::{Cli, Command, DoctorCommand};
use kind::Kind;

/// Carries out the command line of this process.
pub fn main() -> ExitCode {
    drumline::install_panic_file();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => return ending::answered(&answer),
    };
    let outcome = start_logging().and_then(|()| match cli.command {
        Command::Train(args) => train::run(&args),
        Command::Nmt(args) => nmt::run(*args),
        Command::Test(args) => test::run(&args),
        Command::Translate(args) => translate::run(&args),
        Command::Generate(args) => gpt::generate(&args),
        Command::Export(args) => gpt::export(&args),
        Command::Data { command } => command.write(),
        Command::Keys { kind } => show_keys(kind),
        Command::Doctor { command: DoctorCommand::Gpu(args) } => doctor::run(&args),
        Command::BenchGpu(args) => bench_gpu::run(&args),
        Command::BenchObserve(args) => bench_observe::run(&args),
        Command::BenchStep(args) => bench_step::run(&args),
        Command::BenchLoader(args) => bench_loader::run(&args),
        Command::BenchTransformer(args) => bench_transformer::run(&args),
    });
    ending::end(outcome)
}

/// `DRUMLINE_LOG=debug` shows more than warnings, in `RUST_LOG`'s words.
fn start_logging() -> anyhow::Result<()> {
    Ok(drumline::init_logging(LogOptions { filter: Some("warn".into()), ..LogOptions::default() })?)
}

fn show_keys(kind: Kind) -> anyhow::Result<()> {
    use std::io::Write;
    let entries = match kind {
        Kind::Images => Config::default().entries(),
        Kind::Translation => NmtConfig::default().entries(),
        Kind::Text => TextConfig::default().entries(),
        Kind::Gpt => GptConfig::default().entries(),
    };
    Ok(std::io::stdout().write_all(keys::listed(&entries).as_bytes())?)
}
