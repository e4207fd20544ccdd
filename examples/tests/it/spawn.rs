//! The line that several processes of one program fit together.

use std::process::Command;
use std::time::Duration;

use drumline_launch::{LocalJob, Output};

const SPAWN: &str = env!("CARGO_BIN_EXE_spawn");
const LINE: &str = "y = 3.000 x + 1.000 after 2000 steps";

#[test]
fn all_ranks_find_the_line() {
    for ranks in ["1", "4"] {
        let mut command = Command::new("timeout");
        let output = command.args(["60", SPAWN, ranks]).env_remove("RANK").output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let mut lines: Vec<_> = said.lines().collect();
        lines.sort_unstable();
        let number: usize = ranks.parse().unwrap();
        let expected: Vec<_> = (0..number).map(|rank| format!("rank {rank} of {ranks}: {LINE}")).collect();
        assert_eq!(lines, expected);
    }
}

#[test]
fn a_launchers_ranks_are_taken() {
    let job = LocalJob::new(2, SPAWN, ["2"]).output(Output::Capture).deadline(Duration::from_secs(60));
    let report = job.start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    assert_eq!(report.ranks[1].stdout_text(), format!("rank 1 of 2: {LINE}\n"));
}
