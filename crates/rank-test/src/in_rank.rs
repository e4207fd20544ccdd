//! The rank's side of a test: runs the body, and ends the process with its result.
//!
//! The test binary is executed again with `--exact` and the test's own name, so libtest calls the same function. The
//! variable [`NAME`] shows that this process is a rank. It never returns to libtest, which would print its own result,
//! and no other test runs.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The variable with the name of the test whose body this process runs.
pub(crate) const NAME: &str = "RANK_TEST_NAME";

/// Printed before the body, to separate libtest's output from the rank's.
pub(crate) const START: &str = "rank-test: the body starts here\n";

/// libtest's arguments for running the one test `name` in a rank.
pub(crate) fn arguments(name: &str) -> [&str; 6] {
    ["--exact", name, "--nocapture", "--quiet", "--include-ignored", "--test-threads=1"]
}

/// libtest's name of the test `name` in the module `path`: the path without the crate's name.
pub(crate) fn libtest_name(path: &str, name: &str) -> String {
    match path.split_once("::") {
        Some((_crate, modules)) => format!("{modules}::{name}"),
        None => name.to_string(),
    }
}

/// Whether this process is a rank of the test `name`.
pub(crate) fn is_rank_of(name: &str) -> bool {
    match std::env::var(NAME) {
        Ok(ours) if ours == name => true,
        Ok(ours) => panic!("this process is a rank of the test `{ours}` and must not run `{name}`"),
        Err(_) => false,
    }
}

/// Runs the body and exits: 0 if it returned, 1 if it returned an error, 101 if it panicked.
pub(crate) fn run(body: impl FnOnce() -> anyhow::Result<()>) -> ! {
    print!("\n{START}");
    let code = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("Error: {error:?}");
            1
        }
        Err(_already_printed) => 101,
    };
    // The parent may have closed the pipe; the result is the exit code.
    let _ = std::io::stdout().flush();
    std::process::exit(code)
}

/// What the rank itself printed, without libtest's output before it. `None` if the body never started.
pub(crate) fn own_output(stdout: &[u8]) -> Option<Vec<u8>> {
    let at = stdout.windows(START.len()).position(|window| window == START.as_bytes())?;
    Some(stdout[at + START.len()..].to_vec())
}

/// Whether libtest reported that it found no test, which it counts as a success.
pub(crate) fn found_no_test(stdout: &[u8]) -> bool {
    String::from_utf8_lossy(stdout).contains("running 0 tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtest_names_have_no_crate_name() {
        assert_eq!(libtest_name("it", "works"), "works");
        assert_eq!(libtest_name("it::faults", "works"), "faults::works");
        assert_eq!(libtest_name("drumline_comm::ring::tests", "works"), "ring::tests::works");
        assert_eq!(libtest_name(module_path!(), "works"), "in_rank::tests::works");
    }

    #[test]
    fn output_before_the_body_is_dropped() {
        let printed = format!("\nrunning 1 test\n\n{START}hello\n");
        assert_eq!(own_output(printed.as_bytes()).unwrap(), b"hello\n");
        assert_eq!(own_output(b"running 0 tests\n"), None);
    }
}
