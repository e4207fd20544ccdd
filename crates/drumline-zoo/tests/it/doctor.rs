//! `drumline-train doctor gpu` where there is no GPU: it says what is missing, and its exit code does too.

use std::process::{Command, Output};

use drumline::worker_env;

/// On a machine with GPUs they are hidden.
fn doctor(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline-train"));
    command.args(["doctor", "gpu"]).args(words).env("CUDA_VISIBLE_DEVICES", "");
    for name in [worker_env::RANK, worker_env::WORLD_SIZE, worker_env::SLURM_PROCID] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

#[test]
fn a_machine_without_a_gpu_is_told_what_is_missing() {
    let output = doctor(&[]);
    assert_eq!(output.status.code(), Some(1));
    let (told, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("libtorch 2.11.0") && told.contains("driver      cannot be used"), "{told}");
    let problem = told.lines().find(|line| line.starts_with("problem     ")).unwrap();
    assert!(problem.contains("NVIDIA driver") && problem.contains("; try "), "{problem}");
    assert!(failed.contains("GPUs cannot be used as they should"), "{failed}");
}

#[test]
fn programs_can_read_it() {
    let output = doctor(&["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["problems"].as_array().map(Vec::len), Some(1), "{json}");
    assert!(
        json["driver"]["problem"].as_str().is_some_and(|problem| problem.contains("NVIDIA driver")),
        "{json}"
    );
    assert_eq!(json["gpus"], serde_json::json!([]));
    assert_eq!(json["ranks"][0]["rank"], 0);
}
