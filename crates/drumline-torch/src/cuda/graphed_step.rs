//! A step that is run a few times as it is, then recorded, and from then on launched as a whole.
//!
//! ```text
//!   run(step)   1 … 3: runs, on a stream of its own     4: is recorded, then launched     5 …: is launched
//! ```
//! Each call is one real step. What changes from step to step must lie in tensors that stay where they are: inputs are copied into
//! them before the call, and so is the learning rate (`Optimizer::keep_lr_on_device`). What the processor decides or counts is decided once, in the recording.

use super::graph::{Graph, Pool};
use super::stream::{Priority, Stream};
use crate::error::TorchError;

/// Steps before the recording: libraries choose their kernels in the first ones, and optimizers make what they keep.
const WARM_UPS: u32 = 3;

/// A step, and what it leaves: tensors that each launch fills anew.
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
/// optimizer.keep_lr_on_device()?; // set_lr counts for launches, too
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
    /// What the last run left, or what all launches leave.
    left: Option<R>,
}

impl<R> GraphedStep<R> {
    /// A step on this GPU.
    pub fn new(device: usize) -> Result<Self, TorchError> {
        let stream = Stream::new(device, Priority::Normal)?;
        Ok(Self { stream, runs: 0, graph: None, left: None })
    }

    /// Makes a step. Once it is recorded, `step` is not called any more, and what it left in the recording is returned, filled anew.
    ///
    /// The work before it on the current stream comes before the step, and what follows comes after it.
    ///
    /// An error of the recording leaves the model as it was before the call: the same step can be made without a graph; the next call tries to record again.
    ///
    /// Where the step calls other GPUs, drop this before the group: NCCL waits for the graphs that have its calls.
    pub fn run<E: From<TorchError>>(&mut self, step: impl FnOnce() -> Result<R, E>) -> Result<&R, E> {
        let outside = Stream::current(self.stream.device())?;
        let scope = self.stream.enter()?;
        self.stream.wait_for_stream(outside)?;
        match &self.graph {
            Some(graph) => graph.launch()?,
            None if self.runs < WARM_UPS => {
                // What the last run left goes first: its memory serves this one.
                self.left = None;
                self.left = Some(step()?);
                self.runs += 1;
            }
            None => {
                self.left = None;
                let (graph, left) = Graph::record(Pool::new()?, step)?;
                graph.launch()?;
                (self.graph, self.left) = (Some(graph), Some(left));
            }
        }
        drop(scope);
        outside.wait_for_stream(self.stream)?;
        self.left.as_ref().ok_or_else(|| TorchError::Unfit("a step that left nothing".to_owned()).into())
    }

    /// Whether it is launched as a whole by now.
    pub fn is_recorded(&self) -> bool {
        self.graph.is_some()
    }
}
