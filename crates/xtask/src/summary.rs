//! The end of `check` and `test`: a table of the steps, what was left out, and one plain last line.
//!
//! In: what the steps printed. Out: counts. A step that is not a set of tests counts as one.

use crate::step::Outcome;
use std::collections::BTreeSet;
use std::process::ExitCode;

/// Set by `.ci/run`: a test that was left out is then a failure.
const REQUIRE_ALL: &str = "DRUMLINE_TEST_REQUIRE_ALL";

/// Counts over one or more test programs.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) ignored: usize,
}

/// Print the summary and say how the program shall end.
pub(crate) fn conclude(outcomes: &[Outcome]) -> ExitCode {
    let require_all = std::env::var_os(REQUIRE_ALL).is_some_and(|value| value == "1");
    let left_out: BTreeSet<String> = outcomes.iter().flat_map(|outcome| left_out(&outcome.output)).collect();
    let mut total = Counts::default();
    println!("{:<28} {:<7} {:>8}", "step", "result", "time");
    for outcome in outcomes {
        let counts = counts_of(outcome);
        total.passed += counts.passed;
        total.failed += counts.failed;
        println!("{}", row(outcome, counts));
    }
    if !left_out.is_empty() {
        println!("\nleft out, {} in all:", left_out.len());
        left_out.iter().for_each(|line| println!("  {line}"));
    }
    let longest =
        longest(outcomes.iter().map(|outcome| outcome.output.as_str()).collect::<String>().as_str());
    if !longest.is_empty() {
        println!("\nthe longest test programs:");
        longest.iter().for_each(|Program { seconds, name }| println!("  {seconds:>6.1} s  {name}"));
    }
    // The test program counted them as passed.
    total.passed = total.passed.saturating_sub(left_out.len());
    if require_all && !left_out.is_empty() {
        println!("  {REQUIRE_ALL}=1, so each counts as failed");
        total.failed += left_out.len();
    }
    println!("\n{} passed, {} failed", total.passed, total.failed);
    if total.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn row(outcome: &Outcome, counts: Counts) -> String {
    let verdict = if outcome.failure.is_none() { "ok" } else { "FAILED" };
    let seconds = outcome.took.as_secs_f64();
    let mut row = format!("{:<28} {verdict:<7} {seconds:>6.1} s", outcome.name);
    if count_tests(&outcome.output) != Counts::default() {
        row += &format!("  {} passed, {} failed", counts.passed, counts.failed);
        if counts.ignored > 0 {
            row += &format!(", {} ignored", counts.ignored);
        }
    }
    if let Some(failure) = &outcome.failure {
        row += &format!("  ({failure})");
    }
    row
}

/// The tests of a step; a step without any counts as one, and a failed step has at least one failure.
fn counts_of(outcome: &Outcome) -> Counts {
    let mut counts = count_tests(&outcome.output);
    if outcome.failure.is_some() {
        counts.failed = counts.failed.max(1);
    } else if counts == Counts::default() {
        counts.passed = 1;
    }
    counts
}

/// Add up the result lines of test programs.
///
/// A program says `running N tests` and later `test result: …`. Between the two may stand the output of
/// failed tests, which holds such lines too when a test starts its own program again as several ranks:
/// only a result over N tests ends the program.
pub(crate) fn count_tests(output: &str) -> Counts {
    let mut total = Counts::default();
    let mut running = None;
    for line in output.lines() {
        if running.is_none() {
            running = announced(line);
        } else if let Some(counts) = result(line)
            && running == Some(counts.passed + counts.failed + counts.ignored)
        {
            total.passed += counts.passed;
            total.failed += counts.failed;
            total.ignored += counts.ignored;
            running = None;
        }
    }
    total
}

/// How many of the longest programs are listed.
const LISTED: usize = 8;

/// A test program and how long its tests took.
#[derive(Debug, PartialEq)]
struct Program {
    seconds: f64,
    name: String,
}

/// The programs whose tests took longest, at least a second, the longest first.
fn longest(output: &str) -> Vec<Program> {
    let mut name = None;
    let mut programs = Vec::new();
    for line in output.lines() {
        if let Some(running) = line.trim_start().strip_prefix("Running ") {
            // `unittests src/lib.rs (target/debug/deps/drumline_comm-1)`
            let file = running.rsplit('/').next().unwrap_or_default();
            let crate_name = file.rsplit_once('-').map_or(file, |(name, _)| name);
            name = Some(format!("{crate_name} ({})", running.split(" (").next().unwrap_or_default()));
        } else if let Some(crate_name) = line.trim_start().strip_prefix("Doc-tests ") {
            name = Some(format!("{crate_name} (documentation)"));
        } else if let Some(seconds) = line.strip_prefix("test result: ").and_then(seconds)
            && let Some(name) = &name
        {
            programs.push(Program { seconds, name: name.clone() });
        }
    }
    programs.retain(|program| program.seconds >= 1.0);
    programs.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    programs.truncate(LISTED);
    programs
}

/// S of `…; finished in S s`.
fn seconds(result: &str) -> Option<f64> {
    result.rsplit_once("finished in ")?.1.strip_suffix('s')?.parse().ok()
}

/// N of `running N tests`.
fn announced(line: &str) -> Option<usize> {
    let (number, noun) = line.strip_prefix("running ")?.split_once(' ')?;
    if noun.starts_with("test") { number.parse().ok() } else { None }
}

/// The counts of `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; …`.
fn result(line: &str) -> Option<Counts> {
    let line = line.strip_prefix("test result: ")?;
    let (_, fields) = line.split_once(". ")?;
    let field = |name: &str| {
        let number = fields.split("; ").find_map(|field| field.strip_suffix(name))?;
        number.trim().parse().ok()
    };
    Some(Counts { passed: field("passed")?, failed: field("failed")?, ignored: field("ignored")? })
}

/// The tests that said `SKIPPED: why`, as `name: why` where the name is known. On a machine with one core the
/// words follow `test name ... ` on its line.
pub(crate) fn left_out(output: &str) -> BTreeSet<String> {
    let mut test = None;
    let mut found = BTreeSet::new();
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----")) {
            test = Some(name);
        } else if line.starts_with("test result: ") {
            test = None;
        } else if let Some((before, why)) = line.split_once("SKIPPED:")
            && (before.is_empty() || before.ends_with(" ... "))
        {
            let name = test.map(|name| format!("{name}: ")).unwrap_or_default();
            found.insert(format!("{name}{}", why.trim()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const TWO_PROGRAMS: &str = "
     Running unittests src/lib.rs (target/debug/deps/a-1)

running 3 tests
test a ... ok
test b ... ok
test c ... ignored

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests a

running 1 test
test src/lib.rs - (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
";

    const RANKS_INSIDE: &str = "
running 2 tests
test good ... ok
test four_ranks ... FAILED

failures:

---- four_ranks stdout ----
rank 0:
running 1 test
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.00s
rank 1:
running 1 test
test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.00s

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    fn outcome(failure: Option<&str>, output: &str) -> Outcome {
        let failure = failure.map(str::to_owned);
        Outcome { name: "x".to_owned(), failure, took: Duration::ZERO, output: output.to_owned() }
    }

    #[test]
    fn programs_are_added_up() {
        assert_eq!(count_tests(TWO_PROGRAMS), Counts { passed: 3, failed: 0, ignored: 1 });
        assert_eq!(count_tests(""), Counts::default());
        assert_eq!(count_tests("test result: what"), Counts::default());
    }

    #[test]
    fn the_longest_programs_come_first() {
        let slow = TWO_PROGRAMS.replace("in 0.00s", "in 2.50s").replace("in 0.10s", "in 61.00s");
        let found: Vec<_> =
            longest(&slow).into_iter().map(|program| (program.seconds, program.name)).collect();
        let expected = [(61.0, "a (documentation)".to_owned()), (2.5, "a (unittests src/lib.rs)".to_owned())];
        assert_eq!(found, expected);
        assert!(longest(TWO_PROGRAMS).is_empty());
    }

    #[test]
    fn results_of_ranks_inside_a_test_do_not_count() {
        assert_eq!(count_tests(RANKS_INSIDE), Counts { passed: 1, failed: 1, ignored: 0 });
    }

    #[test]
    fn a_failed_step_counts_even_without_a_failed_test() {
        assert_eq!(counts_of(&outcome(None, "")).passed, 1);
        assert_eq!(counts_of(&outcome(Some("crashed"), "")), Counts { passed: 0, failed: 1, ignored: 0 });
        assert_eq!(counts_of(&outcome(Some("signal: 11"), TWO_PROGRAMS)).failed, 1);
        assert_eq!(counts_of(&outcome(Some("exit status: 101"), RANKS_INSIDE)).failed, 1);
    }

    #[test]
    fn left_out_tests_are_named_with_the_reason() {
        let output = "
SKIPPED: said directly
test alone ... SKIPPED: alone: no root
a test that talks of SKIPPED: in its text
successes:

---- net::two_hosts stdout ----
SKIPPED: no `ip` command; try installing iproute2
SKIPPED: no `ip` command; try installing iproute2

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let found: Vec<_> = left_out(output).into_iter().collect();
        let expected =
            ["alone: no root", "net::two_hosts: no `ip` command; try installing iproute2", "said directly"];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_failure_shows_in_the_exit_code() {
        assert_eq!(conclude(&[outcome(None, TWO_PROGRAMS)]), ExitCode::SUCCESS);
        assert_eq!(conclude(&[outcome(None, ""), outcome(Some("exit status: 1"), "")]), ExitCode::FAILURE);
    }
}
