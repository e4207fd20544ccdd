//! Convolutions and linear layers with PyTorch's initial weights, drawn in PyTorch's order.
//!
//! torchvision draws the weights of a convolution twice: uniformly when the layer is created, and from a normal
//! distribution when the whole model is complete. Both draws are made here too, because they advance the random
//! generator.

use std::borrow::Borrow;
use std::cell::RefCell;

use drumline_torch::{Conv2d, TorchError, conv_stem_cuda};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::checkpointing::product_of;
use super::draw::{draw_normal_again, drawn};
use super::norm::{Norm, NormLayer};

/// A convolution without bias, as in ResNet.
#[derive(Debug)]
pub(super) struct Conv {
    weight: Tensor,
    shape: ConvShape,
}

/// The shape of a convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvShape {
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    pub(super) kernel: i64,
    pub(super) stride: i64,
    pub(super) groups: i64,
}

impl ConvShape {
    pub(super) fn new(inputs: i64, outputs: i64, kernel: i64) -> Self {
        Self { inputs, outputs, kernel, stride: 1, groups: 1 }
    }

    pub(super) fn stride(self, stride: i64) -> Self {
        Self { stride, ..self }
    }

    pub(super) fn groups(self, groups: i64) -> Self {
        Self { groups, ..self }
    }
}

impl Conv {
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        product_of(&[xs], || self.convolved(xs))
    }

    fn convolved(&self, xs: &Tensor) -> Result<Tensor, TorchError> {
        let ConvShape { kernel, stride, groups, .. } = self.shape;
        if (kernel, stride) == (7, 2)
            && let Some(made) = conv_stem_cuda(xs, &self.weight)?
        {
            return Ok(made);
        }
        Conv2d { stride, padding: (kernel - 1) / 2, groups }.forward(xs, &self.weight)
    }
}

#[derive(Debug)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    pub(super) fn forward(&self, xs: &Tensor) -> Tensor {
        // A module cannot return an error; libtorch's own methods would panic too.
        drumline_torch::linear(xs, &self.weight, Some(&self.bias)).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Creates layers, and remembers the convolutions for their second draw.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    norm: &'a Norm,
    convs: RefCell<Vec<Tensor>>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(norm: &'a Norm) -> Self {
        Self { norm, convs: RefCell::default() }
    }

    pub(super) fn conv<'p>(&self, path: impl Borrow<Path<'p>>, shape: ConvShape) -> Conv {
        let path = path.borrow();
        let ConvShape { inputs, outputs, kernel, groups, .. } = shape;
        let inputs = inputs / groups;
        let size = [outputs, inputs, kernel, kernel];
        let weight = drawn(path, "weight", &size, first_draw(inputs * kernel * kernel));
        self.convs.borrow_mut().push(weight.shallow_clone());
        Conv { weight, shape }
    }

    pub(super) fn linear<'p>(&self, path: impl Borrow<Path<'p>>, inputs: i64, outputs: i64) -> Linear {
        let path = path.borrow();
        let weight = drawn(path, "weight", &[outputs, inputs], first_draw(inputs));
        let bound = 1.0 / (inputs as f64).sqrt();
        let bias = drawn(path, "bias", &[outputs], Init::Uniform { lo: -bound, up: bound });
        Linear { weight, bias }
    }

    pub(super) fn norm(&self, path: Path<'_>, channels: i64) -> NormLayer {
        self.norm.build(path, channels)
    }

    /// The weights of the convolutions, for [`draw_again`].
    pub(super) fn take_convs(&self) -> Vec<Tensor> {
        self.convs.take()
    }
}

/// Draws the weights of convolutions again: Kaiming normal (fan out, ReLU).
pub(super) fn draw_again(convs: Vec<Tensor>) {
    for mut weight in convs {
        let size = weight.size();
        let fan_out = size[0] * size[2] * size[3];
        let std = 2f64.sqrt() / (fan_out as f64).sqrt();
        draw_normal_again(&mut weight, std);
    }
}

/// PyTorch's default for linear layers and convolutions: Kaiming uniform with a = √5.
fn first_draw(fan_in: i64) -> Init {
    let slope = 5f64.sqrt();
    let std = (2.0 / (1.0 + slope * slope)).sqrt() / (fan_in as f64).sqrt();
    let bound = 3f64.sqrt() * std;
    Init::Uniform { lo: -bound, up: bound }
}
