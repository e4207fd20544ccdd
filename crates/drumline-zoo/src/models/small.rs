//! Two small models for tests and first experiments. They train in seconds on one core.

use tch::Tensor;
use tch::nn::{Module, ModuleT, Path};

use super::layers::{Builder, Conv, ConvShape, Linear, draw_again};
use super::norm::NormLayer;

/// Two linear layers on the image averaged to 8×8 pixels. It has no norm, so its gradients do not depend on how a batch
/// is split.
#[derive(Debug)]
pub(super) struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

pub(super) fn mlp(builder: &Builder<'_>, path: &Path<'_>, num_classes: i64) -> Mlp {
    Mlp { fc1: builder.linear(path / "fc1", 192, 64), fc2: builder.linear(path / "fc2", 64, num_classes) }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Tensor {
        let xs = xs.adaptive_avg_pool2d([8, 8]).flatten(1, -1);
        self.fc2.forward(&self.fc1.forward(&xs).relu_())
    }
}

/// Three 3×3 convolutions of stride 2 with norm and ReLU, then the mean over pixels and a linear layer.
#[derive(Debug)]
pub(super) struct ConvNet {
    convs: Vec<(Conv, NormLayer)>,
    fc: Linear,
}

pub(super) fn conv_net(builder: &Builder<'_>, path: &Path<'_>, num_classes: i64) -> ConvNet {
    let channels = [3, 32, 64, 128];
    let convs = channels.windows(2).zip(1..).map(|(pair, place)| {
        let shape = ConvShape::new(pair[0], pair[1], 3).stride(2);
        let conv = builder.conv(path / format!("conv{place}"), shape);
        (conv, builder.norm(path / format!("bn{place}"), pair[1]))
    });
    let convs = convs.collect();
    let fc = builder.linear(path / "fc", channels[3], num_classes);
    draw_again(builder.take_convs());
    ConvNet { convs, fc }
}

impl ModuleT for ConvNet {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let mut out = xs.shallow_clone();
        for (conv, norm) in &self.convs {
            out = norm.forward_relu(&conv.forward(&out), train);
        }
        self.fc.forward(&out.adaptive_avg_pool2d([1, 1]).flatten(1, -1))
    }
}
