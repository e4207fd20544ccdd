//! How a failure is told: each text once, and what all ranks of a job would say alike by rank 0 alone.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use drumline_launch::{Signal, signal_name};

use crate::job::is_later_rank;
use crate::run::PlanError;

/// A later rank that ends makes launchers stop the others: rank 0 gets this long to speak before.
const HEAD_START: Duration = Duration::from_secs(1);

/// The exit code of a command line that cannot be carried out, as the parser's own.
const USAGE: u8 = 2;

/// Something wrong with what the user gave, the same on all ranks.
#[derive(Debug)]
pub(crate) struct Mistake(String);

impl Mistake {
    pub(crate) fn new(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Mistake {}

/// The end of a job that has told by itself what went wrong.
#[derive(Debug, thiserror::Error)]
#[error("exit code {0}")]
pub(crate) struct ExitCodeOnly(pub(crate) u8);

/// The end of a command that a signal has stopped: told by its exit code, as a shell does.
#[derive(Debug)]
pub(crate) struct Stopped(pub(crate) Signal);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by {}", signal_name(self.0.as_raw()))
    }
}

impl std::error::Error for Stopped {}

/// Writes a line to stderr. One that cannot be written to (a closed pipe, a full disk, a terminal that is gone) ends
/// nothing.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Says what went wrong, unless nobody would read it or rank 0 says it too.
pub(crate) fn tell(error: &anyhow::Error) -> ExitCode {
    if let Some(ExitCodeOnly(code)) = error.downcast_ref() {
        return ExitCode::from(*code);
    }
    if error.is::<Mistake>() && is_later_rank(|name| std::env::var(name).ok()) {
        std::thread::sleep(HEAD_START);
    } else if !is_broken_pipe(error) {
        say(&format!("error: {}", in_words(error)));
    }
    if error.is::<PlanError>() {
        return ExitCode::from(USAGE);
    }
    let signal = error.downcast_ref::<Stopped>().and_then(|stopped| u8::try_from(stopped.0.as_raw()).ok());
    signal.map_or(ExitCode::FAILURE, |signal| ExitCode::from(128 + signal))
}

/// The same for a command line that cannot be read, and for `--help`. `variable`: where the wrong value stands, if not
/// on the command line.
pub(crate) fn tell_usage(error: &clap::Error, variable: Option<&str>) -> ExitCode {
    if is_later_rank(|name| std::env::var(name).ok()) {
        std::thread::sleep(HEAD_START);
    } else {
        // Nobody is left to hear of a stderr that cannot be written to.
        let _ = error.print();
        if let Some(variable) = variable {
            say(&format!("note: the value is that of the variable {variable}"));
        }
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The error and its causes; a cause that is already part of what was said is not said again.
fn in_words(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.is_empty() {
        true => cause,
        false if said.contains(&cause) => said,
        false => format!("{said}: {cause}"),
    })
}

/// Whoever read our output has seen enough: nothing to tell.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn each_cause_is_told_once() {
        let error = anyhow!("no such file").context("cannot read x: no such file").context("cannot start");
        assert_eq!(in_words(&error), "cannot start: cannot read x: no such file");
        assert_eq!(in_words(&anyhow!("deep").context("high")), "high: deep");
        assert_eq!(in_words(&anyhow!("alone")), "alone");
    }

    #[test]
    fn a_closed_pipe_is_known_behind_its_context() {
        let error =
            Err::<(), _>(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).context("cannot print");
        assert!(is_broken_pipe(&error.unwrap_err()));
        assert!(!is_broken_pipe(&anyhow!("cannot print")));
    }
}
