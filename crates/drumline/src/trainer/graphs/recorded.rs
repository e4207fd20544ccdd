//! A recorded step: forward, loss and backward in one graph, with its inputs and outputs.

use drumline_torch::cuda::{Graph, Stream, copy_async};
use drumline_torch::{Named, TorchError, grads_are, set_grad};
use tch::{Device, Tensor};

use super::super::batch::Batch;
use super::super::learner::{ByGraph, Computed, Rescaled};
use super::super::step_mode::{Key, shapes, tensors};
use super::super::supply::Window;
use super::super::upload::Uploads;

/// The graph of forward, loss and backward, with its inputs.
pub(super) struct Recorded<B, O> {
    /// The key of the recorded step.
    pub(super) key: Key,
    pub(super) made: Made<O>,
    /// The inputs of the graph.
    pub(super) batches: Vec<B>,
    /// Memory for the next batches, which are copied during the step, if there is enough.
    uploads: Option<Uploads>,
}

/// The graph and its outputs.
pub(super) struct Made<O> {
    pub(super) graph: Graph,
    /// The factor of the loss, which the graph reads.
    pub(super) factor: Tensor,
    /// The sum of the losses; in fp16 also whether gradients have overflowed, as 1 or 0, and the scale of the next
    /// step; the norm, if gradients are clipped by norm.
    pub(super) figures: Tensor,
    /// Pinned memory for the figures on the host.
    pub(super) read: Tensor,
    /// Whether the loss is scaled, in fp16.
    pub(super) is_scaled: bool,
    pub(super) outputs: Vec<O>,
    pub(super) grads: Vec<Option<Tensor>>,
}

impl<O> Made<O> {
    /// Waits for the graph, and reads its figures. It reads through pinned memory: otherwise the driver would block
    /// until then, and a graph that waits for a lost rank could not be aborted.
    pub(super) fn read(&self) -> Result<Computed, TorchError> {
        let mut read = self.read.shallow_clone();
        copy_async(&mut read, &self.figures)?;
        if let Device::Cuda(gpu) = self.figures.device() {
            Stream::current(gpu)?.synchronize()?;
        }
        let figures = Vec::<f64>::try_from(read)?;
        let (rescaled, norm) = match &figures[1..] {
            [overflow, scale, rest @ ..] if self.is_scaled => {
                (Some(Rescaled { has_overflowed: *overflow > 0.0, scale: *scale }), rest.first())
            }
            rest => (None, rest.first()),
        };
        Ok(Computed { sum: figures[0], by_graph: Some(ByGraph { rescaled, norm: norm.copied() }) })
    }
}

impl<B: Batch, O> Recorded<B, O> {
    /// A recording with its input batches.
    pub(super) fn new(made: Made<O>, batches: Vec<B>, key: Key) -> Self {
        let uploads = match tensors(&batches).unwrap_or_default().first().map(|tensor| tensor.device()) {
            Some(Device::Cuda(gpu)) => Uploads::new(&key.shapes, gpu)
                .inspect_err(|why| tracing::debug!("batches are not copied beside the steps: {why}"))
                .ok(),
            _ => None,
        };
        Self { key, made, batches, uploads }
    }

    /// Copies batches into the inputs of the graph.
    pub(super) fn load_inputs(&self, window: &Window<B>, factor: f64) -> Result<(), TorchError> {
        let inputs = tensors(&self.batches).unwrap_or_default();
        match self.uploads.as_ref().filter(|_| window.is_uploaded) {
            Some(uploads) => uploads.take(&inputs)?,
            None => {
                for (to, from) in inputs.into_iter().zip(tensors(&window.batches).unwrap_or_default()) {
                    copy_async(&mut to.shallow_clone(), from)?;
                }
            }
        }
        let _ = self.made.factor.shallow_clone().f_fill_(factor)?;
        Ok(())
    }

    /// Launches the graph as this step.
    pub(super) fn launch(&self, step: u64) -> Result<(), TorchError> {
        self.uploads.as_ref().map_or(Ok(()), Uploads::mark)?;
        self.made.graph.launch_as_step(step)
    }

    /// Makes batches on the GPU on a second stream, during the graph. What follows on the current stream may use them.
    pub(super) fn beside(&self, make: impl FnOnce() -> Window<B>) -> Window<B> {
        let Some((uploads, scope)) =
            self.uploads.as_ref().and_then(|uploads| Some((uploads, uploads.enter().ok()?)))
        else {
            return make();
        };
        let mut window = make();
        drop(scope);
        if let Err(error) = uploads.join(&tensors(&window.batches).unwrap_or_default()) {
            window.failure = Some(error.into());
        }
        window
    }

    /// Begins to copy batches, if they have the shapes of the graph's inputs.
    pub(super) fn begin_upload(&mut self, window: &mut Window<B>) {
        let fits = shapes(&window.batches).is_some_and(|shapes| shapes == self.key.shapes);
        let Some(uploads) = self.uploads.as_mut().filter(|_| fits) else { return };
        match uploads.begin(&tensors(&window.batches).unwrap_or_default()) {
            Ok(begun) => window.is_uploaded = begun,
            Err(why) => {
                tracing::debug!("batches are not copied beside the steps: {why}");
                self.uploads = None;
            }
        }
    }

    /// Whether the parameters' gradients are those that the graph fills. An eager step or a callback may replace them.
    pub(super) fn is_attached(&self, parameters: &[Named]) -> Result<bool, TorchError> {
        grads_are(parameters.iter().map(|named| &named.tensor), &self.made.grads)
    }

    /// Gives the parameters the gradients that the graph fills.
    pub(super) fn attach(&self, parameters: &[Named]) -> Result<(), TorchError> {
        if self.is_attached(parameters)? {
            return Ok(());
        }
        let mut pairs = parameters.iter().zip(&self.made.grads);
        pairs.try_for_each(|(named, grad)| set_grad(&named.tensor, grad.as_ref()))
    }
}
