//! How errors are printed: each text once. An error that is the same on all ranks of a job is printed by rank 0 only.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use drumline_launch::{Signal, signal_name};

use crate::job::is_later_rank;
use crate::run::PlanError;

/// When a later rank ends, launchers stop the others: rank 0 has this long to print the error first.
const HEAD_START: Duration = Duration::from_secs(1);

/// The exit code for a wrong command line, the same as the parser's own.
const USAGE: u8 = 2;

/// A mistake in the user's input, the same on all ranks.
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

/// The end of a job that has printed its own errors.
#[derive(Debug, thiserror::Error)]
#[error("exit code {0}")]
pub(crate) struct ExitCodeOnly(pub(crate) u8);

/// The end of a command that was stopped by a signal. It shows in the exit code, as in a shell.
#[derive(Debug)]
pub(crate) struct Stopped(pub(crate) Signal);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by {}", signal_name(self.0.as_raw()))
    }
}

impl std::error::Error for Stopped {}

/// Prints a line to stderr. If that fails (a closed pipe, a full disk, a terminal that is gone), the program continues.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints an error, unless nobody would read it or rank 0 prints it too; returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(ExitCodeOnly(code)) = error.downcast_ref() {
        return ExitCode::from(*code);
    }
    if error.is::<Mistake>() && is_later_rank(|name| std::env::var(name).ok()) {
        std::thread::sleep(HEAD_START);
    } else if !is_broken_pipe(error) {
        print_line(&format!("error: {}", with_causes(error)));
    }
    if error.is::<PlanError>() {
        return ExitCode::from(USAGE);
    }
    let signal = error.downcast_ref::<Stopped>().and_then(|stopped| u8::try_from(stopped.0.as_raw()).ok());
    signal.map_or(ExitCode::FAILURE, |signal| ExitCode::from(128 + signal))
}

/// The same for a command line that cannot be parsed, and for `--help`. `variable` is the one that holds the wrong value, if it
/// did not come from the command line.
pub(crate) fn report_usage(error: &clap::Error, variable: Option<&str>) -> ExitCode {
    if is_later_rank(|name| std::env::var(name).ok()) {
        std::thread::sleep(HEAD_START);
    } else {
        // If stderr cannot be written to, there is no other place to report that.
        let _ = error.print();
        if let Some(variable) = variable {
            print_line(&format!("note: the value is that of the variable {variable}"));
        }
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The error and its causes. A cause that is already contained in the text is not repeated.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// The reader of our output has closed the pipe: there is nothing to report.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn each_cause_is_printed_once() {
        let error = anyhow!("no such file").context("cannot read x: no such file").context("cannot start");
        assert_eq!(with_causes(&error), "cannot start: cannot read x: no such file");
        assert_eq!(with_causes(&anyhow!("deep").context("high")), "high: deep");
        assert_eq!(with_causes(&anyhow!("alone")), "alone");
    }

    #[test]
    fn a_closed_pipe_is_recognised_below_its_context() {
        let error =
            Err::<(), _>(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).context("cannot print");
        assert!(is_broken_pipe(&error.unwrap_err()));
        assert!(!is_broken_pipe(&anyhow!("cannot print")));
    }
}
