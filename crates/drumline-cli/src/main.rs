//! The `drumline` command: parses the command line and calls the subcommand.
#![forbid(unsafe_code)]

mod bench;
mod completions;
mod doctor;
mod errors;
mod generate;
mod hold;
mod job;
mod key;
mod keys;
mod launch;
mod plot;
mod run;
mod runs;
mod sbatch;
mod schedule;
mod suggestions;
mod trace;
mod train;
mod translate;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};
use tracing_subscriber::EnvFilter;

/// Drumline: distributed deep-learning training
#[derive(Debug, Parser)]
#[command(name = "drumline", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Launch(Box<launch::LaunchArgs>),
    Sbatch(Box<sbatch::SbatchArgs>),
    Train(Box<train::TrainArgs>),
    Test(Box<train::TestArgs>),
    Translate(Box<translate::TranslateArgs>),
    Generate(generate::GenerateArgs),
    Export(generate::ExportArgs),
    Data(train::DataArgs),
    Keys(keys::KeysArgs),
    Runs(runs::RunsArgs),
    Watch(watch::WatchArgs),
    Plot(plot::PlotArgs),
    Trace(trace::TraceArgs),
    Schedule(schedule::ScheduleArgs),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Key(key::KeyArgs),
    Completions(completions::CompletionsArgs),
    /// Become the agent that a leading launcher controls through stdin
    #[command(hide = true)]
    OnHost,
    /// Started by an agent between itself and its workers; not for people
    #[command(name = KEEPER, hide = true)]
    Keeper,
    #[command(hide = true)]
    Hold(hold::HoldArgs),
}

/// The subcommand that an agent starts.
const KEEPER: &str = "keeper";

impl Cli {
    /// All commands with all their flags, parsed as torchrun does.
    fn whole_command() -> clap::Command {
        let command = Self::command();
        let command =
            command.mut_subcommand("run", run::as_torchrun).mut_subcommand("launch", run::as_torchrun);
        let command = command.mut_subcommand("sbatch", run::as_torchrun);
        let command = command.mut_subcommand("translate", translate::without_program);
        command.mut_subcommand("train", train::with_pairs).mut_subcommand("test", train::with_pairs)
    }

    fn read() -> Result<Self, clap::Error> {
        let mut command = Self::whole_command();
        let typed = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        let advised = |error| suggestions::with_suggestion(error, &typed.collect::<Vec<_>>());
        let matches = command.try_get_matches_from_mut(std::env::args_os()).map_err(advised)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// Warnings of the launcher go to stderr; `DRUMLINE_LOG=debug` shows more, as in `RUST_LOG`.
fn show_warnings() {
    let filter =
        EnvFilter::try_from_env("DRUMLINE_LOG").unwrap_or_else(|_| EnvFilter::new("drumline_launch=warn"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    lines.without_time().with_target(false).with_ansi(false).init();
}

fn main() -> ExitCode {
    show_warnings();
    let command = match Cli::read() {
        Ok(cli) => cli.command,
        Err(error) => {
            let variable = run::variable_at_fault(&error, |name| std::env::var(name).ok());
            return errors::report_usage(&error, variable.as_deref());
        }
    };
    let outcome = match command {
        Command::Run(args) => run::run_program(&args),
        Command::Launch(args) => launch::launch(&args),
        Command::Sbatch(args) => sbatch::sbatch(&args),
        Command::Train(args) => train::train(*args),
        Command::Test(args) => train::test(*args),
        Command::Translate(args) => translate::translate(*args),
        Command::Generate(args) => generate::generate(args),
        Command::Export(args) => generate::export(args),
        Command::Data(args) => train::data(args),
        Command::Keys(args) => keys::keys(args),
        Command::Runs(args) => runs::runs(&args),
        Command::Plot(args) => plot::plot(&args),
        Command::Trace(args) => trace::trace(args),
        Command::Schedule(args) => schedule::schedule(args),
        Command::Completions(args) => completions::completions(&args, Cli::whole_command()),
        Command::Bench(args) => bench::run(&args),
        Command::Watch(args) => watch::watch(args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Key(args) => key::key(&args),
        Command::OnHost => run::on_host(),
        Command::Keeper => drumline_launch::keep().map_err(Into::into),
        Command::Hold(args) => hold::hold(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => errors::report(&error),
    }
}
