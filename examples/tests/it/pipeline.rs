//! The three ways train the network to one loss.

use std::process::Command;

#[test]
fn one_process_and_two_ranks_have_one_loss() {
    let mut command = Command::new("timeout");
    let output = command.args(["60", env!("CARGO_BIN_EXE_pipeline")]).env_remove("RANK").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let losses: Vec<f64> =
        said.lines().map(|line| line.split_once("loss ").unwrap().1.parse().unwrap()).collect();
    assert_eq!(losses.len(), 3, "{said}");
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-4 && *loss < 0.1), "{said}");
    assert_eq!(losses[1], losses[2], "GPipe does the same on any number of ranks: {said}");
}
