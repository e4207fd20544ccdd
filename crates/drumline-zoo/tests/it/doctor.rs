//! `drumline-train doctor gpu` without a GPU: its report and its exit code say what is missing.

use std::process::{Command, Output};

use drumline::comm::worker_env;

use super::running::{ended, job};

/// GPUs are hidden on machines that have some.
fn doctor(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline-train"));
    command.args(["doctor", "gpu"]).args(words).env("CUDA_VISIBLE_DEVICES", "");
    for name in [worker_env::RANK, worker_env::WORLD_SIZE, worker_env::SLURM_PROCID] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

#[test]
fn a_machine_without_a_gpu_gets_a_report_of_what_is_missing() {
    let output = doctor(&[]);
    assert_eq!(output.status.code(), Some(1));
    let (text, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("libtorch 2.11.0") && text.contains("driver      cannot be used"), "{text}");
    let problem = text.lines().find(|line| line.starts_with("problem     ")).unwrap();
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
    let rank = &json["ranks"][0];
    assert_eq!((&rank["rank"], &rank["num_gpus"], &rank["gpu"]), (&0.into(), &0.into(), &json["all_reduce"]));
    assert_eq!((&rank["drumline"], &rank["libtorch"]), (&json["drumline"], &"2.11.0".into()));
}

#[test]
fn what_all_ranks_lack_is_reported_once() {
    let ranks = job(2, vec!["doctor".into(), "gpu".into()]).env("CUDA_VISIBLE_DEVICES", "");
    let ranks = ended(ranks.start().unwrap());
    let text = &ranks[0].stdout;
    assert!(!ranks[0].exit.is_success() && ranks[1].stdout.is_empty(), "{text}{}", ranks[1].stdout);
    let lines = |word: &str| text.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!([lines("problem "), lines("rank 0 "), lines("rank 1 ")], [1, 1, 1], "{text}");
    assert!(text.contains("problem     ") && !text.contains("all-reduce"), "{text}");
}
