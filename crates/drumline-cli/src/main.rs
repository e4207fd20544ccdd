//! The `drumline` command: reads the command line and hands over to the part that was asked for.
#![forbid(unsafe_code)]

mod bench;
mod binding;
mod job;
mod telling;

use std::process::ExitCode;

use clap::Parser;

/// Drumline: distributed deep-learning training
#[derive(Debug, Parser)]
#[command(name = "drumline", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return telling::tell_usage(&error),
    };
    let outcome = match command {
        Command::Bench(args) => bench::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => telling::tell(&error),
    }
}
