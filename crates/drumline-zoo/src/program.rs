//! The command line of `drumline-train`: dispatches each command.
//!
//! ```text
//!   main ─▶ args ─┬▶ train, test, --check ─▶ kind: which task ─▶ driver
//!                 ├▶ translate ─▶ lines translated by all ranks
//!                 ├▶ generate ─▶ text, token after token
//!                 ├▶ export ─▶ a Hugging Face folder
//!                 ├▶ data  ─▶ a dataset on disk
//!                 ├▶ keys  ─▶ the configuration's keys, as a list or a JSON schema
//!                 └▶ doctor ─▶ what this machine has of GPUs
//! ```

mod args;
mod deepspeed;
mod doctor;
mod ending;
mod export;
mod generate;
mod keys;
mod kind;
mod nmt_args;
mod synth_args;
mod tokens;
mod translate;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

use clap::Parser;
use drumline::LogOptions;
use drumline_torch::cuda;

use crate::driver::{self, TrainOptions};
use crate::nmt::NmtTask;
use crate::task::Task;
use args::{Cli, Command, DoctorCommand};
use kind::with_task;
pub(crate) use kind::{Kind, kind_of};

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    drumline::launch::install_panic_file();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => return ending::answered(&answer),
    };
    if cli.check {
        return ending::end(check(cli.command));
    }
    ending::end(with_full_gpus_named(|| start_logging().and_then(|()| carry_out(cli.command))))
}

fn carry_out(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(args) => {
            let given = args.given()?;
            if args.deepspeed.explain {
                return deepspeed::explain(&given, args.deepspeed.form());
            }
            with_task!(kind_of(given.file), T => {
                // The configuration's own error says what is wrong.
                let explanation = driver::explained::<<T as Task>::Config>(&given).unwrap_or_default();
                let options = TrainOptions { parity: args.verify_parity, explanation };
                driver::train::<T>(driver::load(&given), &options)
            })
        }
        Command::Nmt(args) => {
            let options = TrainOptions { parity: None, explanation: None };
            driver::train::<NmtTask>(args.config(), &options)
        }
        Command::Test(args) => {
            let given = args.run.given();
            with_task!(kind_of(given.file), T => driver::test::<T>(&given, args.options()))
        }
        Command::Translate(args) => translate::run(&args),
        Command::Generate(args) => generate::generate(&args),
        Command::Export(args) => export::export(&args),
        Command::Data { command } => command.write(),
        Command::Keys { kind, schema } => show_keys(kind, schema),
        Command::Doctor { command: DoctorCommand::Gpu(args) } => doctor::run(&args),
    }
}

/// `--check`: returns an error if the command could not start. Commands that start no ranks have nothing to check.
fn check(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(args) => {
            let given = args.given()?;
            with_task!(kind_of(given.file), T => driver::check_training::<T>(driver::load(&given)))
        }
        Command::Test(args) => {
            let given = args.run.given();
            with_task!(kind_of(given.file), T => driver::check_test::<T>(&given))
        }
        Command::Nmt(args) => driver::check_training::<NmtTask>(args.config()),
        Command::Translate(args) => translate::check(&args),
        _ => Ok(()),
    }
}

/// Turns a panic about an out-of-memory GPU into an error that names the processes that use its memory.
fn with_full_gpus_named(body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let error = panic.downcast_ref::<String>().and_then(|words| cuda::GpuOutOfMemory::parse(words));
        error.map_or_else(|| resume_unwind(panic), |error| Err(error.into()))
    })
}

/// Starts logging. `DRUMLINE_LOG` takes filters in the syntax of `RUST_LOG`; the default shows warnings.
fn start_logging() -> anyhow::Result<()> {
    Ok(drumline::init_logging(LogOptions { filter: Some("warn".into()), ..LogOptions::default() })?)
}

fn show_keys(kind: Kind, as_schema: bool) -> anyhow::Result<()> {
    let text = if as_schema { format!("{:#}\n", kind.schema()) } else { keys::listed(&kind.entries()) };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_out_of_memory_panic_becomes_an_error() {
        let message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10 GiB";
        let error = with_full_gpus_named(|| panic!("{message}")).unwrap_err().to_string();
        assert!(error.contains("is out of memory: 2.00 GiB was asked for"), "{error}");
        let other = catch_unwind(|| with_full_gpus_named(|| panic!("{}", "other"))).unwrap_err();
        assert_eq!(other.downcast_ref::<String>().map(String::as_str), Some("other"));
        assert!(with_full_gpus_named(|| Ok(())).is_ok());
    }
}
