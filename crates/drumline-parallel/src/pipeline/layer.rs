//! A model as a list of named layers. A rank builds only those of its stages.

use std::fmt;
use std::time::Instant;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::build::{FirstValues, LayerBuilder, Shared};
use super::error::PipelineError;
use crate::error::ParallelError;

/// What travels between layers, and between stages: a few tensors.
pub type Boundary = Vec<Tensor>;

/// Any error of a layer.
pub type LayerError = Box<dyn std::error::Error + Send + Sync>;

/// What a forward is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Backward follows.
    Train,
    /// Nothing follows: dropout does nothing, and norms use their running statistics.
    Evaluate,
}

impl Mode {
    /// Whether backward follows, as tch's `forward_t` asks.
    pub fn is_train(self) -> bool {
        self == Self::Train
    }
}

/// A layer of a model.
pub trait Layer: Send {
    /// The outputs for these inputs: the micro-batch's own for the first layer, and the outputs of the layer before for
    /// the others.
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError>;
}

/// A layer of a closure.
struct Function<F>(F);

impl<F: Fn(Boundary, Mode) -> Result<Boundary, LayerError> + Send> Layer for Function<F> {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        (self.0)(xs, mode)
    }
}

/// A layer of a closure.
pub fn layer_fn(
    forward: impl Fn(Boundary, Mode) -> Result<Boundary, LayerError> + Send + 'static,
) -> Box<dyn Layer> {
    Box::new(Function(forward))
}

type Build = dyn Fn(&LayerBuilder<'_>) -> Result<Box<dyn Layer>, LayerError> + Send + Sync;

/// A layer that can be built.
pub struct LayerSpec {
    pub(super) name: String,
    pub(super) cost: f64,
    pub(super) is_checkpointed: bool,
    /// Whether its forward names the layers of dropout masks by itself.
    pub(super) names_masks: bool,
    pub(super) build: Box<Build>,
}

impl fmt::Debug for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, cost, is_checkpointed, names_masks, build: _ } = self;
        f.debug_struct("LayerSpec")
            .field("name", name)
            .field("cost", cost)
            .field("is_checkpointed", is_checkpointed)
            .field("names_masks", names_masks)
            .finish_non_exhaustive()
    }
}

impl LayerSpec {
    /// A layer of cost 1. Its variables are under its name.
    pub fn new(
        name: impl Into<String>,
        build: impl Fn(&LayerBuilder<'_>) -> Result<Box<dyn Layer>, LayerError> + Send + Sync + 'static,
    ) -> Self {
        let name = name.into();
        Self { name, cost: 1.0, is_checkpointed: false, names_masks: false, build: Box::new(build) }
    }

    /// The same with a cost: the time of forward and backward in any unit, equal for all layers.
    pub fn cost(self, cost: f64) -> Self {
        Self { cost, ..self }
    }

    /// The same with a forward that calls [`mask_layer`](drumline_torch::mask_layer) by itself, so that dropout draws the
    /// masks of a model that is not cut. By default they are those of `mask_layer(the layer's name, 0)`.
    pub fn names_masks(self) -> Self {
        Self { names_masks: true, ..self }
    }

    /// The same with its activations computed again in backward.
    pub fn checkpointed(self) -> Self {
        Self { is_checkpointed: true, ..self }
    }
}

/// A variable that several layers have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tie {
    /// The variable's name in the whole model.
    pub(super) variable: String,
    /// The names of the layers.
    pub(super) layers: Vec<String>,
}

/// A model as a list of layers.
///
/// ```
/// use drumline_parallel::pipeline::{LayerList, LayerSpec, Linear, layer_fn};
///
/// let mut layers = LayerList::default();
/// for name in ["fc1", "fc2"] {
///     layers.push(LayerSpec::new(name, |layer| Ok(Box::new(Linear::new(&layer.path(), 8, 8)?))));
///     layers.push(LayerSpec::new(format!("{name}.relu"), |_| {
///         Ok(layer_fn(|xs, _| xs.iter().map(|x| Ok(x.f_relu()?)).collect()))
///     }).cost(0.1));
/// }
/// assert_eq!(layers.costs(), [1.0, 0.1, 1.0, 0.1]);
/// ```
#[derive(Debug, Default)]
pub struct LayerList {
    pub(super) layers: Vec<LayerSpec>,
    pub(super) ties: Vec<Tie>,
}

impl LayerList {
    /// Adds the next layer.
    pub fn push(&mut self, layer: LayerSpec) {
        self.layers.push(layer);
    }

    /// Says that these layers have a variable in common, such as a language model's embedding and output layer. They get it
    /// from [`LayerBuilder::tied`].
    pub fn tie(&mut self, variable: impl Into<String>, layers: &[&str]) {
        let layers = layers.iter().map(ToString::to_string).collect();
        self.ties.push(Tie { variable: variable.into(), layers });
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The names of the layers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.layers.iter().map(|layer| &layer.name[..])
    }

    /// The given cost of each layer.
    pub fn costs(&self) -> Vec<f64> {
        self.layers.iter().map(|layer| layer.cost).collect()
    }

    /// The measured cost of each layer: the seconds of a forward and a backward of this input, the least of `repeats`. Only
    /// one layer is in memory at a time. Ranks that cut by it agree on the costs of one of them first.
    pub fn measure(
        &self,
        input: &[Tensor],
        device: Device,
        repeats: usize,
    ) -> Result<Vec<f64>, ParallelError> {
        let mut xs: Boundary = input.iter().map(|x| x.to_device(device)).collect();
        self.layers.iter().map(|layer| self.measure_layer(layer, &mut xs, device, repeats)).collect()
    }

    /// The cost of a layer for `xs`, which become its outputs.
    fn measure_layer(
        &self,
        spec: &LayerSpec,
        xs: &mut Boundary,
        device: Device,
        repeats: usize,
    ) -> Result<f64, ParallelError> {
        let failed = |cause: LayerError| layer_failed(&spec.name, &cause);
        let store = VarStore::new(device);
        let shared = Shared::new(&store, &self.ties, FirstValues::OfEachLayer(0));
        let layer = shared.build(spec)?;
        let mut least = f64::INFINITY;
        for _ in 0..repeats.max(1) {
            let leaf = |x: &Tensor| {
                let leaf = x.detach();
                if is_differentiable(x.kind()) { leaf.set_requires_grad(true) } else { leaf }
            };
            let begin = Instant::now();
            let made = layer.forward(xs.iter().map(leaf).collect(), Mode::Train).map_err(failed)?;
            let sums = made.iter().filter(|made| made.requires_grad()).map(|made| made.sum(Kind::Float));
            if let Some(sum) = sums.reduce(|sum, next| sum + next) {
                sum.f_backward()?;
                if device.is_cuda() {
                    // Waits for the GPU.
                    let _ = sum.f_double_value(&[])?;
                }
            }
            least = least.min(begin.elapsed().as_secs_f64());
        }
        let outputs = tch::no_grad(|| layer.forward(xs.iter().map(Tensor::detach).collect(), Mode::Train));
        *xs = outputs.map_err(failed)?.iter().map(Tensor::detach).collect();
        Ok(least)
    }
}

/// Whether tensors of this type can have gradients.
pub(super) fn is_differentiable(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}

pub(super) fn layer_failed(layer: &str, cause: &dyn fmt::Display) -> ParallelError {
    PipelineError::Layer { layer: layer.to_owned(), cause: cause.to_string() }.into()
}
