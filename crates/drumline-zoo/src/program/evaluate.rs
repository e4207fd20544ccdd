//! Evaluation on the whole test set: each rank takes its share, and each sample counts once.

use tch::no_grad;

use super::job::{Job, Vote};
use super::pieces::{Replica, TestLoader};
use super::step::Sums;

/// The figures of all ranks together, the same on each of them; `None` if a signal asked for the end meanwhile.
///
/// No rank waits for another within its share; shares need not be equal.
pub(super) fn evaluate(
    job: &Job,
    replica: &Replica<'_>,
    loader: &TestLoader,
    k: usize,
) -> anyhow::Result<Option<Sums>> {
    // Running means are each rank's own; those of rank 0 are the ones that are saved.
    replica.share_buffers()?;
    let own = job.agree(no_grad(|| share(job, replica, loader, k)))?;
    match job.vote(Vote::GoOn)? {
        Vote::Stop => Ok(None),
        _ => Ok(Some(own.reduced(&job.group)?)),
    }
}

fn share(job: &Job, replica: &Replica<'_>, loader: &TestLoader, k: usize) -> anyhow::Result<Sums> {
    let mut sums = Sums::default();
    for batch in loader.epoch() {
        let batch = batch?;
        if job.is_asked_to_stop() {
            break;
        }
        let output = replica.forward_t(&batch.images, false)?;
        let loss = output.cross_entropy_for_logits(&batch.labels);
        sums += Sums::of(&output, &batch.labels, &loss, k);
    }
    Ok(sums)
}
