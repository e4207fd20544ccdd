//! What somebody can do about a failure: at most two lines, and only where they follow from what was seen.

use super::{Blame, Failure, FailureReport};
use crate::report::Exit;

const ILL: i32 = 4;
const ABRT: i32 = 6;
const BUS: i32 = 7;
const KILL: i32 = 9;
const SEGV: i32 = 11;
const XCPU: i32 = 24;

/// Lines of advice on the root cause.
pub(crate) fn on(report: &FailureReport) -> Vec<String> {
    let suspect = report.suspect().map(|suspect| {
        format!("look at rank {}: it had told of an error of its own when it was stopped", suspect.rank)
    });
    let root = &report.root;
    [by_exit(root), suspect.or_else(|| by_words(root))].into_iter().flatten().collect()
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
        Exit::Signal(XCPU) => "the limit on processor time was reached; look at `ulimit -t`".into(),
        Exit::Code(126) => {
            "a program that its script calls may not be executed; look at its permissions".into()
        }
        Exit::Code(127) => "a program that its script calls was not found; look at PATH".into(),
        Exit::Unkillable => format!(
            "pid {pid} is stuck in the kernel, mostly on a file system or a driver that does not answer; mend that or \
             restart the host"
        ),
        _ => return None,
    };
    Some(text)
}

fn by_words(root: &Failure) -> Option<String> {
    let is_bare_panic = |lines: &[String]| {
        lines.first().is_some_and(|line| line.starts_with("thread '"))
            && !lines.iter().any(|l| l == "stack backtrace:")
    };
    match (root.blame, &root.trace) {
        (Some(Blame::Rank(rank)), _) => {
            Some(format!("look for the cause in the report of rank {rank}'s host"))
        }
        (Some(Blame::SomeRank), _) => Some("look for the cause in the reports of the other hosts".into()),
        (None, Some(trace)) if is_bare_panic(&trace.lines) => {
            Some("set RUST_BACKTRACE=1 to see where the panic came from".into())
        }
        _ => None,
    }
}
