//! `cargo xtask test`: everything that must hold before a change is kept.
//!
//! ```text
//!   check ─▶ docs ─▶ book ─▶ tests ─▶ loom ─▶ fuzz ─▶ summary      a failed step does not stop the next
//!   check ─▶ unit tests ─▶ two ranks that train ─▶ summary    with --quick, for people at work
//! ```

mod filter;
mod fuzz;
mod two_ranks;

use crate::book;
use crate::check;
use crate::python;
use crate::step::{Outcome, Step, everything};
use crate::summary;
use crate::workspace::{Package, Workspace, cargo};
use filter::Filter;
use std::process::ExitCode;
use std::time::Duration;

/// Everything: check, docs, all tests, loom, short fuzz runs; one summary at the end
#[derive(clap::Args, Debug)]
pub(crate) struct TestArgs {
    /// Only check, unit tests and a short training on two ranks: some minutes once everything was built before
    #[arg(long)]
    quick: bool,
}

/// Run the steps and print their summary.
pub(crate) fn run(workspace: &Workspace, args: &TestArgs) -> ExitCode {
    let mut outcomes = check::steps(workspace);
    if args.quick {
        outcomes.push(unit_tests(workspace));
        outcomes.extend(two_ranks::steps(workspace));
    } else {
        outcomes.push(docs(workspace));
        outcomes.push(book::step(workspace));
        outcomes.push(tests(workspace));
        outcomes.extend(loom(workspace));
        outcomes.extend(fuzz::steps(workspace));
    }
    summary::conclude(&outcomes)
}

fn unit_tests(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    command.args(["test", "--workspace", "--lib", "--bins", "--no-fail-fast", "--", "--show-output"]);
    let deadline = Duration::from_secs(20 * 60);
    Step { name: "unit tests", command, deadline, logs: &workspace.logs(), shown: quietly() }.run()
}

fn docs(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    command.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    let deadline = Duration::from_secs(10 * 60);
    Step { name: "docs", command, deadline, logs: &workspace.logs(), shown: everything() }.run()
}

/// Unit, integration and documentation tests. `--show-output` lets a passing test say that it was left out.
fn tests(workspace: &Workspace) -> Outcome {
    let mut command = cargo();
    for module in python::Module::ALL {
        match python::with(module) {
            Ok(python) => drop(command.env(module.variable(), python)),
            Err(error) => println!("no {module:?} to test with, so its tests are left out: {error:#}"),
        }
    }
    command.args(["test", "--workspace", "--no-fail-fast", "--", "--show-output"]);
    // From nothing, on two busy cores, compiling alone takes half of it.
    let deadline = Duration::from_secs(65 * 60);
    Step { name: "tests", command, deadline, logs: &workspace.logs(), shown: quietly() }.run()
}

/// The tests named `loom…` of every crate that has a `cfg(loom)`, in a target folder of their own.
fn loom(workspace: &Workspace) -> Vec<Outcome> {
    let has_loom =
        |package: &&Package| check::mentions(workspace, &format!("crates/{}/src/", package.name), "loom");
    let packages = workspace.packages.iter().filter(|package| package.name != "xtask");
    packages.filter(has_loom).map(|package| loom_of(workspace, &package.name)).collect()
}

fn loom_of(workspace: &Workspace, package: &str) -> Outcome {
    let mut command = cargo();
    command.args(["test", "--release", "--package", package, "--lib", "loom"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", workspace.target_dir.join("loom"));
    let deadline = Duration::from_secs(10 * 60);
    let name = format!("loom {package}");
    let mut outcome =
        Step { name: &name, command, deadline, logs: &workspace.logs(), shown: quietly() }.run();
    if outcome.failure.is_none() && summary::count_tests(&outcome.output).passed == 0 {
        outcome.failure = Some("no test has `loom` in its name".to_owned());
    }
    outcome
}

fn quietly() -> Box<dyn FnMut(&str) -> bool> {
    let mut filter = Filter::default();
    Box::new(move |line| filter.shows(line))
}
