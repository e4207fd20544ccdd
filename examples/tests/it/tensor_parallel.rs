//! Two ranks with parts of the layers train to the loss of one rank.

use std::process::Command;

use super::started::{numbers_after, output_of};

#[test]
fn two_halves_have_the_loss_of_the_whole() {
    let mut command = Command::new("timeout");
    let said = output_of(command.args(["60", env!("CARGO_BIN_EXE_tensor_parallel")]));
    let losses = numbers_after(&said, "loss ");
    assert_eq!(losses.len(), 2, "{said}");
    assert!((losses[0] - losses[1]).abs() < 1e-5 && losses[0] < 0.1, "{said}");
    for sizes in ["1 rank: fc.weight [32, 1], back.weight [1, 32]", "fc.weight [16, 1], back.weight [1, 16]"]
    {
        assert!(said.contains(sizes), "{sizes}: {said}");
    }
}
