//! `drumline-train --check COMMAND …`: what is wrong with a configuration and its files, said once, by one process, before ranks are started.
//!
//! `drumline train` and the like ask this first. Ranks check again: other hosts may have other files.

use super::args::{Command, TestArgs, TrainArgs};
use super::checked::{CheckedTraining, check_writable};
use super::kind::{Kind, kind_of};
use super::{gpt, nmt, test, text, translate};

/// An error if the command could not even begin. Commands that start no ranks have nothing to check.
pub(super) fn check(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(args) => train(&args),
        Command::Test(args) => tested(&args),
        Command::Nmt(args) => nmt::check(args.config()),
        Command::Translate(args) => translate::check(&args),
        _ => Ok(()),
    }
}

fn train(args: &TrainArgs) -> anyhow::Result<()> {
    match kind_of(&args.run.cfg) {
        Kind::Images => {
            let checked = CheckedTraining::new(&args.run)?;
            check_writable("OUT_DIR", &checked.run.config.run.out_dir)
        }
        Kind::Translation => nmt::check(nmt::load_file(args)),
        Kind::Text => text::check_training(args),
        Kind::Gpt => gpt::check_training(args),
    }
}

fn tested(args: &TestArgs) -> anyhow::Result<()> {
    match kind_of(&args.run.cfg) {
        Kind::Images => test::check_images(args),
        Kind::Translation => Err(test::not_by_test()),
        Kind::Text => text::check_test(args),
        Kind::Gpt => gpt::check_test(args),
    }
}
