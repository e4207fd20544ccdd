//! Weights and images from formulas, the same as in `bench/peers/resnet18.py`, for benchmarks and tests that compare
//! losses with PyTorch.

use drumline_torch::parameters;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Fills the weights of convolutions and of the classifier by a formula of their position. Norms keep their defaults;
/// biases are zero.
pub fn fill(store: &VarStore) {
    let names: Vec<String> = parameters(store).into_iter().map(|named| named.name).collect();
    fill_part(store, &names);
}

/// Fills a part of a model as [`fill`] fills the whole, whose parameters have these names. Parameters with other names stay
/// as they are.
pub fn fill_part(store: &VarStore, names: &[String]) {
    let _no_grad = tch::no_grad_guard();
    let mut names: Vec<&String> = names.iter().collect();
    names.sort();
    for named in parameters(store) {
        let Ok(place) = names.binary_search(&&named.name) else { continue };
        let mut tensor = named.tensor.shallow_clone();
        if tensor.dim() < 2 {
            let _ = tensor.fill_(if named.name.ends_with("weight") { 1.0 } else { 0.0 });
            continue;
        }
        let fan_in = tensor.size()[1..].iter().product::<i64>() as f64;
        let index = Tensor::arange(tensor.numel() as i64, DOUBLE);
        let values = (&index * 0.7 + &index * &index * 1e-5 + place as f64).sin() * (2.0 / fan_in).sqrt();
        tensor.copy_(&values.view_as(&tensor));
    }
}

/// Which samples to generate, and the size of their images.
#[derive(Debug, Clone, Copy)]
pub struct Samples {
    /// The index of the first sample.
    pub first: i64,
    /// The number of samples.
    pub count: i64,
    /// The side of an image.
    pub edge: i64,
}

/// Images and labels of ten classes: waves whose direction, length and colour depend on the class.
pub fn samples(Samples { first, count, edge }: Samples) -> (Tensor, Tensor) {
    let sample = Tensor::arange_start(first, first + count, DOUBLE);
    let labels = (&sample * 7.0 + (&sample / 3.0).floor()).remainder(10.0);
    let pixels = Tensor::arange(edge, DOUBLE);
    let (y, x) = (pixels.view([edge, 1]), pixels.view([1, edge]));
    let per_image = |values: &Tensor| values.view([-1, 1, 1, 1]);
    let angle = per_image(&(&labels * 0.31));
    let colour = Tensor::arange(3, DOUBLE).view([1, 3, 1, 1]);
    let along = x * angle.cos() + y * angle.sin();
    let waves = along * (&angle * 0.1 + 0.5) + per_image(&(sample * 0.37)) + colour * (angle + 1.0);
    (waves.sin().to_kind(Kind::Float), labels.to_kind(Kind::Int64))
}

/// Token sequences, and the tokens that follow each.
pub fn tokens(texts: i64, length: i64, vocabulary: i64) -> (Tensor, Tensor) {
    let place = Tensor::arange(texts * (length + 1), (Kind::Int64, Device::Cpu));
    let all = (&place * &place * 31 + &place * 7919)
        .remainder(1_000_003)
        .remainder(vocabulary)
        .view([texts, length + 1]);
    (all.narrow(1, 0, length).contiguous(), all.narrow(1, 1, length).contiguous())
}
