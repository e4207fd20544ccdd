//! Advice about a failure: at most two lines, and only if they follow from what was observed.

use drumline_rendezvous::fault::{Fault, Restarts};

use super::{Blame, Failure, FailureReport, rehearsal};
use crate::report::Exit;

const ILL: i32 = 4;
const ABRT: i32 = 6;
const BUS: i32 = 7;
const KILL: i32 = 9;
const SEGV: i32 = 11;
const XCPU: i32 = 24;

/// The lines of advice about the root cause.
pub(crate) fn on(report: &FailureReport) -> Vec<String> {
    let suspect = report.suspect().map(|suspect| {
        format!("look at rank {}: it had reported an error of its own before it was stopped", suspect.rank)
    });
    let root = &report.root;
    if let Some(fault) = root.rehearsed() {
        return vec![about_rehearsal(fault)];
    }
    let by_output = suspect
        .or_else(|| frozen(report))
        .or_else(|| by_output(report))
        .or_else(|| about_local_rank(&root.last_lines));
    [by_exit(root), by_output].into_iter().flatten().collect()
}

/// What to do after a fault that was injected on purpose.
fn about_rehearsal(fault: &Fault) -> String {
    let only = format!("nothing is wrong: {fault} is a fault that --fault injected");
    if fault.restarts == Restarts::Exactly(0) {
        format!("{only}; try --max-restarts N to rehearse the recovery as well")
    } else {
        only
    }
}

/// Names the rank that an injected fault has stopped: the others have waited for it in vain.
fn frozen(report: &FailureReport) -> Option<String> {
    let other = report.others.iter().find(|other| other.fault.as_ref().is_some_and(rehearsal::is_frozen))?;
    let fault = other.fault?;
    Some(format!("rank {} was stopped by the rehearsed fault {fault}", other.rank))
}

/// Advice if the program's argument parser and the launcher disagree on how a rank gets its local rank.
fn about_local_rank(lines: &[String]) -> Option<String> {
    let says = |text: &str| lines.iter().any(|line| line.contains(text));
    let knows = |flag: &str| says(&format!("[{flag} ")) || says(&format!(" {flag} "));
    let refused = |flag: &str| says(&format!("unrecognized arguments: {flag}="));
    let required = |flag: &str| {
        let names = |line: &String| {
            line.split_once("arguments are required: ").is_some_and(|(_, names)| names.contains(flag))
        };
        lines.iter().any(names)
    };
    let dash = "--local-rank";
    let underscore = "--local_rank";
    let text = if refused(dash) && knows(underscore) {
        "its parser has --local_rank; try drumline launch --rank-spelling underscore"
    } else if refused(underscore) && knows(dash) {
        "its parser has --local-rank; try drumline launch --rank-spelling dash"
    } else if refused(dash) || refused(underscore) {
        "its parser has no --local-rank; try drumline run, which passes none: LOCAL_RANK is in the environment"
    } else if required(dash) || required(underscore) {
        "its parser wants the local rank as an argument; try drumline launch, which passes it, instead of drumline run"
    } else {
        return None;
    };
    Some(text.to_owned())
}

fn by_exit(root: &Failure) -> Option<String> {
    let pid = root.pid;
    let text = match root.exit {
        Exit::Signal(KILL) if root.oom.is_some() => {
            "give the job more memory, or run smaller batches, fewer data loaders or fewer ranks on a host"
                .into()
        }
        Exit::Signal(KILL) => format!(
            "something outside this job sent SIGKILL; look for pid {pid} in `dmesg` (out of memory) and at the limits \
             of the batch system"
        ),
        Exit::Signal(BUS) => "SIGBUS often means that shared memory is full; look at `df -h /dev/shm`".into(),
        Exit::Signal(SEGV | ABRT | ILL) if root.core_dumped => {
            format!("look at the core file, with `coredumpctl debug {pid}` or `gdb PROGRAM CORE`")
        }
        Exit::Signal(SEGV | ABRT | ILL) => {
            "allow core files with `ulimit -c unlimited` and run it again".into()
        }
        Exit::Signal(XCPU) => "the limit on CPU time was reached; look at `ulimit -t`".into(),
        Exit::Code(126) => {
            "a program that its script calls may not be executed; look at its permissions".into()
        }
        Exit::Code(127) => match root.last_lines.iter().rev().find_map(|line| missing_library(line)) {
            Some(library) => without_library(library),
            None => "a program that its script calls was not found; look at PATH".into(),
        },
        Exit::Unkillable => format!(
            "pid {pid} is stuck in the kernel, usually on a file system or driver that does not answer; repair that or \
             restart the host"
        ),
        _ => return None,
    };
    Some(text)
}

/// The library that the loader could not find, if the line says so.
fn missing_library(line: &str) -> Option<&str> {
    let (_, after) = line.split_once("error while loading shared libraries: ")?;
    after.split_once(": cannot open shared object file").map(|(library, _)| library)
}

fn without_library(library: &str) -> String {
    let libtorch = ["libtorch", "libc10"].iter().any(|name| library.starts_with(name));
    let whose = if libtorch { "libtorch's folder lib" } else { "the folder that has it" };
    format!(
        "the program needs {library}, which is not where it was at build time; try LD_LIBRARY_PATH with {whose}, or build it again here"
    )
}

fn by_output(report: &FailureReport) -> Option<String> {
    let root = &report.root;
    let is_bare_panic = |lines: &[String]| {
        lines.first().is_some_and(|line| line.starts_with("thread '"))
            && !lines.iter().any(|l| l == "stack backtrace:")
    };
    match (root.blame, &root.trace) {
        (Some(Blame::Rank(rank)), _) if report.succeeded.contains(&rank) => Some(format!(
            "rank {rank} ended successfully before the others; try the same number of steps on all ranks, or Ddp's uneven inputs"
        )),
        // That rank is already in this report.
        (Some(Blame::Rank(rank)), _) if report.includes(rank) => None,
        (Some(Blame::Rank(rank)), _) => {
            Some(format!("look for the cause in the report of rank {rank}'s host"))
        }
        (Some(Blame::SomeRank), _) => Some("look for the cause in the reports of the other hosts".into()),
        (None, Some(trace)) if is_bare_panic(&trace.lines) => Some(about_panic(&trace.lines)),
        _ => None,
    }
}

/// A panic names its place. Its callers have names only in a build with symbols, which release builds of Drumline lack.
fn about_panic(lines: &[String]) -> String {
    let place = lines.first().and_then(|line| line.split_once("panicked at "));
    let place = place.map_or("the place of the panic", |(_, place)| place.trim_end_matches(':'));
    format!("look at {place}; RUST_BACKTRACE=1 also shows its callers, if the program was built with symbols")
}

#[cfg(test)]
mod tests {
    use super::{about_local_rank, about_panic, missing_library, without_library};

    #[test]
    fn a_missing_library_is_named() {
        let line = "./a: error while loading shared libraries: libtorch_cpu.so: cannot open shared object file: No such file or directory";
        assert_eq!(missing_library(line), Some("libtorch_cpu.so"));
        assert_eq!(missing_library("sh: 1: nope: not found"), None);
        assert!(without_library("libtorch_cpu.so").contains("libtorch's folder lib"));
        assert!(!without_library("libfoo.so.1").contains("libtorch"));
    }

    #[test]
    fn the_place_of_a_panic_is_in_the_advice() {
        let lines = ["thread 'main' (7) panicked at src/main.rs:2:5:", "boom"].map(str::to_owned);
        let expected = "look at src/main.rs:2:5; RUST_BACKTRACE=1 also shows its callers, if the program was built with \
                        symbols";
        assert_eq!(about_panic(&lines), expected);
    }

    fn advice(stderr: &str) -> String {
        let lines: Vec<_> = stderr.lines().map(str::to_owned).collect();
        about_local_rank(&lines).unwrap_or_default()
    }

    #[test]
    fn advice_follows_from_the_parsers_local_rank_flag() {
        let usage = "usage: train.py [-h] [--local_rank LOCAL_RANK]\n";
        let refused = |flag: &str| format!("train.py: error: unrecognized arguments: {flag}=0\n");
        let advice_for = |usage: &str, flag: &str| advice(&format!("{usage}{}", refused(flag)));
        assert!(advice_for(usage, "--local-rank").contains("--rank-spelling underscore"));
        let usage = "usage: train.py [-h] --local-rank LOCAL_RANK [--lr LR]\n";
        assert!(advice_for(usage, "--local_rank").contains("--rank-spelling dash"));
        assert!(advice_for("usage: train.py [-h] [--lr LR]\n", "--local-rank").contains("drumline run"));
        let required = "train.py: error: the following arguments are required: --lr, --local_rank\n";
        assert!(advice(required).contains("drumline launch"));
        for other in ["", "unrecognized arguments: --lr=0\n", "the following arguments are required: --lr\n"]
        {
            assert_eq!(advice(other), "", "{other}");
        }
    }
}
