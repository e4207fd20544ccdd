//! Evaluates existing weights, without training.
//!
//! ```text
//!   for_evaluation(dev_data) ─▶ loss, metrics, precision … ─▶ evaluate ─▶ prepare ─▶ Evaluator ─▶ figures of all ranks
//! ```

use std::sync::Arc;

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use tch::nn::VarStore;

use super::batch::Batch;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::graphs::OwnStream;
use super::metric::BatchMetric;
use super::model::Model;
use super::run::Run;
use super::settings::LoadBestModel;
use super::state::Evaluation;
use super::{DistTrainer, aborting};
use crate::comm::shared_failure::SharedFailure;
use crate::data::loader::{Cause, Dataset};

/// The name of the metric that only passes outputs on. No metric of a program has an empty name.
const VIEWER: &str = "";

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    /// A trainer for [`evaluate`](Self::evaluate) on `dev_data`, without training data. The variables of `model` are in
    /// `store`.
    ///
    /// ```no_run
    /// use drumline::tch::nn::VarStore;
    /// use drumline::trainer::{CrossEntropy, DistTrainer};
    /// use drumline::{ProcessGroup, local_device};
    /// use drumline::metrics::TopK;
    /// # use drumline::tch::{self, Tensor, nn};
    /// # use drumline::data::{Cause, MapDataset, Sample};
    /// # fn data() -> impl drumline::data::Dataset<Batch = (Tensor, Tensor)> + 'static {
    /// #     MapDataset::new(1, |_: Sample| Ok(()), |_| Ok::<_, Cause>((Tensor::new(), Tensor::new())))
    /// # }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let group = ProcessGroup::from_env()?;
    /// let mut store = VarStore::new(local_device(&group));
    /// let model = nn::linear(store.root(), 20, 2, Default::default());
    /// store.load("model.safetensors")?;
    /// let evaluation = DistTrainer::for_evaluation(&group, &model, &store, data())
    ///     .loss(CrossEntropy::default())
    ///     .metric("acc", TopK::new(1))
    ///     .evaluate()?;
    /// println!("{:?}", evaluation.map(|evaluation| evaluation.metrics));
    /// # Ok(())
    /// # }
    /// ```
    pub fn for_evaluation(
        group: &ProcessGroup,
        model: &'a M,
        store: &'a VarStore,
        dev_data: impl Dataset<Batch = B> + 'static,
    ) -> Self {
        let data = AnyDataset(Arc::new(dev_data));
        let trainer = Self::new(group, model, store, data.clone());
        Self { dev_data: Some(data), ..trainer }
    }

    /// Evaluates the model's weights on all of `dev_data`, each sample once, with the loss and the metrics, in the
    /// trainer's precision. All ranks call it, and get the same result: `None` if a signal has stopped the evaluation. The
    /// only callback that is called is `on_valid_batch_end`.
    #[track_caller]
    pub fn evaluate(self) -> Result<Option<Evaluation>, TrainerError> {
        self.evaluate_with(|_, _| Ok(()))
    }

    /// As [`evaluate`](Self::evaluate), and passes each batch of this rank with the model's output to `see`. Use it for
    /// predictions. Of a model that is cut into stages, only one rank of each replica has outputs.
    #[track_caller]
    pub fn evaluate_with(
        mut self,
        see: impl FnMut(&B, &M::Output) -> Result<(), Cause> + 'a,
    ) -> Result<Option<Evaluation>, TrainerError> {
        let group = self.group.clone();
        let site = call_site();
        self.scores.0.push((VIEWER.to_owned(), Box::new(Viewer(see))));
        // An evaluation makes no steps that could be recorded.
        let trainer = self.cuda_graphs(false);
        aborting(&group, || evaluate_run(on_behalf_of(site, || trainer.prepare(LoadBestModel::No))?))
    }

    /// The number of samples to evaluate; 0 without `dev_data`.
    pub fn dev_len(&self) -> usize {
        self.dev_data.as_ref().map_or(0, Dataset::len)
    }
}

fn evaluate_run<M: Model<B> + ?Sized, B: Batch>(
    mut run: Run<'_, M, B>,
) -> Result<Option<Evaluation>, TrainerError> {
    if run.evaluator.dev.is_none() {
        let what = "there is no dev_data to evaluate on; try DistTrainer::for_evaluation, or .dev_data(…)";
        return Err(SharedFailure::on_all_ranks(what.to_owned()).into());
    }
    let _stream = OwnStream::enter(run.learner.device())?;
    let evaluation = run.evaluator.evaluate(&run.learner, &run.saver.best, &mut run.context)?;
    run.context.check()?;
    Ok(evaluation.map(|mut evaluation| {
        evaluation.metrics.retain(|(name, _)| name != VIEWER);
        evaluation
    }))
}

/// A metric without a value, which passes outputs to a function.
struct Viewer<F>(F);

impl<B, O, F: FnMut(&B, &O) -> Result<(), Cause>> BatchMetric<B, O> for Viewer<F> {
    fn update(&mut self, output: &O, batch: &B) -> Result<(), Cause> {
        (self.0)(batch, output)
    }

    fn sums(&self) -> Vec<f64> {
        Vec::new()
    }

    fn value_of(&self, _: &[f64]) -> f64 {
        0.0
    }

    fn reset(&mut self) {}
}
