//! The machine and the day, for the head of a report.

use super::child;
use std::fs;
use std::process::Command;
use std::time::Duration;

/// Cores, processor, kernel.
pub(crate) fn describe() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|m| m.1);
    let model = model.unwrap_or("unknown processor");
    format!("{} cores, {model}, Linux {}", cores(), first_line("uname", &["-r"]))
}

/// Cores that we may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// As in the names of results.
pub(crate) fn today() -> String {
    first_line("date", &["+%F"])
}

/// The first line that a program prints, or `unknown`.
pub(crate) fn first_line(program: &str, args: &[&str]) -> String {
    output(program, args).lines().next().unwrap_or("unknown").trim().to_owned()
}

/// What a program prints; nothing if it fails.
pub(crate) fn output(program: &str, args: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(args);
    child::run(command, Duration::from_secs(20)).map(|printed| printed.stdout).unwrap_or_default()
}
