//! Evaluation on the whole test set: each rank takes its share, and each sample counts once.

use drumline::{Ddp, ImageBatch, Loader};
use tch::{Device, Tensor};

use super::job::{Job, say};
use super::pieces::Images;
use super::step::Sums;
use crate::models::Model;

/// The network whose gradients are the mean of all ranks'.
pub(super) type Replica = Ddp<Model>;

/// What an evaluation needs.
pub(super) struct Evaluation {
    pub(super) loader: Loader<Images>,
    pub(super) device: Device,
    /// The second accuracy counts an image whose class is among the best k.
    pub(super) k: usize,
    /// Batches between lines of progress.
    pub(super) print_freq: usize,
}

impl Evaluation {
    /// The figures of all ranks together, the same on each of them; `None` if a signal asked for the end meanwhile.
    ///
    /// No rank waits for another within its share; shares need not be equal.
    pub(super) fn run(&self, job: &Job, replica: &Replica) -> anyhow::Result<Option<Sums>> {
        self.run_with(job, replica, |_, _| Ok(()))
    }

    /// The same, and shows each batch with the network's output to `see`.
    pub(super) fn run_with(
        &self,
        job: &Job,
        replica: &Replica,
        see: impl FnMut(&ImageBatch, &Tensor) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Sums>> {
        // Each rank evaluates with the same running means.
        replica.sync_buffers()?;
        let own = job.agree(self.share(job, replica, see))?;
        match job.stop.agreed(&job.group)? {
            true => Ok(None),
            false => Ok(Some(own.reduced(&job.group)?)),
        }
    }

    fn share(
        &self,
        job: &Job,
        replica: &Replica,
        mut see: impl FnMut(&ImageBatch, &Tensor) -> anyhow::Result<()>,
    ) -> anyhow::Result<Sums> {
        let (mut sums, mut done) = (Sums::default(), 0);
        for batch in self.loader.epoch(0) {
            if job.stop.is_requested() {
                break;
            }
            let batch = batch?.to_device(self.device)?;
            let output = replica.evaluate(&batch.images);
            let loss = output.cross_entropy_for_logits(&batch.labels);
            see(&batch, &output)?;
            sums += Sums::of(&output, &batch.labels, &loss, self.k);
            done += 1;
            if job.is_first() && done % self.print_freq == 0 {
                say(&self.line(done, &sums));
            }
        }
        Ok(sums)
    }

    /// How far rank 0 is with its share.
    fn line(&self, done: usize, sums: &Sums) -> String {
        let (batches, loss, acc1) = (self.loader.num_batches(), sums.loss(), sums.acc1());
        let samples = sums.samples();
        format!(
            "   == eval: [{done}/{batches}] | loss: {loss:.3} | Acc@1 {acc1:.3} | {samples} images of rank 0"
        )
    }
}
