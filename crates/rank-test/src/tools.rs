//! Skips tests that need a tool or a permission that this machine may not have.

use std::io::Write;
use std::path::{Path, PathBuf};

/// If set to 1, a test that cannot run here fails instead of being skipped.
pub const REQUIRE_ALL: &str = "DRUMLINE_TEST_REQUIRE_ALL";

/// The variable that names a Python with PyTorch.
const PYTHON_WITH_TORCH: &str = "PEER_PYTHON";

/// The variable that names a Python with TensorBoard.
const PYTHON_WITH_TENSORBOARD: &str = "TENSORBOARD_PYTHON";

/// Whether the program `name` is installed. If not, prints `SKIPPED: …` on stderr, past the test harness's capture;
/// panics instead if [`REQUIRE_ALL`] is 1.
pub fn require_tool(name: &str) -> bool {
    let found = find(name).is_some();
    if !found {
        skipped(&format!("`{name}` is not installed"));
    }
    found
}

/// A Python with PyTorch, as set by `cargo xtask test`; without one the test is skipped.
pub fn python_with_torch() -> Option<PathBuf> {
    python(PYTHON_WITH_TORCH, "torch")
}

/// A Python with TensorBoard, as set by `cargo xtask test`; without one the test is skipped.
pub fn python_with_tensorboard() -> Option<PathBuf> {
    python(PYTHON_WITH_TENSORBOARD, "tensorboard")
}

fn python(variable: &str, module: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).filter(|value| !value.is_empty());
    if named.is_none() {
        skipped(&format!(
            "{variable} does not name a Python with {module}; try the one of `cargo xtask python {module}`"
        ));
    }
    named.map(PathBuf::from)
}

/// Prints that the running test is skipped, and why; panics instead if [`REQUIRE_ALL`] is 1.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    if std::env::var(REQUIRE_ALL).is_ok_and(|value| value == "1") {
        panic!("{test} cannot run here and {REQUIRE_ALL}=1: {why}");
    }
    // A closed stderr is not a reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// Finds the program in `PATH`, or in the folders of system tools.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(system);
    folders.find_map(|folder| Some(folder.join(name)).filter(|file| Path::is_file(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_is_found_and_a_missing_tool_is_not() {
        assert!(find("sh").is_some());
        assert!(find("no-such-tool-anywhere").is_none());
    }
}
