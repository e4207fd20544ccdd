//! The ready programs, as `drumline-train` offers them.
//!
//! ```text
//!   main ─▶ args ─┬▶ check ─▶ what is wrong before ranks are started
//!                 ├▶ train ─▶ kind: images, text, … ─▶ pieces ─▶ course, callbacks, shown ─▶ drumline's DistTrainer
//!                 ├▶ test  ─▶ evaluate
//!                 ├▶ generate ─▶ text, token after token
//!                 ├▶ export ─▶ a folder as Hugging Face's
//!                 ├▶ data  ─▶ a data set on disk
//!                 ├▶ keys  ─▶ the configuration's keys, for people and for editors
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
mod check;
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

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

use clap::Parser;
use drumline::LogOptions;
use drumline_torch::cuda;

use args::{Cli, Command, DoctorCommand};
use kind::Kind;

/// Carries out the command line of this process.
pub fn main() -> ExitCode {
    drumline::install_panic_file();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => return ending::answered(&answer),
    };
    if cli.check {
        return ending::end(check::check(cli.command));
    }
    let outcome = full_gpus_told(|| {
        start_logging().and_then(|()| match cli.command {
            Command::Train(args) => train::run(&args),
            Command::Nmt(args) => nmt::run(*args),
            Command::Test(args) => test::run(&args),
            Command::Translate(args) => translate::run(&args),
            Command::Generate(args) => gpt::generate(&args),
            Command::Export(args) => gpt::export(&args),
            Command::Data { command } => command.write(),
            Command::Keys { kind, schema } => show_keys(kind, schema),
            Command::Doctor { command: DoctorCommand::Gpu(args) } => doctor::run(&args),
            Command::BenchGpu(args) => bench_gpu::run(&args),
            Command::BenchObserve(args) => bench_observe::run(&args),
            Command::BenchStep(args) => bench_step::run(&args),
            Command::BenchLoader(args) => bench_loader::run(&args),
            Command::BenchTransformer(args) => bench_transformer::run(&args),
        })
    });
    ending::end(outcome)
}

/// A panic that tells of a GPU without room becomes an error that says who has its memory.
fn full_gpus_told(body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().and_then(|words| cuda::out_of_memory(words));
        words.map_or_else(|| resume_unwind(panic), |told| Err(anyhow::anyhow!(told)))
    })
}

/// `DRUMLINE_LOG=debug` shows more than warnings, in `RUST_LOG`'s words.
fn start_logging() -> anyhow::Result<()> {
    Ok(drumline::init_logging(LogOptions { filter: Some("warn".into()), ..LogOptions::default() })?)
}

fn show_keys(kind: Kind, as_schema: bool) -> anyhow::Result<()> {
    use std::io::Write;
    let text = if as_schema { format!("{:#}\n", kind.schema()) } else { keys::listed(&kind.entries()) };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_gpu_is_told_of_by_an_error() {
        let words = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10 GiB";
        let told = full_gpus_told(|| panic!("{words}")).unwrap_err().to_string();
        assert!(told.contains("is out of memory: 2.00 GiB was asked for"), "{told}");
        let other = catch_unwind(|| full_gpus_told(|| panic!("{}", "other"))).unwrap_err();
        assert_eq!(other.downcast_ref::<String>().map(String::as_str), Some("other"));
        assert!(full_gpus_told(|| Ok(())).is_ok());
    }
}
