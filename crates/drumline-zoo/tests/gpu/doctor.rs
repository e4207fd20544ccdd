//! `drumline-train doctor gpu` on several ranks that share a GPU: its report, and the path of the all-reduce.

use super::running::{Rank, ended, job};

/// The output of rank 0, if all ranks have only the first GPU.
fn doctor(ranks: usize, words: &[&str]) -> Rank {
    let words = ["doctor", "gpu"].iter().chain(words).map(|word| (*word).to_owned()).collect();
    let started = job(ranks, words).env("CUDA_VISIBLE_DEVICES", "0").start();
    let rank = ended(started.unwrap()).remove(0);
    assert!(rank.exit.is_success(), "{}{}", rank.stdout, rank.stderr);
    rank
}

#[test]
fn ranks_that_share_a_gpu_reduce_through_the_host() {
    let text = doctor(3, &[]).stdout;
    let line = text.lines().find(|line| line.starts_with("all-reduce  ")).unwrap();
    assert!(line.starts_with("all-reduce  3 ranks: 64 MiB in "), "{line}");
    assert!(line.contains(" GB/s, not over NCCL: ranks 0, 1, 2 share the GPU "), "{line}");
    assert_eq!(text.lines().filter(|line| line.starts_with("rank ")).count(), 3, "{text}");
    assert!(!text.contains("problem") && !text.contains(" to GPU: "), "{text}");
}

#[test]
fn a_single_rank_runs_no_all_reduce() {
    let found: serde_json::Value = serde_json::from_str(&doctor(1, &["--json"]).stdout).unwrap();
    assert!(found["all_reduce"].is_null() && found["between"] == serde_json::json!([]), "{found}");
    assert!(found["nccl_alone"]["milliseconds"].as_f64().is_some_and(|time| time > 0.0), "{found}");
    assert_eq!(found["ranks"][0]["num_gpus"], 1);
}
