//! The configuration of a DeepSpeed user, unchanged, trains on two ranks.

use std::process::Command;

use super::started::output_of;

fn run(args: &[&str]) -> String {
    output_of(Command::new("timeout").arg("120").arg(env!("CARGO_BIN_EXE_deepspeed")).args(args))
}

#[test]
fn a_configuration_full_of_auto_trains_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let said = run(&["--output-dir", folder.path().to_str().unwrap()]);
    for expected in [
        "optimizer.params.lr = 0.02, from --learning-rate",
        "fp16.enabled = false, from --fp16 and --bf16",
        "train_micro_batch_size_per_gpu = 16, from the loader's batch size",
        "ZeRO-2: 64 samples a step = 16 x 2 x 2 ranks",
        "saved global_step120/step-00000120",
        "resumes at step 120",
    ] {
        assert!(said.contains(expected), "{expected} in {said}");
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("latest")).unwrap(), "global_step120");
    let losses: Vec<f64> = said
        .lines()
        .filter_map(|line| line.split_once(": loss ")?.1.split_once(',')?.0.parse().ok())
        .collect();
    assert_eq!(losses.len(), 10, "{said}");
    assert!(losses[9] < 0.2 * losses[0], "{losses:?}");
}

#[test]
fn it_trains_in_16_bits_as_well() {
    for (flag, expected) in [("--fp16", "fp16.enabled = true"), ("--bf16", "fp16.enabled = false")] {
        let said = run(&[flag, "--num-train-epochs", "3"]);
        assert!(said.contains(expected) && said.contains("epoch 2: loss 0."), "{said}");
    }
}
