//! Which lines of a test run reach the terminal: what is built and run, results and failures; not each `ok`.

/// Follows the output of `cargo test -- --show-output`, line by line.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    part: Part,
}

#[derive(Debug, Default, PartialEq)]
enum Part {
    /// Building, and one line per test.
    #[default]
    Progress,
    /// What passing tests printed.
    Successes,
    /// What failed tests printed.
    Failures,
}

impl Filter {
    /// Whether this line, the next of the output, is worth a reader's time.
    pub(crate) fn shows(&mut self, line: &str) -> bool {
        match line {
            "successes:" => self.part = Part::Successes,
            "failures:" => self.part = Part::Failures,
            _ if line.starts_with("test result: ") => self.part = Part::Progress,
            _ => {}
        }
        match self.part {
            Part::Successes => line.starts_with("SKIPPED:"),
            Part::Failures => true,
            Part::Progress => !is_routine(line),
        }
    }
}

fn is_routine(line: &str) -> bool {
    let one_of_many =
        line.starts_with("test ") && (line.ends_with(" ... ok") || line.contains(" ... ignored"));
    let no_tests = line.starts_with("test result: ok. 0 passed; 0 failed; 0 ignored");
    line.trim().is_empty() || one_of_many || no_tests || line.starts_with("running ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_failures_are_shown() {
        let output = "   Compiling a
     Running unittests src/lib.rs

running 3 tests
test good ... ok
test left_out ... ok
test bad ... FAILED

successes:

---- left_out stdout ----
SKIPPED: no ip
chatter

failures:

---- bad stdout ----
assertion failed

test result: FAILED. 2 passed; 1 failed; 0 ignored
test other ... ok";
        let mut filter = Filter::default();
        let shown: Vec<_> = output.lines().filter(|line| filter.shows(line)).collect();
        let expected = [
            "   Compiling a",
            "     Running unittests src/lib.rs",
            "test bad ... FAILED",
            "SKIPPED: no ip",
            "failures:",
            "",
            "---- bad stdout ----",
            "assertion failed",
            "",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored",
        ];
        assert_eq!(shown, expected);
    }
}
