//! `drumline bench` under another launcher: it joins that job, and only rank 0 prints.

use std::time::Duration;

use drumline_launch::{JobReport, LocalJob, OnFailure, Output};

use super::started::BINARY;

/// Runs `drumline bench` with `args` as every rank of a job. A failure does not stop the other ranks.
fn joined(ranks: usize, args: &[&str]) -> JobReport {
    let args = [&["bench", "all-reduce", "--seconds-per-size", "0.01"], args].concat();
    let job = LocalJob::new(ranks, BINARY, args).output(Output::Capture).on_failure(OnFailure::LetOthersRun);
    job.deadline(Duration::from_secs(60)).start().unwrap().wait()
}

fn only_rank_0_prints(report: &JobReport) -> bool {
    report.ranks[1..].iter().all(|rank| rank.stdout.is_empty() && rank.stderr.is_empty())
}

#[test]
fn an_existing_job_is_joined() {
    let report = joined(3, &["--sizes", "4K", "--json"]);
    assert!(report.is_success() && only_rank_0_prints(&report), "{report:?}");
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&report.ranks[0].stdout).unwrap();
    assert_eq!(rows[0]["world"], 3);
}

#[test]
fn nproc_per_node_is_ignored_with_a_note() {
    let report = joined(2, &["--sizes", "4K", "--nproc-per-node", "7"]);
    assert!(report.is_success() && only_rank_0_prints(&report), "{report:?}");
    let stderr = report.ranks[0].stderr_text();
    assert!(stderr.starts_with("note: --nproc-per-node 7 is ignored: RANK is set"), "{stderr}");
    assert!(report.ranks[0].stdout_text().contains(", 2 ranks;"), "{report:?}");
}

#[test]
fn only_rank_0_prints_mistakes() {
    for (args, expected) in [
        (&["--sizes", "lots"][..], "`lots` is not a size"),
        (&["--sizes", "0"], "nothing to measure"),
        (&["--dtype", "f31"], "try one of"),
    ] {
        let report = joined(2, args);
        assert!(report.ranks.iter().all(|rank| !rank.exit.is_success()), "{report:?}");
        assert!(
            only_rank_0_prints(&report) && report.ranks[0].stderr_text().contains(expected),
            "{report:?}"
        );
    }
}
