//! Starts ranks of this same command, which find that they are inside a job, and prints rank 0's output.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use drumline_launch::{Exit, LocalJob, Output};

use super::DoctorArgs;
use crate::errors::ExitCodeOnly;

/// Long enough for a thousand ranks on a busy machine.
const LONGEST: Duration = Duration::from_secs(600);

pub(super) fn run(nproc: usize, args: &DoctorArgs) -> anyhow::Result<()> {
    let words = ["doctor"].into_iter().chain(args.json.then_some("--json"));
    let job =
        LocalJob::this_program(nproc, words).context("cannot find this program to start ranks of it")?;
    let report = job.output(Output::Capture).deadline(LONGEST).start()?.wait();
    let first = report.rank(0).context("the job has no rank 0")?;
    std::io::stdout().write_all(&first.stdout).context("cannot print the report")?;
    // Rank 0 has found problems and printed them; anything else is a failure of the job.
    match (&first.exit, report.is_success()) {
        (_, true) => Ok(()),
        (Exit::Code(1), _) if !first.stdout.is_empty() => Err(ExitCodeOnly(1).into()),
        _ => bail!("the ranks could not be checked: {report}"),
    }
}
