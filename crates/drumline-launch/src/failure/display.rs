//! The text of the report: a headline, the details of the root cause, one line for each other rank, and advice.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use drumline_rendezvous::fault::Fault;

use super::repetition::{Shown, bare};
use super::{Blame, Failure, FailureReport, Standing, advice};
use crate::report::{Exit, signal_name};

/// A trace with more lines is cut in the middle.
const LONGEST_TRACE: usize = 100;
/// How many lines at its beginning are kept then.
const TRACE_HEAD: usize = 20;

impl Display for FailureReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.headline())?;
        write_root(&self.root, f)?;
        write_others(self, f)?;
        let advice = advice::on(self);
        advice.iter().try_for_each(|line| writeln!(f, "what to do: {line}"))
    }
}

impl FailureReport {
    /// The report's first line.
    pub fn headline(&self) -> String {
        let root = &self.root;
        let why = match (root.rehearsed(), root.oom, root.core_dumped) {
            (Some(fault), ..) => format!(" (the rehearsed fault {fault})"),
            (None, Some(oom), _) => format!(" ({oom})"),
            (None, None, true) => " (core dumped)".to_string(),
            (None, None, false) => String::new(),
        };
        if root.exit == Exit::Unkillable {
            return format!("rank {} on host {} could not be killed{why}", root.rank, root.host);
        }
        let how = match root.exit {
            Exit::Signal(number) => format!("killed by {}", signal(number)),
            exit => exit.to_string(),
        };
        format!(
            "rank {} on host {} failed first: {how} after {}{why}",
            root.rank,
            root.host,
            Time(root.after)
        )
    }
}

fn write_root(root: &Failure, f: &mut Formatter<'_>) -> fmt::Result {
    writeln!(f, "  process: pid {}, local rank {}", root.pid, root.local_rank)?;
    root.state.iter().try_for_each(|state| writeln!(f, "  state: {state}"))?;
    match root.blame {
        Some(Blame::Rank(rank)) => writeln!(f, "  it reports that rank {rank} was lost first")?,
        Some(Blame::SomeRank) => writeln!(f, "  it reports that another rank was lost first")?,
        None => {}
    }
    if let Some(problem) = &root.error_file_problem {
        writeln!(f, "  its error file cannot be used: {problem}")?;
    }
    let traced = root.trace.as_ref().map_or(&[][..], |trace| &trace.lines);
    let message = root.error_file.as_ref().map(|file| one_line(&file.message)).unwrap_or_default();
    if !message.is_empty() && !traced.iter().any(|line| line.contains(message.trim_end_matches('…'))) {
        writeln!(f, "  error: {message}")?;
    }
    write_trace(traced, f)?;
    write_last_lines(root, traced, &message, f)
}

fn write_trace(lines: &[String], f: &mut Formatter<'_>) -> fmt::Result {
    if !lines.is_empty() {
        writeln!(f, "  error:")?;
    }
    if lines.len() <= LONGEST_TRACE {
        return lines.iter().try_for_each(|line| writeln!(f, "    {line}"));
    }
    let left_out = lines.len() - LONGEST_TRACE;
    lines[..TRACE_HEAD].iter().try_for_each(|line| writeln!(f, "    {line}"))?;
    writeln!(f, "    … {left_out} lines left out …")?;
    lines[TRACE_HEAD + left_out..].iter().try_for_each(|line| writeln!(f, "    {line}"))
}

/// Writes the last lines of stderr, without what the report has already shown.
fn write_last_lines(root: &Failure, traced: &[String], message: &str, f: &mut Formatter<'_>) -> fmt::Result {
    if root.last_lines.is_empty() {
        return writeln!(f, "  it wrote nothing to stderr");
    }
    let again = if root.trace.is_some() { root.repeated.clone() } else { 0..0 };
    let shown = Shown::new(traced, message);
    let is_rehearsal =
        |line: &str| root.rehearsed().is_some_and(|fault| Fault::announced_by(line) == Some(*fault));
    let is_new = |line: &str| !shown.has(line) && !is_rehearsal(line);
    let numbered = root.last_lines.iter().enumerate();
    let kept: Vec<_> = numbered.filter(|(index, line)| again.contains(index) || is_new(line)).collect();
    if kept.iter().all(|(index, line)| again.contains(index) || line.trim().is_empty()) {
        return Ok(());
    }
    match kept.len() {
        1 => writeln!(f, "  the last line of its stderr:")?,
        number => writeln!(f, "  the last {number} lines of its stderr:")?,
    }
    for (index, line) in kept {
        if !again.contains(&index) {
            writeln!(f, "    {line}")?;
        } else if index == again.start {
            writeln!(f, "    … the error above, {} lines …", again.len())?;
        }
    }
    Ok(())
}

fn write_others(report: &FailureReport, f: &mut Formatter<'_>) -> fmt::Result {
    if report.num_ranks > 1 {
        let stopped = report.others.iter().filter(|other| other.standing == Standing::Stopped).count();
        let failed = report.others.len() - stopped;
        let succeeded = report.num_succeeded();
        writeln!(
            f,
            "of the other {} here: {failed} failed, {stopped} stopped by the launcher, {succeeded} succeeded",
            report.num_ranks - 1
        )?;
    }
    let (silent, described): (Vec<_>, Vec<_>) =
        report.others.iter().partition(|other| other.standing == Standing::Stopped && other.trace.is_none());
    let root_output = last_output(&report.root);
    described
        .into_iter()
        .try_for_each(|other| writeln!(f, "  {}", line_about(other, root_output.as_deref())))?;
    let mut by_host: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    silent.into_iter().for_each(|other| by_host.entry(&other.host).or_default().push(other.rank));
    by_host.iter().try_for_each(|(host, ranks)| {
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        writeln!(f, "  {word} {} on host {host}: stopped by the launcher", Ranks(ranks))
    })
}

/// One line about a rank that is not the root. Output that equals the root's is not repeated.
fn line_about(other: &Failure, root_output: Option<&str>) -> String {
    let who = format!("rank {} on host {}", other.rank, other.host);
    let oom = other.oom.map(|oom| format!(" ({oom})")).unwrap_or_default();
    let how = match (other.exit, &other.state) {
        (Exit::Unkillable, Some(state)) => format!("could not be killed: pid {} is {state}", other.pid),
        (Exit::Unkillable, None) => format!("could not be killed: pid {}", other.pid),
        (Exit::Signal(number), _) => format!("killed by {} after {}{oom}", signal(number), Time(other.after)),
        (exit, _) => format!("{exit} after {}", Time(other.after)),
    };
    let standing = match other.standing {
        Standing::Follower(Some(rank)) => format!(", because rank {rank} was gone"),
        Standing::Follower(None) => ", after the first failure".to_string(),
        _ => String::new(),
    };
    let said = match last_output(other) {
        Some(output) if root_output.is_some_and(|root| bare(root) == bare(&output)) => {
            "; said the same".to_string()
        }
        Some(output) => format!("; said: {output}"),
        None => String::new(),
    };
    format!("{who}: {how}{standing}{said}")
}

/// A rank's error in one line, or its last line if it has none.
fn last_output(other: &Failure) -> Option<String> {
    let summary = other.trace.as_ref().map(|trace| trace.summary.as_str());
    let file = other.error_file.as_ref().map(|file| file.message.as_str());
    let text = summary.or(file).or_else(|| other.last_lines.last().map(String::as_str))?;
    Some(one_line(text)).filter(|line| !line.is_empty())
}

/// The first line of a text from outside, without control codes and shortened.
fn one_line(text: &str) -> String {
    let mut lines = super::text::lines_of(text.as_bytes()).into_iter();
    let line = lines.find(|line| !line.trim().is_empty()).unwrap_or_default();
    match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// The name of a signal, or its number where it has none.
fn signal(number: i32) -> String {
    if (1..=31).contains(&number) { signal_name(number).to_string() } else { format!("signal {number}") }
}

/// `12.3 s`, `2 min 5 s`, `3 h 20 min`.
struct Time(Duration);

impl Display for Time {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0 => write!(f, "{:.3} s", self.0.as_secs_f64()),
            1..120 => write!(f, "{:.1} s", self.0.as_secs_f64()),
            seconds @ 120..7200 => write!(f, "{} min {} s", seconds / 60, seconds % 60),
            seconds => write!(f, "{} h {} min", seconds / 3600, seconds / 60 % 60),
        }
    }
}

/// Ascending ranks as `0, 2-5, 9`.
struct Ranks<'a>(&'a [usize]);

impl Display for Ranks<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        let texts: Vec<_> = runs
            .map(|run| match run {
                [one] => one.to_string(),
                [first, .., last] => format!("{first}-{last}"),
                [] => String::new(),
            })
            .collect();
        f.write_str(&texts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_ranks_and_signals_are_formatted() {
        let times = [(5, "0.005 s"), (12_345, "12.3 s"), (125_000, "2 min 5 s"), (12_000_000, "3 h 20 min")];
        for (millis, text) in times {
            assert_eq!(Time(Duration::from_millis(millis)).to_string(), text);
        }
        assert_eq!(Ranks(&[0, 2, 3, 4, 5, 9]).to_string(), "0, 2-5, 9");
        assert_eq!(Ranks(&[]).to_string(), "");
        assert_eq!([9, 64, 0].map(signal), ["SIGKILL", "signal 64", "signal 0"]);
    }
}
