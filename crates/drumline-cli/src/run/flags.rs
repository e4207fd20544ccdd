//! What holds for every flag of `run` and `launch`, said once: both spellings, the variable, prefixes, the last one wins.

use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command};
use drumline_rendezvous::worker_env::PET_PREFIX;

/// Makes a command's flags behave as torchrun's: `--log-dir` is also `--log_dir` and `--log-d`, and has its default in
/// `PET_LOG_DIR`.
pub(crate) fn as_torchrun(command: Command) -> Command {
    command.infer_long_args(true).args_override_self(true).mut_args(both_spellings_and_variable)
}

fn both_spellings_and_variable(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_string) else { return arg };
    let underscored = long.replace('-', "_");
    let variable = format!("{PET_PREFIX}{}", underscored.to_uppercase());
    let arg = if underscored == long { arg } else { arg.alias(underscored) };
    let arg = arg.env(variable).hide_env(true);
    match arg.get_action() {
        ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
        // `--node-rank -1` is a wrong number, not an unknown flag.
        _ => arg.allow_negative_numbers(true),
    }
}
