//! Steps on a GPU as CUDA graphs: one of forward, loss, backward and reduction, one of the optimizer. Callbacks have their say in between, as
//! in any step.
//!
//! ```text
//!   as it is    the first steps of a shape, and steps of other shapes
//!   graphs      batch copied in ─▶ ┃forward ─ loss ─ backward┃ ─▶ loss read ─▶ on_backward_end ─▶ ┃optimizer┃ ─▶ on_step_end
//! ```
//! The whole training runs on one stream, on which what is recorded is launched as well. Where something cannot be recorded, the reason is
//! told once, and steps go on as they are.

use drumline_torch::cuda::{Graph, Pool, Priority, Stream, StreamScope, copy_async};
use drumline_torch::{Named, TorchError, grad, set_grad};
use tch::{Device, Kind, Tensor, no_grad};

use super::batch::Batch;
use super::error::TrainerError;
use super::hooks::Hook;
use super::meeting::Agreed;
use super::model::{Mode, Model};
use super::run::Run;
use crate::loader::Cause;
use crate::shared_failure::guarded;

/// Steps of one shape in a row that are made as they are before one is recorded: libraries choose their kernels in them, and optimizers make what they keep.
const WARM_UPS: u32 = 3;

/// Steps without two of one shape in a row after which the waiting ends.
const PATIENCE: u32 = 64;

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Operation by operation.
    AsItIs,
    /// By graphs, which may have to be recorded first.
    Graphs,
}

/// The shapes and kinds of the tensors of a step's batches.
type Shapes = Vec<(Vec<i64>, Kind)>;

/// What has been recorded, or is to be.
pub(super) struct Graphs<B, O> {
    pool: Pool,
    /// The shapes of the last step, and how many in a row had them.
    seen: (Shapes, u32),
    /// Steps since shapes were first looked at.
    looked: u32,
    gradients: Option<Recorded<B, O>>,
    optimizer: Optimizing,
}

enum Optimizing {
    /// It can be recorded, and has not been.
    Unrecorded,
    Recorded(Graph),
    /// It cannot.
    AsItIs,
}

/// Forward, loss and backward.
struct Recorded<B, O> {
    shapes: Shapes,
    graph: Graph,
    /// What it reads.
    batches: Vec<B>,
    factor: Tensor,
    /// What it leaves.
    sum: Tensor,
    outputs: Vec<O>,
    grads: Vec<Option<Tensor>>,
    /// Whether the parameters' gradients are those: another step takes them away.
    is_attached: bool,
}

impl<B, O> Graphs<B, O> {
    pub(super) fn new() -> Result<Self, TorchError> {
        Ok(Self {
            pool: Pool::new()?,
            seen: (Vec::new(), 0),
            looked: 0,
            gradients: None,
            optimizer: Optimizing::Unrecorded,
        })
    }
}

/// The stream of a training on a GPU, current until this is dropped.
pub(super) fn own_stream(device: Device) -> Result<Option<StreamScope>, TorchError> {
    match device {
        Device::Cuda(index) => Ok(Some(Stream::new(index, Priority::Normal)?.enter()?)),
        _ => Ok(None),
    }
}

/// The shapes of batches that list their tensors.
fn shapes<B: Batch>(batches: &[B]) -> Option<Shapes> {
    let tensors: Option<Vec<_>> = batches.iter().map(Batch::tensors).collect();
    Some(tensors?.concat().iter().map(|tensor| (tensor.size(), tensor.kind())).collect())
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// How the step of these batches is made.
    pub(super) fn way(&mut self, batches: &[B], agreed: &Agreed) -> Way {
        let Some(graphs) = &mut self.graphs else { return Way::AsItIs };
        if self.tracer.is_on() || batches.len() != agreed.most_batches || agreed.is_uneven {
            return Way::AsItIs;
        }
        let Some(shapes) = shapes(batches) else {
            self.give_up("its batches do not list their tensors; try implementing `Batch::tensors`");
            return Way::AsItIs;
        };
        if let Some(recorded) = &graphs.gradients {
            return if recorded.shapes == shapes { Way::Graphs } else { Way::AsItIs };
        }
        graphs.looked += 1;
        match &mut graphs.seen {
            (seen, times) if *seen == shapes => *times += 1,
            seen => *seen = (shapes, 1),
        }
        if graphs.seen.1 > WARM_UPS {
            return Way::Graphs;
        }
        if graphs.looked > PATIENCE {
            self.give_up("the shapes of its batches change from step to step");
        }
        Way::AsItIs
    }

    /// The reason is told once, by rank 0.
    pub(super) fn give_up(&mut self, why: &str) {
        self.graphs = None;
        if self.state.rank() == 0 {
            tracing::info!("steps are not made as CUDA graphs: {why}");
        }
    }

    /// What [`gradients`](Self::gradients) computes, by a graph.
    pub(super) fn graphed_gradients(
        &mut self,
        batches: Vec<B>,
        agreed: &Agreed,
    ) -> Result<f64, TrainerError> {
        let factor = self.state.group.size() as f64 / agreed.count;
        let Some(mut graphs) = self.graphs.take() else { return self.gradients(batches, agreed) };
        let mut recorded = match graphs.gradients.take() {
            Some(mut recorded) => {
                recorded.take_in(&batches, factor)?;
                recorded
            }
            None => {
                let device = self.state.device;
                let batches: Result<Vec<B>, _> =
                    batches.into_iter().map(|batch| batch.to_device(device)).collect();
                let batches = batches?;
                match self.record(&graphs, &batches, factor) {
                    Ok(made) => made.of(batches, std::mem::take(&mut graphs.seen.0)),
                    Err(why) => {
                        self.give_up(&why);
                        self.state.optimizer.zero_grad()?;
                        return self.gradients(batches, agreed);
                    }
                }
            }
        };
        for _ in &recorded.batches {
            for hook in [Hook::BatchBegin, Hook::LossBegin, Hook::BackwardBegin] {
                self.hooks.call(hook, &mut self.state);
            }
        }
        recorded.attach(&self.state.parameters)?;
        recorded.graph.launch()?;
        let scored = guarded(|| {
            let mut outputs = recorded.outputs.iter().zip(&recorded.batches);
            no_grad(|| outputs.try_for_each(|(output, batch)| self.train_scores.update(output, batch)))
        });
        if let Err(trouble) = scored {
            self.hooks.note(trouble);
        }
        let sum = recorded.sum.f_double_value(&[]).map_err(TorchError::from)?;
        graphs.gradients = Some(recorded);
        self.graphs = Some(graphs);
        Ok(sum)
    }

    /// Records forward, loss and backward of these batches. Nothing of it runs.
    fn record(
        &mut self,
        graphs: &Graphs<B, M::Output>,
        batches: &[B],
        factor: f64,
    ) -> Result<Made<M::Output>, String> {
        let (device, keeps_outputs) = (self.state.device, !self.train_scores.0.is_empty());
        let made = guarded(|| {
            let factor =
                Tensor::f_full([0i64; 0], factor, (Kind::Float, device)).map_err(TorchError::from)?;
            self.state.optimizer.zero_grad()?;
            let (graph, (sum, mut outputs)) = Graph::record(graphs.pool, || self.compute(batches, &factor))?;
            if !keeps_outputs {
                outputs.clear();
            }
            let grads: Result<_, _> = self.state.parameters.iter().map(|named| grad(&named.tensor)).collect();
            Ok(Made { graph, factor, sum, outputs, grads: grads? })
        });
        made.map_err(|trouble| trouble.text)
    }

    /// The sum of the losses, and the outputs.
    fn compute(&self, batches: &[B], factor: &Tensor) -> Result<(Tensor, Vec<M::Output>), Cause> {
        let (mut sums, mut outputs) = (Vec::new(), Vec::new());
        for (done, batch) in batches.iter().enumerate() {
            let (output, loss) = {
                let _autocast = self.autocast()?;
                let output = self.ddp.forward_with(|model| model.forward_batch(batch, Mode::Train))??;
                let loss = self.loss.sum(&output, batch)?;
                (output, loss)
            };
            let part = &loss * factor;
            let backward = || self.backward(&part);
            if done + 1 < batches.len() {
                self.ddp.no_sync(backward)?
            } else {
                backward()?
            }
            sums.push(loss.detach());
            outputs.push(output);
        }
        Ok((
            Tensor::f_stack(&sums, 0).and_then(|sums| sums.f_sum(Kind::Float)).map_err(TorchError::from)?,
            outputs,
        ))
    }

    /// The optimizer's step, by a graph where that is possible.
    pub(super) fn graphed_optimizer(&mut self) -> Result<(), TrainerError> {
        let Some(graphs) = &mut self.graphs else { return Ok(self.state.optimizer.step()?) };
        if let Optimizing::Unrecorded = graphs.optimizer {
            let optimizer = &mut self.state.optimizer;
            let recorded =
                optimizer.keep_lr_on_device().and_then(|()| Graph::record(graphs.pool, || optimizer.step()));
            graphs.optimizer = match recorded {
                Ok((graph, ())) => Optimizing::Recorded(graph),
                Err(why) => {
                    tracing::debug!("the optimizer is not made as a CUDA graph: {why}");
                    Optimizing::AsItIs
                }
            };
        }
        match &graphs.optimizer {
            Optimizing::Recorded(graph) => Ok(graph.launch()?),
            _ => Ok(self.state.optimizer.step()?),
        }
    }

    /// A step is made as it is: its gradients are others.
    pub(super) fn leave_graphs(&mut self) {
        if let Some(recorded) = self.graphs.as_mut().and_then(|graphs| graphs.gradients.as_mut()) {
            recorded.is_attached = false;
        }
    }
}

/// What a recording gives.
struct Made<O> {
    graph: Graph,
    factor: Tensor,
    sum: Tensor,
    outputs: Vec<O>,
    grads: Vec<Option<Tensor>>,
}

impl<O> Made<O> {
    fn of<B>(self, batches: Vec<B>, shapes: Shapes) -> Recorded<B, O> {
        let Self { graph, factor, sum, outputs, grads } = self;
        Recorded { shapes, graph, batches, factor, sum, outputs, grads, is_attached: true }
    }
}

impl<B: Batch, O> Recorded<B, O> {
    /// Copies batches to where the graph reads them.
    fn take_in(&mut self, batches: &[B], factor: f64) -> Result<(), TorchError> {
        for (to, from) in self.batches.iter().zip(batches) {
            let (to, from) = (to.tensors().unwrap_or_default(), from.tensors().unwrap_or_default());
            for (to, from) in to.into_iter().zip(from) {
                copy_async(&mut to.shallow_clone(), from)?;
            }
        }
        let _ = self.factor.f_fill_(factor)?;
        Ok(())
    }

    /// Gives the parameters the gradients that the graph fills.
    fn attach(&mut self, parameters: &[Named]) -> Result<(), TorchError> {
        if !self.is_attached {
            for (named, grad) in parameters.iter().zip(&self.grads) {
                set_grad(&named.tensor, grad.as_ref())?;
            }
            self.is_attached = true;
        }
        Ok(())
    }
}
