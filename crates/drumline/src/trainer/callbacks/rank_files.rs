//! The status of each rank, for `drumline watch`.

use std::path::PathBuf;

use drumline_comm::{Axis, MeshShape};
use drumline_observe::runs::Registration;
use drumline_observe::status::{Status, StatusWriter};

use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::error::TrainerError;
use crate::trainer::state::{Times, TrainState};

/// Each rank writes `ranks/00000.json` in a folder twice a second: its place in the mesh, its step, the collective that it is
/// in, its times, its share of bubbles in a pipeline, its memory. The job is added to the list that `drumline watch` shows.
#[derive(Debug)]
pub struct RankFiles {
    folder: PathBuf,
    status: Status,
    /// The times that were added to the status.
    seen: Times,
    open: Option<(StatusWriter, Option<Registration>)>,
}

impl RankFiles {
    /// Writes in this folder, the same for all ranks.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), status: Status::default(), seen: Times::default(), open: None }
    }
}

impl Callback for RankFiles {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        let group = state.group().clone();
        // Includes the calls of the thread that reduces gradients.
        self.status.op_from(move || group.calls_under_way().iter().map(ToString::to_string).collect());
        if let Some(place) = place_in(state.mesh(), state.rank()) {
            self.status.mesh(place);
        }
        let writer = StatusWriter::start(&self.folder, state.rank(), &self.status)?;
        let name = self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // A job that cannot be listed trains anyway.
        let listed = (state.rank() == 0).then(|| Registration::new(&self.folder, &name));
        let listed = listed.and_then(|listed| {
            listed.inspect_err(|error| tracing::warn!("drumline watch does not list this job: {error}")).ok()
        });
        self.open = Some((writer, listed));
        Ok(())
    }

    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        self.status.step(state.step(), state.epoch());
        let own = |of_all: f64| of_all / state.world_size() as f64;
        self.status.throughput(own(state.samples() as f64), own(state.samples_per_s()));
        let slow = state.slow_ranks().into_iter().find(|slow| slow.rank == state.rank());
        self.status.bubble(state.bubble());
        self.status.slow(slow.map(|slow| slow.times));
        let (now, seen) = (state.times(), std::mem::replace(&mut self.seen, state.times()));
        self.status.add_load(now.load.saturating_sub(seen.load));
        self.status.add_compute(now.compute.saturating_sub(seen.compute));
        self.status.add_comm(now.comm.saturating_sub(seen.comm));
        Ok(())
    }

    fn on_train_end(&mut self, _: &mut TrainState) -> CallbackResult {
        self.status.ended();
        self.open = None;
        Ok(())
    }

    fn on_exception(&mut self, _: &mut TrainState, error: &TrainerError) -> CallbackResult {
        self.status.failed(error.to_string());
        self.open = None;
        Ok(())
    }
}

/// A rank's place along the axes that have several ranks, such as `pp 1/2, tp 0/2`; `None` if there are none.
fn place_in(mesh: &MeshShape, rank: usize) -> Option<String> {
    let axes = Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1);
    let places = axes.map(|axis| format!("{axis} {}/{}", mesh.coordinate(rank, axis), mesh.size(axis)));
    Some(places.collect::<Vec<_>>().join(", ")).filter(|place| !place.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_names_the_axes_that_have_several_ranks() {
        let mesh = MeshShape::default().with(Axis::Pp, 2).with(Axis::Tp, 2);
        let places = [0, 1, 2].map(|rank| place_in(&mesh, rank).unwrap());
        assert_eq!(places, ["pp 0/2, tp 0/2", "pp 0/2, tp 1/2", "pp 1/2, tp 0/2"]);
        assert_eq!(place_in(&MeshShape::default(), 0), None);
    }
}
