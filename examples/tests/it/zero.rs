//! The four ways of training have the same losses, and each needs less memory than the one before.

use std::process::Command;

#[test]
fn each_stage_needs_less_memory_and_has_the_same_loss() {
    let mut command = Command::new("timeout");
    let output = command.args(["120", env!("CARGO_BIN_EXE_zero")]).env_remove("RANK").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), 5, "{said}");
    let number = |line: &str, before: &str| -> f64 {
        let words: Vec<_> = line.split_whitespace().collect();
        let place = words.iter().position(|word| *word == before).unwrap();
        words[place - 1].trim_end_matches(',').parse().unwrap()
    };
    let mut last = f64::INFINITY;
    for (line, (name, formula)) in
        lines[1..].iter().zip([("DDP", 64.0), ("ZeRO-1", 40.0), ("ZeRO-2", 28.0), ("ZeRO-3", 16.0)])
    {
        assert!(line.starts_with(name), "{line}");
        let bytes = number(line, "bytes");
        // Beside the states: slots of two units, and what libtorch and the allocator keep.
        assert!(bytes < last && bytes > 0.9 * formula && bytes < 1.3 * formula + 10.0, "{line}");
        assert!(line.ends_with(lines[1].split_once(", loss").unwrap().1), "{line} and {}", lines[1]);
        last = bytes;
    }
}
