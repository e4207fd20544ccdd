//! Who may use whom among our crates: the picture of ARCHITECTURE.md as a table.
//!
//! In: the packages of `cargo metadata`. Out: one line per arrow that is not drawn.
//! An arrow is a direct dependency; tests may also use what their crate may, and `rank-test`.

use crate::workspace::{Dependency, Package};

/// A crate and those of ours that it may use. A new crate gets a line here and a place in the picture.
const MAY_USE: &[(&str, &[&str])] = &[
    (
        "drumline",
        &[
            "drumline-comm",
            "drumline-files",
            "drumline-launch",
            "drumline-observe",
            "drumline-parallel",
            "drumline-pickle",
            "drumline-plan",
            "drumline-rendezvous",
            "drumline-torch",
        ],
    ),
    (
        "drumline-bench",
        &[
            "drumline",
            "drumline-observe",
            "drumline-plan",
            "drumline-rendezvous",
            "drumline-text",
            "drumline-torch",
            "drumline-zoo",
        ],
    ),
    (
        "drumline-cli",
        &["drumline-launch", "drumline-comm", "drumline-observe", "drumline-plan", "drumline-rendezvous"],
    ),
    ("drumline-comm", &["drumline-rendezvous"]),
    (
        "drumline-examples",
        &[
            "drumline",
            "drumline-comm",
            "drumline-launch",
            "drumline-rendezvous",
            "drumline-torch",
            "drumline-text",
            "drumline-zoo",
        ],
    ),
    ("drumline-files", &[]),
    ("drumline-launch", &["drumline-rendezvous"]),
    ("drumline-observe", &["drumline-files"]),
    ("drumline-parallel", &["drumline-comm", "drumline-plan", "drumline-torch"]),
    ("drumline-pickle", &[]),
    ("drumline-plan", &[]),
    ("drumline-rendezvous", &["drumline-files"]),
    ("drumline-text", &["drumline-files"]),
    ("drumline-torch", &["drumline-comm"]),
    // Its tests start ranks as a launcher does.
    (
        "drumline-zoo",
        &[
            "drumline",
            "drumline-files",
            "drumline-launch",
            "drumline-observe",
            "drumline-text",
            "drumline-torch",
        ],
    ),
    ("rank-test", &["drumline-launch", "drumline-rendezvous"]),
    // Hosts of network namespaces, for long runs that are no tests.
    ("xtask", &["rank-test"]),
];

const TEST_CRATE: &str = "rank-test";

/// Each arrow between the packages that the table does not have.
pub(crate) fn problems(packages: &[Package]) -> Vec<String> {
    let is_ours = |dependency: &&Dependency| packages.iter().any(|p| p.name == dependency.name);
    let mut problems = Vec::new();
    for package in packages {
        let name = &package.name;
        let Some(allowed) = allowed(name) else {
            problems.push(format!(
                "{name} is not in the table; try adding it in check/arrows.rs and ARCHITECTURE.md"
            ));
            continue;
        };
        for dependency in package.dependencies.iter().filter(is_ours) {
            let for_tests = dependency.dev && dependency.name == TEST_CRATE && may_test_with_ranks(name);
            if !for_tests && !allowed.contains(&dependency.name.as_str()) {
                let kind = if dependency.dev { "in its tests" } else { "" };
                problems.push(format!("{name} may not use {} {kind}", dependency.name).trim_end().to_owned());
            }
        }
    }
    problems
}

fn allowed(name: &str) -> Option<&'static [&'static str]> {
    MAY_USE.iter().find(|(user, _)| *user == name).map(|(_, used)| *used)
}

/// What `rank-test` is made of cannot be tested with it: a fault there would hide itself.
fn may_test_with_ranks(name: &str) -> bool {
    name != TEST_CRATE && !allowed(TEST_CRATE).is_some_and(|used| used.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, uses: &[&str], tests_use: &[&str]) -> Package {
        let arrow = |name: &&str, dev| Dependency { name: (*name).to_owned(), dev };
        let mut dependencies: Vec<_> = uses.iter().map(|name| arrow(name, false)).collect();
        dependencies.extend(tests_use.iter().map(|name| arrow(name, true)));
        Package { name: name.to_owned(), dependencies, ..Package::default() }
    }

    #[test]
    fn the_drawn_graph_passes() {
        let packages = [
            package("drumline-rendezvous", &["mio"], &["proptest"]),
            package("drumline-comm", &["drumline-rendezvous"], &["rank-test"]),
            package("drumline-launch", &["drumline-rendezvous"], &[]),
            package("rank-test", &["drumline-launch"], &[]),
            package("drumline-cli", &["drumline-launch", "drumline-comm"], &["rank-test"]),
            package("xtask", &["clap"], &[]),
        ];
        assert_eq!(problems(&packages), Vec::<String>::new());
    }

    #[test]
    fn arrows_that_are_not_drawn_are_named() {
        let packages = [
            package("drumline-rendezvous", &["drumline-comm"], &["rank-test"]),
            package("drumline-comm", &["rank-test"], &["drumline-cli"]),
            package("drumline-cli", &[], &[]),
            package("rank-test", &[], &[]),
            package("xtask", &["drumline-comm"], &[]),
            package("surprise", &[], &[]),
        ];
        let found = problems(&packages);
        let expected = [
            "drumline-rendezvous may not use drumline-comm",
            "drumline-rendezvous may not use rank-test in its tests",
            "drumline-comm may not use rank-test",
            "drumline-comm may not use drumline-cli in its tests",
            "xtask may not use drumline-comm",
        ];
        assert_eq!(found[..5], expected);
        assert!(found[5].starts_with("surprise is not in the table"));
    }
}
