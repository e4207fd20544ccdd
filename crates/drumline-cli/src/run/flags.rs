//! What is the same for every flag of `run` and `launch`: both spellings, the variable, prefixes, the last one wins.

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command};
use drumline_rendezvous::worker_env::PET_PREFIX;

/// Makes a command's flags behave as torchrun's: `--log-dir` is also `--log_dir` and `--log-d`, and has its default in
/// `PET_LOG_DIR`.
pub(crate) fn as_torchrun(command: Command) -> Command {
    command.infer_long_args(true).args_override_self(true).mut_args(both_spellings_and_variable)
}

/// The heading of flags that are accepted only for the sake of other launchers' command lines: each has no effect, or is an error.
pub(super) const ACCEPTED: &str = "Accepted from";

/// Hides a flag without effect on commands that nobody uses with torchrun's or deepspeed's command lines.
pub(crate) fn hidden_if_without_effect(arg: Arg) -> Arg {
    let is_accepted = arg.get_help_heading().is_some_and(|heading| heading.starts_with(ACCEPTED));
    if is_accepted { arg.hide(true) } else { arg }
}

/// The variable that a wrong value came from, if it did not come from the command line.
pub(crate) fn variable_at_fault(error: &clap::Error, env: impl Fn(&str) -> Option<String>) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?.split_whitespace().find_map(|word| word.strip_prefix("--"))?;
    let name = variable(flag);
    let value = text(ContextKind::InvalidValue)?;
    (env(&name).as_deref() == Some(value)).then_some(name)
}

fn variable(long: &str) -> String {
    format!("{PET_PREFIX}{}", long.replace('-', "_").to_uppercase())
}

fn both_spellings_and_variable(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_string) else { return arg };
    let underscored = long.replace('-', "_");
    let arg = arg.env(variable(&long)).hide_env(true);
    let arg = if underscored == long { arg } else { arg.alias(underscored) };
    match arg.get_action() {
        ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
        // `--node-rank -1` is a wrong number, not an unknown flag.
        _ => arg.allow_negative_numbers(true),
    }
}
