//! Started by somebody else's launcher: joins that job, and rank 0 alone prints.

use std::time::Duration;

use drumline_launch::{LocalJob, Output};

use super::started::BINARY;

#[test]
fn a_job_that_is_already_there_is_joined() {
    let args = ["bench", "all-reduce", "--sizes", "4K", "--seconds-per-size", "0.01", "--json"];
    let job = LocalJob::new(3, BINARY, args).output(Output::Capture).deadline(Duration::from_secs(60));
    let report = job.start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&report.ranks[0].stdout).unwrap();
    assert_eq!(rows[0]["world"], 3);
    assert!(
        report.ranks[1..].iter().all(|rank| rank.stdout.is_empty() && rank.stderr.is_empty()),
        "{report:?}"
    );
}
