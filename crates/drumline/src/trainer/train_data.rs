//! The training data: the loader of this rank's batches, and the position in the epoch, which is the same on all ranks.

use drumline_comm::{CommError, Mesh, ReduceOp};

use super::batch::Batch;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::settings::Settings;
use super::supply::Supply;
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::data::loader::{Dataset, Loader};
use crate::data::sampler::{DataId, Sampler, SamplerPosition};

pub(super) struct TrainData<B: Batch> {
    loader: Loader<AnyDataset<B>>,
    /// The data set, if all ranks have the same.
    id: Option<DataId>,
    /// The position at which this run began the epoch.
    from: SamplerPosition,
    /// Steps since then.
    steps: usize,
    /// The positions that a rank takes in a step: samples, or planned batches.
    positions_of_step: usize,
}

impl<B: Batch> TrainData<B> {
    /// All ranks call it together.
    pub(super) fn new(
        loader: Loader<AnyDataset<B>>,
        settings: &Settings,
        mesh: &Mesh,
    ) -> Result<Self, CommError> {
        let own = loader.data_id();
        let all = mesh.whole().all_gather_object(&own)?;
        let id = all.iter().all(|other| *other == own).then_some(own);
        let of_batch = loader.sampler().positions_of_batch(settings.batch_size_per_gpu);
        let from = SamplerPosition { data: id, ..loader.sampler().start(0) };
        let positions_of_step = of_batch * settings.update_every;
        Ok(Self { loader, id, from, steps: 0, positions_of_step })
    }

    pub(super) fn id(&self) -> Option<DataId> {
        self.id
    }

    pub(super) fn sampler(&self) -> &dyn Sampler {
        self.loader.sampler()
    }

    /// Whether the sampler decides on the sizes of batches.
    pub(super) fn plans_batches(&self) -> bool {
        self.sampler().positions_of_batch(2) == 1
    }

    /// The remaining batches of the epoch.
    pub(super) fn supply(&self, mesh: &Mesh) -> Result<Supply<B>, TrainerError> {
        let batches = self.loader.resume(self.from).map_err(LocalFailure::from);
        let batches = agree::<_, TrainerError>(mesh.whole(), batches)?;
        Ok(Supply::new(batches, &self.loader))
    }

    /// Counts a step.
    pub(super) fn count_step(&mut self) {
        self.steps += 1;
    }

    /// Begins an epoch.
    pub(super) fn begin_epoch(&mut self, epoch: u64) {
        self.begin_at(SamplerPosition { data: self.id, ..self.sampler().start(epoch) });
    }

    /// Continues the epoch at a position of this data.
    pub(super) fn begin_at(&mut self, from: SamplerPosition) {
        self.from = from;
        self.steps = 0;
    }

    /// The position of the epoch, also if ranks have shares of different lengths.
    pub(super) fn position(&self) -> SamplerPosition {
        let sampler = self.sampler();
        let position = self.from.after(self.steps * self.positions_of_step, sampler.num_replicas());
        let all = sampler.num_positions(self.from.epoch);
        SamplerPosition { samples_seen: position.samples_seen.min(all), ..position }
    }

    /// The steps of its epoch before a position.
    pub(super) fn steps_before(&self, position: SamplerPosition) -> u64 {
        let of_all_ranks = self.positions_of_step * self.sampler().num_replicas().max(1);
        position.samples_seen.div_ceil(of_all_ranks) as u64
    }

    /// The largest number of steps in an epoch for which any rank has batches. All ranks call it.
    pub(super) fn num_steps(
        &self,
        epoch: u64,
        settings: &Settings,
        mesh: &Mesh,
    ) -> Result<u64, TrainerError> {
        let mut steps = [self.loader.num_batches_of(epoch).div_ceil(settings.update_every) as u64];
        mesh.whole().all_reduce(&mut steps, ReduceOp::Max)?;
        if steps[0] > 0 {
            return Ok(steps[0]);
        }
        let samples = self.loader.dataset().len();
        let text = if settings.drop_last {
            format!(
                "train_data of {samples} samples fills no batch of {} on each of {} ranks, and drop_last leaves them out; \
                 try a smaller batch_size_per_gpu, or drop_last(false)",
                settings.batch_size_per_gpu,
                mesh.samples().size()
            )
        } else {
            format!(
                "the sampler gives no rank a batch in epoch {epoch}, of {samples} samples; try another plan or more data"
            )
        };
        Err(SharedFailure::on_all_ranks(text).into())
    }
}
