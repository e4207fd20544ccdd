//! Running one step of `check` or `test`: a command with a deadline, its output shown and kept.
//!
//! ```text
//!   command ──stdout+stderr, one pipe──▶ reader thread ──lines──▶ log file   (all of them)
//!                                                             └─▶ terminal   (those worth showing)
//! ```
//! In: a command. Out: an [`Outcome`]. The command shares our terminal's process group, so that
//! Ctrl-C reaches all of it; at the deadline it is killed with everything it started.

use crate::family::kill_with_descendants;
use anyhow::Context;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// After the command has ended, how long a process it left behind may keep the pipe open.
const STRAGGLER_GRACE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(100);

/// What came of a step.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    /// Why it failed; `None` when it did not.
    pub(crate) failure: Option<String>,
    pub(crate) took: Duration,
    /// All that it printed; empty for steps that are not commands.
    pub(crate) output: String,
}

impl Outcome {
    /// Run a check that is a function; it answers with the problems found, one line each.
    pub(crate) fn of(name: &str, check: impl FnOnce() -> anyhow::Result<Vec<String>>) -> Self {
        let start = Instant::now();
        let failure = match check() {
            Ok(problems) if problems.is_empty() => None,
            Ok(problems) => {
                problems.iter().for_each(|problem| println!("  {problem}"));
                Some(format!("{} problems", problems.len()))
            }
            Err(error) => Some(format!("{error:#}")),
        };
        report(name, failure.as_deref());
        Self { name: name.to_owned(), failure, took: start.elapsed(), output: String::new() }
    }
}

/// A command to run, with its deadline.
pub(crate) struct Step<'a> {
    pub(crate) name: &'a str,
    pub(crate) command: Command,
    pub(crate) deadline: Duration,
    /// Folder of the log files.
    pub(crate) logs: &'a Path,
    /// Which lines reach the terminal.
    pub(crate) shown: Box<dyn FnMut(&str) -> bool>,
}

impl Step<'_> {
    /// Run it to its end or its deadline.
    pub(crate) fn run(self) -> Outcome {
        let start = Instant::now();
        println!("== {}: {}", self.name, describe(&self.command));
        let name = self.name.to_owned();
        let mut output = String::new();
        let failure = match self.run_logged(&mut output) {
            Ok(failure) => failure,
            Err(error) => Some(format!("{error:#}")),
        };
        report(&name, failure.as_deref());
        Outcome { name, failure, took: start.elapsed(), output }
    }

    fn run_logged(mut self, output: &mut String) -> anyhow::Result<Option<String>> {
        fs::create_dir_all(self.logs).with_context(|| format!("cannot create {}", self.logs.display()))?;
        let log_path = self.logs.join(format!("{}.log", self.name.replace([' ', '/'], "-")));
        let mut log =
            File::create(&log_path).with_context(|| format!("cannot write {}", log_path.display()))?;
        let (mut child, lines) = spawn(&mut self.command)?;
        let end = Instant::now() + self.deadline;
        let status = follow(&mut child, &lines, end, |line| {
            // A full disk must not stop the tests: the log is a convenience.
            let _ = writeln!(log, "{line}");
            if (self.shown)(line) {
                println!("{line}");
            }
            output.push_str(line);
            output.push('\n');
        })?;
        Ok(match status {
            Some(status) if status.success() => None,
            Some(status) => Some(format!("{status}; all output in {}", log_path.display())),
            None => Some(format!("stopped after {:?}; all output in {}", self.deadline, log_path.display())),
        })
    }
}

/// For [`Step::shown`]: every line.
pub(crate) fn everything() -> Box<dyn FnMut(&str) -> bool> {
    Box::new(|_| true)
}

/// Start the command with both outputs in one pipe, so that their order is kept.
fn spawn(command: &mut Command) -> anyhow::Result<(Child, Receiver<String>)> {
    let (reader, writer) = io::pipe().context("cannot make a pipe")?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn().with_context(|| format!("cannot start {}", describe(command)))?;
    // `command` still owns our writing ends; without this the pipe would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, lines) = mpsc::channel();
    // Not joined: it ends with the pipe, which a process we do not know of may hold open.
    std::thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    Ok((child, lines))
}

/// Hand on each line until the command ends. `None`: it ran past `end` and was killed.
fn follow(
    child: &mut Child,
    lines: &Receiver<String>,
    end: Instant,
    mut on_line: impl FnMut(&str),
) -> io::Result<Option<ExitStatus>> {
    let mut status = None;
    let mut last_sign = Instant::now();
    loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => {
                on_line(&line);
                last_sign = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) if status.is_some() => return Ok(status),
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
            Err(RecvTimeoutError::Timeout) if status.is_some() && last_sign.elapsed() > STRAGGLER_GRACE => {
                return Ok(status);
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if status.is_none() {
            status = child.try_wait()?;
            if status.is_none() && Instant::now() > end {
                kill_with_descendants(child.id());
                child.wait()?;
                return Ok(None);
            }
        }
    }
}

fn report(name: &str, failure: Option<&str>) {
    match failure {
        None => println!("== {name}: ok\n"),
        Some(failure) => println!("== {name}: FAILED: {failure}\n"),
    }
}

/// The command as one would type it.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration) -> (Option<String>, String, Duration) {
        let unique = script.len() + usize::try_from(std::process::id()).unwrap() * 1000;
        let logs = std::env::temp_dir().join(format!("xtask-step-{unique}"));
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let outcome = Step { name: "sh", command, deadline, logs: &logs, shown: Box::new(|_| false) }.run();
        fs::remove_dir_all(&logs).unwrap();
        (outcome.failure, outcome.output, outcome.took)
    }

    fn is_alive(pid: &str) -> bool {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z"))
    }

    #[test]
    fn both_outputs_are_kept_in_order() {
        let (failure, output, _) = shell("echo one; echo two >&2; echo three", Duration::from_secs(20));
        assert_eq!((failure, output.as_str()), (None, "one\ntwo\nthree\n"));
    }

    #[test]
    fn a_failure_carries_the_status() {
        let (failure, ..) = shell("exit 3", Duration::from_secs(20));
        assert!(failure.unwrap().contains("exit status: 3"));
    }

    #[test]
    fn the_deadline_ends_grandchildren_too() {
        let (failure, output, took) =
            shell("sh -c 'echo $$; sleep 60'; echo late", Duration::from_millis(500));
        assert!(failure.unwrap().contains("stopped after"));
        assert!(took < Duration::from_secs(20));
        let patience = Instant::now() + Duration::from_secs(10);
        while is_alive(output.trim()) {
            assert!(Instant::now() < patience, "process {output} is still alive");
            std::thread::sleep(TICK);
        }
    }

    #[test]
    fn a_process_left_behind_does_not_hold_us() {
        let (failure, output, took) = shell("sleep 10 & echo done", Duration::from_secs(60));
        assert_eq!((failure, output.as_str()), (None, "done\n"));
        assert!(took < Duration::from_secs(8));
    }
}
