//! The best models of a training, kept as checkpoints, or in memory if there is no folder.

use std::num::NonZeroUsize;

use drumline_parallel::Engine;
use drumline_torch::Named;

use super::context::Context;
use super::metric::MetricKey;
use super::settings::LoadBestModel;
use super::state::Best;
use crate::checkpoint::{BestSaved, held_by};

pub(super) struct BestModels {
    pub(super) key: MetricKey,
    /// The metrics of the best checkpoints, the best first.
    pub(super) metrics: Vec<f64>,
    /// The place of the last evaluation among the best, if it is to be saved as one of them.
    pub(super) place: Option<NonZeroUsize>,
    /// What this rank holds of the best model, if there is no folder.
    weights: Option<Vec<Named>>,
    load_at_end: LoadBestModel,
}

impl BestModels {
    pub(super) fn new(key: MetricKey, load_at_end: LoadBestModel) -> Self {
        Self { key, metrics: Vec::new(), place: None, weights: None, load_at_end }
    }

    /// Keeps the model of the last evaluation if it is among the best: in memory, or in a checkpoint, which is saved
    /// after everything else of this step is done.
    pub(super) fn keep_if_good(&mut self, context: &mut Context<'_>, engine: &dyn Engine, metric: f64) {
        let state = &mut context.state;
        if state.has_save_path {
            let keep = state.requests.keep_best.unwrap_or(1);
            self.place = self.key.rank(metric, &mut self.metrics, keep);
            state.requests.checkpoint |= self.place.is_some();
            return;
        }
        let is_better = state.evaluation.as_ref().is_some_and(|evaluation| evaluation.is_better);
        if is_better && self.load_at_end == LoadBestModel::Yes {
            let copy = |Named { name, tensor }: Named| Named { name, tensor: tensor.detach().copy() };
            self.weights = Some(held_by(engine).into_iter().map(copy).collect());
        }
    }

    /// What this rank holds of the best model, if that is in memory.
    pub(super) fn take_weights(&mut self) -> Option<Vec<Named>> {
        self.weights.take()
    }

    /// Resets the best to those that are left, after checkpoints were lost: a lost one must not keep worse ones from
    /// being saved.
    pub(super) fn reset_to(&mut self, context: &mut Context<'_>, left: &[BestSaved]) {
        let metric = |best: &BestSaved| best.score.map(|score| score.value);
        context.state.best = left
            .first()
            .and_then(|best| Some(Best { metric: metric(best)?, step: best.step, epoch: best.epoch }));
        self.metrics = left.iter().map_while(metric).collect();
    }
}
