//! Eight ranks of three axes have the losses of one rank.

use std::process::Command;

use super::started::{numbers_after, output_of};

#[test]
fn eight_ranks_have_the_losses_of_one() {
    let mut command = Command::new("timeout");
    let said = output_of(command.args(["120", env!("CARGO_BIN_EXE_three_d")]));
    let [first, last] = ["loss ", " to "].map(|before| numbers_after(&said, before));
    assert_eq!((first.len(), last.len()), (9, 9), "{said}");
    assert!(last[0] < 0.7 * first[0], "it learns: {said}");
    for losses in [first, last] {
        assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 2e-4), "{said}");
    }
}
