//! The version of libtorch in this process.

use std::fs;
use std::path::Path;

use crate::cuda::libtorch_folder;

/// The version of libtorch that this crate is made for.
pub const LIBTORCH: &str = "2.11.0";

/// The version of the libtorch that this process has loaded, such as that of a Python package; it should be
/// [`LIBTORCH`]. `unknown` if no file beside the library names it.
///
/// It does not ask the library itself, which would then look for its CUDA libraries, and only once.
pub fn libtorch_version() -> String {
    let found = libtorch_folder().ok().and_then(|folder| version_beside(&folder));
    found.unwrap_or_else(|| "unknown".to_owned())
}

/// Reads the version beside a folder of libraries: from `version.py` of a Python package, or from `build-version`.
fn version_beside(folder: &Path) -> Option<String> {
    let root = folder.parent()?;
    let read = |name: &str| fs::read_to_string(root.join(name)).ok();
    let python = read("version.py").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        Some(line.trim_matches(['\'', '"']).to_owned())
    });
    let version = python.or_else(|| read("build-version"))?;
    // The build, such as `cu128`, follows a plus sign.
    Some(version.split('+').next()?.trim().to_owned())
}

/// Whether a program that was compiled for `expected` can use `found`. Patch releases are compatible.
pub(crate) fn fits(found: &str, expected: &str) -> bool {
    let minor = |version: &str| version.split('.').take(2).map(str::to_owned).collect::<Vec<_>>();
    found == "unknown" || minor(found) == minor(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_beside_the_library() {
        assert_eq!(libtorch_version(), LIBTORCH);
        let temp = tempfile::tempdir().unwrap();
        let lib = temp.path().join("lib");
        assert_eq!(version_beside(&lib), None);
        fs::write(temp.path().join("build-version"), "2.10.0+cu128\n").unwrap();
        assert_eq!(version_beside(&lib).as_deref(), Some("2.10.0"));
        fs::write(temp.path().join("version.py"), "x = 1\n__version__ = '2.12.1+cpu'\ncuda = None\n")
            .unwrap();
        assert_eq!(version_beside(&lib).as_deref(), Some("2.12.1"));
    }

    #[test]
    fn patch_releases_are_compatible() {
        assert!(fits("2.11.1", "2.11.0") && fits("unknown", "2.11.0"));
        assert!(!fits("2.12.0", "2.11.0") && !fits("2.1.0", "2.11.0"));
    }
}
