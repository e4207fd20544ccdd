//! A training step that runs eager a few times, is then recorded, and from then on launched as a CUDA graph.
//!
//! ```text
//!   run(step)   1 … 3: eager, on its own stream     4: recorded, then launched     5 …: launched
//! ```
//! Each call is one real step. Values that change from step to step must be in tensors that stay at the same address:
//! copy inputs into them before the call, and keep the learning rate there (`Optimizer::keep_lr_on_device`). The CPU
//! code of the step runs only once more, in the recording.

use super::graph::{Graph, Pool};
use super::stream::{Priority, Stream};
use crate::error::TorchError;

/// Eager steps before the recording: libraries choose their kernels in them, and optimizers create their state.
const WARM_UPS: u32 = 3;

/// A step and its results: tensors that each launch refreshes.
///
/// ```no_run
/// use drumline_torch::cuda::GraphedStep;
/// use drumline_torch::{Optimizer, Sgd, SgdOptions, TorchError, cuda, parameters};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// cuda::open()?;
/// let vs = nn::VarStore::new(Device::Cuda(0));
/// let model = nn::linear(vs.root(), 10, 1, Default::default());
/// let mut optimizer = Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, ..Default::default() })?;
/// optimizer.keep_lr_on_device()?; // set_lr works for launches, too
/// let mut input = Tensor::zeros([32, 10], (Kind::Float, Device::Cuda(0)));
/// let mut step = GraphedStep::new(0)?;
/// for _ in 0..100 {
///     input.copy_(&Tensor::rand([32, 10], (Kind::Float, Device::Cpu)));
///     let loss = step.run(|| {
///         optimizer.zero_grad()?;
///         let loss = model.forward(&input).square().mean(Kind::Float);
///         loss.f_backward()?;
///         optimizer.step()?;
///         Ok::<_, TorchError>(loss.detach())
///     })?;
///     println!("{}", loss.double_value(&[]));
/// }
/// # Ok::<(), TorchError>(())
/// ```
#[derive(Debug)]
pub struct GraphedStep<R> {
    stream: Stream,
    runs: u32,
    graph: Option<Graph>,
    /// The result of the last eager step, or of all launches.
    result: Option<R>,
}

impl<R> GraphedStep<R> {
    /// A step on this GPU.
    pub fn new(device: usize) -> Result<Self, TorchError> {
        let stream = Stream::new(device, Priority::Normal)?;
        Ok(Self { stream, runs: 0, graph: None, result: None })
    }

    /// Makes a step. Once it is recorded, `step` is not called any more, and the results of the recording are returned,
    /// with new values.
    ///
    /// The step waits for earlier work on the current stream, and later work waits for the step.
    ///
    /// If the recording fails, the model is as before the call: the same step can run in eager mode. The next call
    /// tries to record again.
    ///
    /// If the step has collectives, drop this before the group: NCCL waits for the graphs that have its calls.
    pub fn run<E: From<TorchError>>(&mut self, step: impl FnOnce() -> Result<R, E>) -> Result<&R, E> {
        let outside = Stream::current(self.stream.device())?;
        let scope = self.stream.enter()?;
        self.stream.wait_for_stream(outside)?;
        match &self.graph {
            Some(graph) => graph.launch()?,
            None if self.runs < WARM_UPS => {
                // Drop the last result first, so that this step can reuse its memory.
                self.result = None;
                self.result = Some(step()?);
                self.runs += 1;
            }
            None => {
                self.result = None;
                let (graph, result) = Graph::record(Pool::new()?, step)?;
                graph.launch()?;
                (self.graph, self.result) = (Some(graph), Some(result));
            }
        }
        drop(scope);
        outside.wait_for_stream(self.stream)?;
        self.result.as_ref().ok_or_else(|| TorchError::Internal { what: "a step has no result" }.into())
    }

    /// Whether the step is a CUDA graph by now.
    pub fn is_recorded(&self) -> bool {
        self.graph.is_some()
    }
}
