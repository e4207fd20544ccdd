//! A prepared model that is cut into stages: the batches of a window are the micro-batches of a pipeline.
//!
//! ```text
//!   turn 0   train_batch: kept     turn 1   train_batch: kept     last turn   train_batch: all of the window, forward and backward
//! ```
//! All ranks of a pipeline take the same batches. The loss runs where the last stage is. Not here: in which order stages
//! compute (`drumline_parallel::pipeline`).

use std::cell::RefCell;
use std::rc::Rc;

use drumline_comm::{ReduceOp, call_site, on_behalf_of};
use drumline_parallel::pipeline::{LayerError, MicroBatch, Pipeline, Scale};
use drumline_torch::StepSamples;
use tch::{Kind, Tensor};

use super::error::Result;
use super::model::{PreparedModel, widened};
use super::window::{Turn, Window};
use crate::comm::alike::usage_error;
use crate::run_error::UsageError;
use crate::trainer::StagedModel;

type MeanLoss = Box<dyn Fn(&[Tensor]) -> std::result::Result<Tensor, LayerError>>;

/// What runs the stages of a model, and the batches that wait for the last turn of their window.
pub(super) struct Pipelined {
    pipeline: Pipeline,
    kept: RefCell<Vec<Kept>>,
    /// The window of the batches that are kept.
    window: RefCell<Rc<Window>>,
}

/// A batch of a window.
struct Kept {
    micro_batch: MicroBatch,
    mean_loss: MeanLoss,
    /// The weight of the batch in its window.
    weight: f64,
}

impl PreparedModel<StagedModel> {
    /// Trains on a batch: in the last turn of a window the forwards and backwards of all of its batches are made. All ranks
    /// call it in each turn of a prepared loader. `inputs` is what the first layer gets, and `mean_loss` the mean over the
    /// batch, of what the last layer returns. Returns the mean loss of the window on all ranks in its last turn; `None` in the
    /// others.
    ///
    /// ```no_run
    /// # use drumline::accelerator::{PreparedLoader, PreparedModel, PreparedOptimizer};
    /// # use drumline::optim::Sgd;
    /// # use drumline::tch::{Reduction, Tensor};
    /// # use drumline::trainer::StagedModel;
    /// # fn epoch<D: drumline::data::Dataset<Batch = (Tensor, Tensor)> + 'static>(
    /// #     model: &PreparedModel<StagedModel>, optimizer: &mut PreparedOptimizer<Sgd>, loader: &PreparedLoader<D>,
    /// # ) -> Result<(), drumline::accelerator::AcceleratorError> {
    /// for batch in loader.epoch(0) {
    ///     let (x, y) = batch?;
    ///     let loss = model.train_batch(vec![x], move |outputs| Ok(outputs[0].f_mse_loss(&y, Reduction::Mean)?))?;
    ///     optimizer.step()?; // does something in the last turn of a window only
    ///     optimizer.zero_grad()?;
    ///     # let _ = loss;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn train_batch(
        &self,
        inputs: Vec<Tensor>,
        mean_loss: impl Fn(&[Tensor]) -> std::result::Result<Tensor, LayerError> + 'static,
    ) -> Result<Option<f64>> {
        on_behalf_of(call_site(), || {
            let turn = self.shared.turn();
            let Some(agreed) = &turn.window.agreed else {
                return Err(usage_error(&self.shared.group, UsageError::BatchOutsideOfLoader));
            };
            let pipelined = self.pipelined()?;
            let before = pipelined.window.replace(Rc::clone(&turn.window));
            if !Rc::ptr_eq(&before, &turn.window) {
                // A loop that ended in the middle of a window has left them.
                pipelined.kept.borrow_mut().clear();
            }
            if let Some(factor) = turn.factor {
                let micro_batch = MicroBatch { inputs, targets: Vec::new(), samples: self.samples_of(&turn) };
                let weight = factor / agreed.factor_of_sums();
                pipelined.kept.borrow_mut().push(Kept {
                    micro_batch,
                    mean_loss: Box::new(mean_loss),
                    weight,
                });
            }
            turn.note_backward();
            if !turn.is_last {
                return Ok(None);
            }
            let sum = self.train_window(pipelined, &turn)?;
            Ok(Some(sum / agreed.count))
        })
    }

    /// Runs the model on a batch of an evaluation. All ranks of a pipeline call it with the same batches. Returns what `see`
    /// returns, on the rank that has the last stage; `None` on the others.
    #[track_caller]
    pub fn evaluate_batch<R>(
        &self,
        inputs: Vec<Tensor>,
        see: impl FnOnce(&[Tensor]) -> R,
    ) -> Result<Option<R>> {
        on_behalf_of(call_site(), || {
            let samples = StepSamples { first: 0, stride: 1, count: 0 };
            let batch = [MicroBatch { inputs, targets: Vec::new(), samples }];
            let (mut see, mut seen) = (Some(see), None);
            let mut of_outputs = |outputs: &[Tensor], _: usize| -> std::result::Result<Tensor, LayerError> {
                let outputs = in_f32(outputs)?;
                seen = see.take().map(|see| see(&outputs));
                Ok(Tensor::f_zeros([1], (Kind::Float, self.shared.device))?)
            };
            self.pipelined()?.pipeline.forwards(&batch, &mut of_outputs)?;
            Ok(seen)
        })
    }

    /// What runs the stages. All ranks call it together for the first time.
    fn pipelined(&self) -> Result<&Pipelined> {
        if let Some(pipelined) = self.replica.pipelined.get() {
            return Ok(pipelined);
        }
        let pipeline = Pipeline::on(Rc::clone(&self.model.0), self.replica.shared_engine())?;
        let pipeline = pipeline.with_autocast(self.shared.autocast_kind());
        let pipeline = match &self.shared.masks {
            Some(masks) => pipeline.with_masks(masks.of_next_step()?.clone()),
            None => pipeline,
        };
        let made = Pipelined { pipeline, kept: RefCell::default(), window: RefCell::default() };
        Ok(self.replica.pipelined.get_or_init(|| made))
    }

    /// The forwards and backwards of a window. Returns the sum of the weighted mean losses of all ranks.
    fn train_window(&self, pipelined: &Pipelined, turn: &Turn) -> Result<f64> {
        let Pipelined { pipeline, kept, window: _ } = pipelined;
        let Some(agreed) = &turn.window.agreed else { return Ok(0.0) };
        self.shared.check()?;
        self.shared.note_training(&self.replica);
        if let Some(masks) = &self.shared.masks {
            masks.of_next_step()?;
        }
        let (mut micro_batches, mut losses) = (Vec::new(), Vec::new());
        for Kept { micro_batch, mean_loss, weight } in kept.take() {
            micro_batches.push(micro_batch);
            losses.push((mean_loss, weight));
        }
        let mut loss = |outputs: &[Tensor], index: usize| -> std::result::Result<Tensor, LayerError> {
            let (mean_loss, weight) = &losses[index];
            Ok(mean_loss(&in_f32(outputs)?)?.f_mul_scalar(*weight)?)
        };
        pipeline.begin(agreed, &micro_batches)?;
        let scaler = self.shared.scaling.as_ref().map(|scaling| scaling.scaler()).transpose()?;
        let scale = scaler.as_deref().map_or(Scale::No, Scale::By);
        let own = pipeline.gradients(agreed, &micro_batches, scale, &mut loss)?;
        if scaler.is_some() {
            self.replica.note_scaled_backward();
        }
        let mut sum = [own];
        self.shared.mesh.whole().all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum[0])
    }

    /// Which samples of the window a turn has.
    fn samples_of(&self, turn: &Turn) -> StepSamples {
        let (mesh, ranks) = (&self.shared.mesh, self.shared.mesh.samples());
        let count = turn.samples.get(mesh.whole().rank()).copied().unwrap_or(0);
        let (rank, stride) = (ranks.rank() as u64, ranks.size() as u64);
        StepSamples { first: rank + stride * turn.seen as u64, stride, count: count as u64 }
    }
}

/// The outputs in f32, in which losses are computed.
fn in_f32(outputs: &[Tensor]) -> Result<Vec<Tensor>> {
    outputs.iter().map(|output| widened(output.shallow_clone())).collect()
}
