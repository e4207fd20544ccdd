//! The bytes of a step, and that the guide tells the same.

use std::path::Path;
use std::process::Command;

#[test]
fn the_guide_has_what_the_program_counts() {
    let mut command = Command::new("timeout");
    let output = command.args(["120", env!("CARGO_BIN_EXE_dp_vs_ddp")]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/data-parallel.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let lines: Vec<_> = said.lines().filter(|line| !line.starts_with("Ddp, once")).collect();
    assert_eq!(lines.len(), 13, "{said}");
    for line in lines {
        assert!(guide.contains(line), "docs/data-parallel.md lacks: {line}");
    }
}
