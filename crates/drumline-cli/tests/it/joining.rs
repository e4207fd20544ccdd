//! Started by somebody else's launcher: joins that job, and rank 0 alone prints.

use std::time::Duration;

use drumline_launch::{JobReport, LocalJob, OnFailure, Output};

use super::started::BINARY;

/// `drumline bench` with `args` as each of the ranks of a job; all run to their own end.
fn joined(ranks: usize, args: &[&str]) -> JobReport {
    let args = [&["bench", "all-reduce", "--seconds-per-size", "0.01"], args].concat();
    let job = LocalJob::new(ranks, BINARY, args).output(Output::Capture).on_failure(OnFailure::LetOthersRun);
    job.deadline(Duration::from_secs(60)).start().unwrap().wait()
}

fn only_rank_0_speaks(report: &JobReport) -> bool {
    report.ranks[1..].iter().all(|rank| rank.stdout.is_empty() && rank.stderr.is_empty())
}

#[test]
fn a_job_that_is_already_there_is_joined() {
    let report = joined(3, &["--sizes", "4K", "--json"]);
    assert!(report.is_success() && only_rank_0_speaks(&report), "{report:?}");
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&report.ranks[0].stdout).unwrap();
    assert_eq!(rows[0]["world"], 3);
}

#[test]
fn a_number_of_ranks_is_ignored_and_that_is_said() {
    let report = joined(2, &["--sizes", "4K", "--nproc-per-node", "7"]);
    assert!(report.is_success() && only_rank_0_speaks(&report), "{report:?}");
    let said = report.ranks[0].stderr_text();
    assert!(said.starts_with("note: --nproc-per-node 7 is ignored: RANK is set"), "{said}");
    assert!(report.ranks[0].stdout_text().contains(", 2 ranks;"), "{report:?}");
}

#[test]
fn mistakes_are_told_by_rank_0_alone() {
    for (args, said) in [
        (&["--sizes", "lots"][..], "`lots` is not a size"),
        (&["--sizes", "0"], "nothing to measure"),
        (&["--dtype", "f31"], "try one of"),
    ] {
        let report = joined(2, args);
        assert!(report.ranks.iter().all(|rank| !rank.exit.is_success()), "{report:?}");
        assert!(only_rank_0_speaks(&report) && report.ranks[0].stderr_text().contains(said), "{report:?}");
    }
}
