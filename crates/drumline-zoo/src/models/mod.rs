//! Image models by name, and text models ([`bert`], [`gpt`], [`text`], [`transformer`]), which are built from their
//! options.
//!
//! Names, shapes and order of the tensors are those of torchvision. So are the initial weights: after
//! `tch::manual_seed(s)`, a model has the same weights as torchvision's after `torch.manual_seed(s)`.
//!
//! ```
//! use drumline_zoo::models::{ModelOptions, build};
//! use tch::nn::{self, ModuleT};
//! use tch::{Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = build("resnet18", &vs.root(), &ModelOptions { num_classes: 10, ..Default::default() })?;
//! let images = Tensor::zeros([2, 3, 32, 32], (Kind::Float, Device::Cpu));
//! assert_eq!(model.forward_t(&images, false).size(), [2, 10]);
//! assert!(vs.variables().contains_key("layer1.0.conv1.weight"));
//! # Ok::<(), drumline_zoo::ZooError>(())
//! ```

pub mod bert;
mod checkpointing;
mod draw;
mod dropout;
pub mod gpt;
mod layers;
mod logits;
mod net;
mod norm;
mod options;
mod ranks;
mod resnet;
mod small;
pub mod text;
pub mod transformer;

use drumline::engine::pipeline::LayerList;
use drumline_torch::{TorchError, channels_last, parameters, weights_channels_last};
use tch::Tensor;
use tch::nn::{ModuleT, Path, VarStore};

pub use checkpointing::Checkpointing;
pub(crate) use logits::Classes;
pub use logits::Logits;
pub use net::{Net, OutputOf, StagedNet};
pub(crate) use net::{logits_of, only};
pub use norm::{Norm, NormBuilder};
pub use ranks::ModelRanks;

use crate::error::ZooError;
use layers::Builder;

/// The options of an image model.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// The number of classes: the outputs of the last layer.
    pub num_classes: i64,
    /// The normalisation between convolutions.
    pub norm: Norm,
    /// What is kept of blocks for backward.
    pub checkpoint: Checkpointing,
}

impl Default for ModelOptions {
    /// ImageNet's 1000 classes, batch norm on each rank, no checkpoints.
    fn default() -> Self {
        Self { num_classes: 1000, norm: Norm::Batch, checkpoint: Checkpointing::None }
    }
}

/// The names that [`build`] accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    resnet::ARCHES.iter().map(|(name, _)| *name).chain(["mlp", "convnet"])
}

/// Any image model. Unlike `Box<dyn ModuleT>`, it implements `ModuleT` itself.
#[derive(Debug)]
pub struct Model {
    net: Box<dyn ModuleT>,
    is_channels_last: bool,
}

impl Model {
    /// Converts the model to channels-last memory format: all weights in `store`, and each batch. Results are the same
    /// up to rounding. Call it before creating optimizers and replicas.
    pub fn channels_last(self, store: &VarStore) -> Result<Self, TorchError> {
        weights_channels_last(&parameters(store))?;
        Ok(Self { is_channels_last: true, ..self })
    }
}

impl ModuleT for Model {
    fn forward_t(&self, images: &Tensor, train: bool) -> Tensor {
        if !self.is_channels_last {
            return self.net.forward_t(images, train);
        }
        // A module cannot return an error, so this panics if libtorch refuses.
        let images = channels_last(images).expect("a batch of images can be converted to channels-last");
        self.net.forward_t(&images, train)
    }
}

/// Returns an error if there is no model of this name.
pub(crate) fn check_name(arch: &str) -> Result<(), ZooError> {
    if names().any(|name| name == arch) {
        Ok(())
    } else {
        Err(ZooError::UnknownArch { arch: arch.to_owned() })
    }
}

/// The network of this name as a list of layers, for pipelines. Its first layer gets images, as [`build`]'s models do, and the
/// last one returns logits.
pub fn layers(arch: &str, options: &ModelOptions) -> Result<LayerList, ZooError> {
    check_name(arch)?;
    match resnet::ARCHES.iter().find(|(name, _)| *name == arch) {
        Some((_, shape)) => resnet::layers(shape, options),
        None => Err(ZooError::Unsuitable {
            what: format!("{arch} is not cut into stages"),
            fix: "PARALLEL.PP 1, or resnet18".to_owned(),
        }),
    }
}

/// The number of layers of this list; `None` if there is none.
pub(crate) fn num_layers(arch: &str) -> Option<usize> {
    let found = resnet::ARCHES.iter().find(|(name, _)| *name == arch);
    found.map(|(_, shape)| shape.num_layers())
}

/// Builds a model under `path`. Its input is f32 `[N, 3, height, width]`.
pub fn build(arch: &str, path: &Path<'_>, options: &ModelOptions) -> Result<Model, ZooError> {
    let builder = Builder::new(&options.norm);
    let ModelOptions { num_classes, checkpoint, .. } = *options;
    let resnet = resnet::ARCHES.iter().find(|(name, _)| *name == arch);
    if resnet.is_none() {
        check_name(arch)?;
        checkpoint.check_no_blocks(arch)?;
    }
    let model: Box<dyn ModuleT> = match (resnet, arch) {
        (Some((_, shape)), _) => Box::new(resnet::resnet(&builder, path, shape, options)?),
        (None, "mlp") => Box::new(small::mlp(&builder, path, num_classes)),
        _ => Box::new(small::conv_net(&builder, path, num_classes)),
    };
    Ok(Model { net: model, is_channels_last: false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn an_unknown_name_is_answered_with_similar_names() {
        let store = VarStore::new(Device::Cpu);
        let refused =
            |arch: &str| build(arch, &store.root(), &ModelOptions::default()).unwrap_err().to_string();
        assert_eq!(refused("resnet81").split("; try ").next(), Some("there is no model `resnet81`"));
        assert!(refused("ResNet-50").contains("resnet50"), "{}", refused("ResNet-50"));
        assert!(refused("wide_resnet50").contains("wide_resnet50_2"), "{}", refused("wide_resnet50"));
        assert!(refused("vgg").contains("one of resnet18, resnet34"), "{}", refused("vgg"));
        assert!(store.is_empty());
    }

    #[test]
    fn channels_last_gives_the_same_outputs_and_gradients() {
        let run = |is_last: bool| {
            // Values come from a formula, because other tests draw random numbers at the same time.
            let waves = |sizes: &[i64]| {
                let numel: i64 = sizes.iter().product();
                (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 0.7).sin().view(sizes)
            };
            let store = VarStore::new(Device::Cpu);
            let options = ModelOptions { num_classes: 5, ..Default::default() };
            let model = build("convnet", &store.root(), &options).unwrap();
            for named in parameters(&store) {
                tch::no_grad(|| named.tensor.shallow_clone().copy_(&(waves(&named.tensor.size()) * 0.2)));
            }
            let model = if is_last { model.channels_last(&store).unwrap() } else { model };
            let images = waves(&[4, 3, 32, 32]);
            let output = model.forward_t(&images, true);
            output.square().mean(Kind::Float).backward();
            let first = parameters(&store).into_iter().find(|named| named.tensor.dim() == 4).unwrap().tensor;
            (output, first.grad(), first.stride())
        };
        let ((plain, plain_grad, strides), (last, last_grad, last_strides)) = (run(false), run(true));
        assert!(plain.allclose(&last, 1e-3, 1e-4, false), "{}", (&plain - &last).abs().max());
        assert!(plain_grad.allclose(&last_grad, 1e-2, 1e-4, false));
        assert!(strides[1] > 1 && last_strides[1] == 1, "{strides:?} {last_strides:?}");
    }

    #[test]
    fn the_small_models_accept_any_image_size() {
        for arch in ["mlp", "convnet"] {
            let store = VarStore::new(Device::Cpu);
            let options = ModelOptions { num_classes: 7, ..Default::default() };
            let model = build(arch, &store.root(), &options).unwrap();
            for side in [32, 40] {
                let images = Tensor::ones([3, 3, side, side], (Kind::Float, Device::Cpu));
                assert_eq!(model.forward_t(&images, true).size(), [3, 7]);
            }
        }
    }
}
