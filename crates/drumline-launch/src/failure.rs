//! The failure report: the rank that failed first, why, and its last output; then one line for each other rank.
//!
//! ```text
//!   JobReport ──────────────────────────────────┐
//!   Evidence of each rank: host, error file, ───┴▶ FailureReport (pure) ─▶ Display, exit_code
//!     kill for lack of memory, state (read at the edge)
//! ```
//!
//! *Root*: the first rank to fail by this host's monotonic clock. A rank that the launcher stopped is never the root.
//! A rank that reports the loss of another one is a *follower*: if that other rank failed on this node too, the blame
//! moves to it. Clocks of different hosts are not compared: a report covers the workers of one launcher.

mod advice;
mod display;
mod evidence;
mod follower;
mod kernel_log;
mod oom;
mod process_state;
mod rehearsal;
mod repetition;
mod small_file;
mod text;
mod trace;

use std::ops::Range;
use std::time::Duration;

use drumline_rendezvous::error_file::ErrorFile;
use drumline_rendezvous::fault::Fault;

use crate::report::{Exit, JobReport, RankReport, StopReason};
use follower::Blame;
use text::LAST_LINES;

pub use evidence::Evidence;
pub use oom::{LogPids, OomKill, OomSources, OomWatch};
pub use process_state::ProcessState;
pub use trace::Trace;

/// SIGABRT's number. C++ libraries end with it when a peer is gone.
const ABORT: i32 = 6;

/// The role of an unsuccessful rank in the job's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// It failed first.
    Root,
    /// It ended because another rank did: this one, if its output names it.
    Follower(Option<usize>),
    /// It also failed, later and for its own reason.
    Later,
    /// The launcher stopped it.
    Stopped,
    /// It could not be killed and still exists.
    Unkillable,
}

/// A rank that did not succeed.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Its rank in the job.
    pub rank: usize,
    /// Its rank on its host.
    pub local_rank: usize,
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
    /// Whether the kernel wrote its memory to a core file.
    pub core_dumped: bool,
    /// When it ended, counted from the start of the job.
    pub after: Duration,
    /// Its role in the job's failure.
    pub standing: Standing,
    /// What it wrote about its failure.
    pub error_file: Option<ErrorFile>,
    /// Why its error file could not be read, if that failed.
    pub error_file_problem: Option<String>,
    /// The out-of-memory kill by the kernel, if that is how it ended.
    pub oom: Option<OomKill>,
    /// Its state, if it could not be killed.
    pub state: Option<ProcessState>,
    /// Its traceback or panic: the error file's, or the last one on stderr.
    pub trace: Option<Trace>,
    /// Its last lines on stderr, without control codes.
    pub last_lines: Vec<String>,
    /// The last fault of `--fault` that it had.
    pub fault: Option<Fault>,
    /// The lines of `last_lines` that repeat `trace`.
    repeated: Range<usize>,
    blame: Option<Blame>,
}

/// Why a job failed. `Display` is the whole report.
#[derive(Debug, Clone)]
pub struct FailureReport {
    /// The rank that failed first.
    pub root: Failure,
    /// The other unsuccessful ranks, by rank.
    pub others: Vec<Failure>,
    /// Number of workers of this launcher, including the successful ones.
    pub num_ranks: usize,
    /// The successful ranks of this launcher.
    pub succeeded: Vec<usize>,
}

impl FailureReport {
    /// Finds the root cause; `None` if no rank failed by itself, as when the job's owner stopped it.
    pub fn new(report: &JobReport, evidence: &[Evidence]) -> Option<Self> {
        let unsuccessful = report.ranks.iter().filter(|rank| !rank.exit.is_success());
        let mut others: Vec<_> = unsuccessful.map(|rank| Failure::new(rank, evidence)).collect();
        let mut root = others.remove(root_index(&others, report.root_cause)?);
        root.standing = Standing::Root;
        let stop_began = stop_began(report);
        others.iter_mut().for_each(|other| other.standing = standing(other, stop_began));
        let succeeded =
            report.ranks.iter().filter(|rank| rank.exit.is_success()).map(|rank| rank.rank).collect();
        Some(Self { root, others, num_ranks: report.ranks.len(), succeeded })
    }

    /// The stopped rank that the root blames, if that rank had reported an error of its own before it was stopped.
    fn suspect(&self) -> Option<&Failure> {
        let is_blamed = |other: &&Failure| match self.root.blame {
            Some(Blame::Rank(rank)) => other.rank == rank,
            Some(Blame::SomeRank) => true,
            None => false,
        };
        let stopped = self.others.iter().filter(|other| other.standing == Standing::Stopped);
        stopped.filter(is_blamed).find(|other| other.has_own_error())
    }

    /// Whether this rank is one of the unsuccessful ranks in the report.
    pub fn includes(&self, rank: usize) -> bool {
        std::iter::once(&self.root).chain(&self.others).any(|failure| failure.rank == rank)
    }

    /// How many ranks succeeded.
    pub fn num_succeeded(&self) -> usize {
        self.succeeded.len()
    }
}

/// Which exit code a launcher returns when its job has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExitCodes {
    /// 1, as torchrun does.
    #[default]
    Torchrun,
    /// That of the root cause; for a signal, 128 plus its number, as shells do.
    Child,
}

/// The launcher's own exit code after this failure; never 0.
pub fn exit_code(report: &FailureReport, codes: ExitCodes) -> u8 {
    let number = match (codes, report.root.exit) {
        (ExitCodes::Child, Exit::Code(code)) => code,
        (ExitCodes::Child, Exit::Signal(signal)) => 128 + signal,
        _ => 1,
    };
    u8::try_from(number).ok().filter(|code| *code != 0).unwrap_or(1)
}

impl Failure {
    fn new(report: &RankReport, evidence: &[Evidence]) -> Self {
        let known = evidence.iter().find(|evidence| evidence.rank == report.rank).cloned();
        let known = known.unwrap_or_else(|| Evidence::unknown(report.rank));
        let lines = text::lines_of(&report.stderr);
        let fault = rehearsal::fault_of(report, &lines, &known.timed_faults);
        let ParsedOutput { trace, last_lines, repeated } = parse_output(&lines, known.error_file.as_ref());
        let blame = blame(report, trace.as_ref().map_or(&last_lines, |trace| &trace.lines));
        Self {
            rank: report.rank,
            local_rank: known.local_rank,
            host: known.host,
            pid: report.pid,
            exit: report.exit,
            core_dumped: report.core_dumped,
            after: report.ended_after,
            standing: Standing::Later,
            error_file: known.error_file,
            error_file_problem: known.error_file_problem,
            oom: known.oom,
            state: known.state,
            trace,
            last_lines,
            fault,
            repeated,
            blame,
        }
    }

    /// The injected fault that ended it, if one did.
    pub fn rehearsed(&self) -> Option<&Fault> {
        self.fault.as_ref().filter(|fault| rehearsal::explains(fault, self.exit))
    }

    fn failed_by_itself(&self) -> bool {
        matches!(self.exit, Exit::Code(_) | Exit::Signal(_))
    }

    /// Whether it reported an error that was caused neither by another rank nor by the launcher's stop.
    fn has_own_error(&self) -> bool {
        let message = self.error_file.as_ref().map(|file| file.message.as_str());
        let error = self.trace.as_ref().map(|trace| trace.summary.as_str()).or(message);
        self.blame.is_none() && error.is_some_and(|error| !follower::is_reaction_to_stop(error))
    }
}

/// What a rank printed about its failure, without repetition.
struct ParsedOutput {
    trace: Option<Trace>,
    last_lines: Vec<String>,
    repeated: Range<usize>,
}

/// Prefers the error file's trace over that of stderr. If they differ, the report shows both.
fn parse_output(lines: &[String], file: Option<&ErrorFile>) -> ParsedOutput {
    let first = lines.len().saturating_sub(LAST_LINES);
    let printed = trace::find(lines);
    let recorded = file.and_then(|file| Some(trace::from_text(file.callstack.as_ref()?, &file.message)));
    let is_same = |trace: &&Trace| recorded.as_ref().is_none_or(|recorded| trace.contains(&recorded.summary));
    let span = printed.as_ref().filter(is_same).map_or(0..0, |trace| trace.span.clone());
    let repeated = span.start.saturating_sub(first)..span.end.saturating_sub(first);
    ParsedOutput { trace: recorded.or(printed), last_lines: lines[first..].to_vec(), repeated }
}

/// The rank that a rank's error blames, or its last lines if it has no error. Followers exit or abort: a rank that
/// another signal ended had no chance to react to a loss.
fn blame(report: &RankReport, lines: &[String]) -> Option<Blame> {
    let could_react = matches!(report.exit, Exit::Code(_) | Exit::Signal(ABORT) | Exit::StoppedByUs);
    let blame = could_react.then(|| follower::blame(lines.iter().map(String::as_str))).flatten();
    blame.filter(|blame| *blame != Blame::Rank(report.rank))
}

/// The first rank to fail, or the rank at the end of its chain of blame; else one that could not be killed.
fn root_index(failures: &[Failure], first_seen: Option<usize>) -> Option<usize> {
    let culprit = |rank: usize| failures.iter().position(|f| f.rank == rank && f.failed_by_itself());
    let Some(first) = first_seen.and_then(culprit) else {
        return failures.iter().position(|failure| failure.exit == Exit::Unkillable);
    };
    let mut visited = vec![first];
    let mut index = first;
    while let Some(Blame::Rank(rank)) = failures[index].blame {
        let Some(next) = culprit(rank) else { break };
        if visited.contains(&next) {
            // They blame each other in a circle, so the clock decides.
            return Some(first);
        }
        visited.push(next);
        index = next;
    }
    match failures[index].blame {
        Some(Blame::SomeRank) => first_own_error(failures).or(Some(index)),
        _ => Some(index),
    }
}

/// The rank that a broken connection may mean: the first that failed with an error of its own.
fn first_own_error(failures: &[Failure]) -> Option<usize> {
    let with_error = |index: &usize| failures[*index].failed_by_itself() && failures[*index].has_own_error();
    (0..failures.len()).filter(with_error).min_by_key(|index| failures[*index].after)
}

/// When the launcher began to stop the others because one had failed.
fn stop_began(report: &JobReport) -> Option<Duration> {
    match report.stopped {
        Some(StopReason::Failure { rank }) => report.rank(rank).map(|rank| rank.ended_after),
        _ => None,
    }
}

fn standing(failure: &Failure, stop_began: Option<Duration>) -> Standing {
    match (failure.exit, failure.blame) {
        (Exit::StoppedByUs, _) => Standing::Stopped,
        (Exit::Unkillable, _) => Standing::Unkillable,
        (_, Some(Blame::Rank(rank))) => Standing::Follower(Some(rank)),
        (_, Some(Blame::SomeRank)) => Standing::Follower(None),
        _ if stop_began.is_some_and(|began| failure.after >= began) => Standing::Follower(None),
        _ => Standing::Later,
    }
}

#[cfg(test)]
mod tests;
