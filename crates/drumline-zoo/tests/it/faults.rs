//! `drumline train --fault`: a rank dies in the middle of training, with restarts and without.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rank_test::leftovers::Watch;

use super::running::{BUILT, Place, column};
use super::texts::weights;

/// A run has 10 steps in 2 epochs, with a checkpoint after each epoch; this step is in the second.
const FAULT: &str = "--fault rank=1,step=8,kill";
const LONGEST_SECONDS: &str = "120";

/// Runs `drumline train` with these flags on two ranks. Returns its exit code and all of its output.
fn train(drumline: &Path, place: &Place, flags: &str) -> (Option<i32>, String) {
    let watch = Watch::new();
    let (mark, value) = watch.mark();
    let mut command = Command::new("timeout");
    command.arg(LONGEST_SECONDS).arg(drumline).args(["train", "--nproc-per-node", "2"]);
    command.args(flags.split_whitespace()).arg("--cfg").arg(place.path("c.yaml"));
    let output = command.env("OMP_NUM_THREADS", "1").env(mark, value).output().unwrap();
    watch.none_within(Duration::from_secs(5)).unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    (output.status.code(), format!("{stdout}{stderr}"))
}

#[test]
fn a_rank_that_is_killed_costs_a_restart_and_no_bit() {
    let drumline = Path::new(BUILT).with_file_name("drumline");
    if !drumline.is_file() {
        return rank_test::skipped(
            "there is no `drumline` beside drumline-train; try cargo build -p drumline-cli",
        );
    }
    let [whole, resumed, ended] = [(); 3].map(|()| Place::new());
    let (code, said) = train(&drumline, &whole, "--fault rank=1,step=80,kill");
    assert!(code == Some(0) && !said.contains("drumline: fault"), "{code:?}: {said}");
    let missed = "warning: fault rank=1,step=80,kill did not happen: the last step of this process was 10";
    assert_eq!(said.matches(missed).count(), 1, "{said}");

    let (code, said) = train(&drumline, &resumed, &format!("--max-restarts 1 {FAULT}"));
    assert_eq!(code, Some(0), "{said}");
    for words in ["drumline: fault rank=1,step=8,kill", "SIGKILL", "[resume] == after step 5"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let [one, other] = [&whole, &resumed].map(|place| column(&place.events(), "step", "loss"));
    assert_eq!((one.len(), &one), (10, &other), "bit for bit");
    assert_eq!(weights(&whole), weights(&resumed));

    let (code, said) = train(&drumline, &ended, FAULT);
    assert_eq!(code, Some(1), "the control, without restarts: {said}");
    assert!(said.contains("SIGKILL") && said.contains("(the rehearsed fault rank=1,step=8,kill)"), "{said}");
    assert!(!said.contains("something outside"), "{said}");
    assert_ne!(weights(&whole), weights(&ended), "the control: it ended before");
}
