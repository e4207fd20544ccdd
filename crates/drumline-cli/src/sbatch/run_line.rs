//! The part of the command line that is for `drumline run`: every flag that was typed, and the program.
//!
//! The flags are parsed as `run` does, so that a wrong one is an error now and not when the job starts, and are passed on in
//! their full spelling.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::run::RunArgs;

/// The name of the argument for the program and what follows it.
const PROGRAM: &str = "command";

#[derive(Debug)]
pub(crate) struct RunLine {
    /// The parsed arguments, checked as far as a login node can.
    pub(crate) args: RunArgs,
    /// The flags that were typed, as `--name` or `--name=value`.
    pub(crate) flags: Vec<OsString>,
    /// The program and its arguments.
    pub(crate) program: Vec<OsString>,
}

impl RunLine {
    /// The value of a flag, if it was typed.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        let typed = self.flags.iter().rev().filter_map(|flag| flag.to_str());
        let mut pairs = typed.filter_map(|flag| flag.strip_prefix("--")?.split_once('='));
        pairs.find(|(flag, _)| *flag == name).map(|(_, value)| value)
    }
}

impl FromArgMatches for RunLine {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let command = RunArgs::augment_args(Command::new("run"));
        let flags = command.get_arguments().flat_map(|arg| typed(arg, matches)).collect();
        let program = matches.get_raw(PROGRAM).into_iter().flatten().map(OsString::from).collect();
        Ok(Self { args: RunArgs::from_arg_matches(matches)?, flags, program })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for RunLine {
    fn augment_args(command: Command) -> Command {
        RunArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        RunArgs::augment_args_for_update(command)
    }
}

/// The words that pass a flag on; none if it was not typed.
pub(crate) fn typed(arg: &Arg, matches: &ArgMatches) -> Vec<OsString> {
    let id = arg.get_id().as_str();
    let Some(long) = arg.get_long() else { return Vec::new() };
    if matches.value_source(id) != Some(ValueSource::CommandLine) {
        return Vec::new();
    }
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return vec![format!("--{long}").into()];
    }
    let with_value = |value| {
        let mut flag = OsString::from(format!("--{long}="));
        flag.push(value);
        flag
    };
    matches.get_raw(id).into_iter().flatten().map(with_value).collect()
}
