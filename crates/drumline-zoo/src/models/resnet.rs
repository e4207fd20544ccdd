//! ResNet, ResNeXt and Wide-ResNet.
//!
//! ```text
//!   image ─ conv 7×7 /2 ─ norm ─ max-pool /2 ─ layer1 ─ layer2 /2 ─ layer3 /2 ─ layer4 /2 ─ mean over pixels ─ fc
//!
//!   a block:   ┌─ conv ─ norm ─ relu ─ conv ─ norm ( ─ relu ─ conv ─ norm ) ─┐
//!            ──┤                                                             + ── relu ──
//!              └─ identity, or a 1×1 conv with norm where the shape changes ─┘
//! ```
//! Blocks of two 3×3 convolutions are `Basic`; those of 1×1, 3×3, 1×1 are `Bottleneck`, and the stride sits on the 3×3.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline::engine::pipeline::{LayerBuilder, LayerList, LayerSpec, layer_fn};
use drumline_torch::max_pool_cuda;
use tch::Tensor;
use tch::nn::{ModuleT, Path};

use super::ModelOptions;
use super::checkpointing::{Blocks, OneBlock};
use super::layers::{Builder, Conv, ConvShape, Linear, draw_again};
use super::norm::NormLayer;
use crate::error::ZooError;
use crate::models::net::tensors_of;

/// The parameters that distinguish the members of the family.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    block: BlockKind,
    blocks: [i64; 4],
    groups: i64,
    /// Channels per group in `layer1`.
    width: i64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum BlockKind {
    Basic,
    Bottleneck,
}

use BlockKind::{Basic, Bottleneck};

const fn plain(block: BlockKind, blocks: [i64; 4]) -> Shape {
    Shape { block, blocks, groups: 1, width: 64 }
}

const fn grouped(blocks: [i64; 4], groups: i64, width: i64) -> Shape {
    Shape { block: Bottleneck, blocks, groups, width }
}

/// torchvision's names.
pub(super) const ARCHES: [(&str, Shape); 10] = [
    ("resnet18", plain(Basic, [2, 2, 2, 2])),
    ("resnet34", plain(Basic, [3, 4, 6, 3])),
    ("resnet50", plain(Bottleneck, [3, 4, 6, 3])),
    ("resnet101", plain(Bottleneck, [3, 4, 23, 3])),
    ("resnet152", plain(Bottleneck, [3, 8, 36, 3])),
    ("resnext50_32x4d", grouped([3, 4, 6, 3], 32, 4)),
    ("resnext101_32x8d", grouped([3, 4, 23, 3], 32, 8)),
    ("resnext101_64x4d", grouped([3, 4, 23, 3], 64, 4)),
    ("wide_resnet50_2", grouped([3, 4, 6, 3], 1, 128)),
    ("wide_resnet101_2", grouped([3, 4, 23, 3], 1, 128)),
];

/// A convolution followed by a norm.
#[derive(Debug)]
struct ConvNorm {
    conv: Conv,
    norm: NormLayer,
}

impl ConvNorm {
    fn new(builder: &Builder<'_>, path: &Path<'_>, names: [&str; 2], shape: ConvShape) -> Self {
        let conv = builder.conv(path / names[0], shape);
        Self { conv, norm: builder.norm(path / names[1], shape.outputs) }
    }

    fn forward(&self, xs: &Tensor, train: bool) -> Tensor {
        self.norm.forward(&self.conv.forward(xs), train)
    }

    fn forward_relu(&self, xs: &Tensor, train: bool) -> Tensor {
        self.norm.forward_relu(&self.conv.forward(xs), train)
    }

    fn forward_add_relu(&self, xs: &Tensor, other: &Tensor, train: bool) -> [Tensor; 2] {
        self.norm.forward_add_relu(&self.conv.forward(xs), other, train)
    }
}

#[derive(Debug)]
struct Block {
    /// All convolutions but the last.
    convs: Vec<ConvNorm>,
    last: ConvNorm,
    downsample: Option<ConvNorm>,
}

impl Block {
    fn new(builder: &Builder<'_>, path: &Path<'_>, shape: BlockShape) -> Self {
        let names = [["conv1", "bn1"], ["conv2", "bn2"], ["conv3", "bn3"]];
        let convs = shape.convs().into_iter().zip(names);
        let mut convs: Vec<_> =
            convs.map(|(conv, names)| ConvNorm::new(builder, path, names, conv)).collect();
        let last = convs.remove(convs.len() - 1);
        let downsample = (shape.stride != 1 || shape.inputs != shape.outputs).then(|| {
            let conv = ConvShape::new(shape.inputs, shape.outputs, 1).stride(shape.stride);
            ConvNorm::new(builder, &(path / "downsample"), ["0", "1"], conv)
        });
        Self { convs, last, downsample }
    }

    /// Both inputs have the same elements: one is for the convolutions, one for the shortcut.
    fn forward(&self, through: &Tensor, past: &Tensor, train: bool) -> [Tensor; 2] {
        let mut out = through.shallow_clone();
        for conv in &self.convs {
            out = conv.forward_relu(&out, train);
        }
        match &self.downsample {
            Some(downsample) => self.last.forward_add_relu(&out, &downsample.forward(past, train), train),
            None => self.last.forward_add_relu(&out, past, train),
        }
    }
}

/// The channels into a block, between its convolutions, and out of it.
#[derive(Debug, Clone, Copy)]
struct BlockShape {
    kind: BlockKind,
    inputs: i64,
    inner: i64,
    outputs: i64,
    stride: i64,
    groups: i64,
}

impl BlockShape {
    /// The products for an image: layers halve its sides and double its channels.
    fn cost(self) -> f64 {
        let convs = self.convs().into_iter();
        let products: i64 =
            convs.map(|conv| conv.kernel * conv.kernel * conv.inputs / conv.groups * conv.outputs).sum();
        let side = 56 * 64 / (self.outputs / if self.kind == Bottleneck { 4 } else { 1 });
        (side * side * products) as f64
    }

    fn convs(self) -> Vec<ConvShape> {
        let Self { inputs, inner, outputs, stride, groups, .. } = self;
        match self.kind {
            Basic => vec![ConvShape::new(inputs, inner, 3).stride(stride), ConvShape::new(inner, outputs, 3)],
            Bottleneck => vec![
                ConvShape::new(inputs, inner, 1),
                ConvShape::new(inner, inner, 3).stride(stride).groups(groups),
                ConvShape::new(inner, outputs, 1),
            ],
        }
    }
}

/// A ResNet, ResNeXt or Wide-ResNet.
#[derive(Debug)]
pub(super) struct ResNet {
    stem: ConvNorm,
    blocks: Blocks<Block>,
    fc: Linear,
}

/// Builds the network under `path`.
pub(super) fn resnet(
    builder: &Builder<'_>,
    path: &Path<'_>,
    shape: &Shape,
    options: &ModelOptions,
) -> Result<ResNet, ZooError> {
    let stem = stem(builder, path);
    let mut inputs = 64;
    let mut blocks = Vec::new();
    for (name, block) in shape.all_blocks() {
        inputs = block.outputs;
        let path = name.split('.').fold(path.clone(), |path, part| path / part);
        blocks.push(Block::new(builder, &path, block));
    }
    let fc = builder.linear(path / "fc", inputs, options.num_classes);
    draw_again(builder.take_convs());
    Ok(ResNet { stem, blocks: Blocks::new(blocks, options.checkpoint)?, fc })
}

/// The network as a list of layers, for pipelines: the stem, each block, and the last layer.
pub(super) fn layers(shape: &Shape, options: &ModelOptions) -> Result<LayerList, ZooError> {
    let blocks: Vec<_> = shape.all_blocks().collect();
    options.checkpoint.check(blocks.len())?;
    // Convolutions are drawn again when the last layer is built.
    let convs = Arc::new(Mutex::new(Vec::new()));
    let mut list = LayerList::default();
    let (norm, drawn) = (options.norm.clone(), Arc::clone(&convs));
    let stem = LayerSpec::new("stem", move |layer| {
        let builder = Builder::new(&norm);
        let made = stem(&builder, &layer.root());
        keep_for_later(&drawn, layer, builder.take_convs());
        Ok(layer_fn(move |xs, mode| {
            let [images] = tensors_of(xs)?;
            Ok(vec![pooled(&made.forward_relu(&images, mode.is_train()))])
        }))
    });
    // Costs are products for each image of 224 pixels.
    list.push(stem.cost((112 * 112 * 64 * 147) as f64));
    let outputs = blocks.last().map_or(64, |(_, block)| block.outputs);
    for (index, (name, block)) in blocks.into_iter().enumerate() {
        let (norm, drawn, how) = (options.norm.clone(), Arc::clone(&convs), options.checkpoint);
        let cost = block.cost();
        let spec = LayerSpec::new(name, move |layer| {
            let builder = Builder::new(&norm);
            let made = OneBlock::new(Block::new(&builder, &layer.path(), block), index, how);
            keep_for_later(&drawn, layer, builder.take_convs());
            Ok(layer_fn(move |xs, mode| {
                let ([x], train) = (tensors_of(xs)?, mode.is_train());
                let [out, _] = made.forward(&[&x], move |block, xs| block.forward(&xs[0], &xs[0], train));
                Ok(vec![out])
            }))
        });
        list.push(spec.cost(cost));
    }
    let (norm, num_classes) = (options.norm.clone(), options.num_classes);
    let last = LayerSpec::new("fc", move |layer| {
        let fc = Builder::new(&norm).linear(layer.path(), outputs, num_classes);
        draw_again(std::mem::take(&mut *lock(&convs)));
        Ok(layer_fn(move |xs, _| {
            let [x] = tensors_of(xs)?;
            Ok(vec![classified(&fc, &x)])
        }))
    });
    list.push(last.cost((outputs * num_classes) as f64));
    Ok(list)
}

/// Keeps convolutions for their second draw, or draws them now if layers draw by themselves.
fn keep_for_later(kept: &Mutex<Vec<Tensor>>, layer: &LayerBuilder<'_>, mut convs: Vec<Tensor>) {
    if layer.draws_alone() { draw_again(convs) } else { lock(kept).append(&mut convs) }
}

fn lock(convs: &Mutex<Vec<Tensor>>) -> MutexGuard<'_, Vec<Tensor>> {
    convs.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stem(builder: &Builder<'_>, path: &Path<'_>) -> ConvNorm {
    ConvNorm::new(builder, path, ["conv1", "bn1"], ConvShape::new(3, 64, 7).stride(2))
}

/// The logits of the last block's output.
fn classified(fc: &Linear, xs: &Tensor) -> Tensor {
    fc.forward(&xs.adaptive_avg_pool2d([1, 1]).flatten(1, -1))
}

impl Shape {
    /// The number of layers of the list.
    pub(super) fn num_layers(&self) -> usize {
        self.blocks.iter().sum::<i64>() as usize + 2
    }

    /// All blocks, with their names.
    fn all_blocks(&self) -> impl Iterator<Item = (String, BlockShape)> {
        let places =
            (0u32..).zip(self.blocks).flat_map(|(layer, count)| (0..count).map(move |at| (layer, at)));
        let mut inputs = 64;
        let blocks = places.map(move |(layer, place)| {
            let block = self.block(layer, place, inputs);
            inputs = block.outputs;
            (format!("layer{}.{place}", layer + 1), block)
        });
        blocks.collect::<Vec<_>>().into_iter()
    }

    /// The block at an index in a layer, both counted from 0.
    fn block(&self, layer: u32, place: i64, inputs: i64) -> BlockShape {
        let planes = 64 << layer;
        let stride = if layer > 0 && place == 0 { 2 } else { 1 };
        let (inner, outputs) = match self.block {
            Basic => (planes, planes),
            Bottleneck => (planes * self.width / 64 * self.groups, planes * 4),
        };
        BlockShape { kind: self.block, inputs, inner, outputs, stride, groups: self.groups }
    }
}

impl ModuleT for ResNet {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let out = pooled(&self.stem.forward_relu(xs, train));
        let mut out = [out.shallow_clone(), out];
        for index in 0..self.blocks.len() {
            let [through, past] = &out;
            out = self
                .blocks
                .forward(index, &[through, past], move |block, xs| block.forward(&xs[0], &xs[1], train));
        }
        classified(&self.fc, &out[0])
    }
}

/// Max pooling: 3×3 with stride 2.
fn pooled(xs: &Tensor) -> Tensor {
    // A module cannot return an error; libtorch's own methods would panic too.
    let made = max_pool_cuda(xs).unwrap_or_else(|error| panic!("max-pool: {error}"));
    made.unwrap_or_else(|| xs.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false))
}
