//! Our batch normalisation against libtorch's own operations: outputs, gradients and what is remembered.

use drumline_torch::{Activation, BatchNormLayer, batch_norm_cuda};
use tch::{Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu};

struct Case {
    size: [i64; 4],
    kind: Kind,
    adds: bool,
    activation: Activation,
}

/// The inputs and parameters of a layer, as leaves.
struct Layer {
    xs: Tensor,
    other: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    batches: Tensor,
}

fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

impl Layer {
    fn new(case: &Case) -> Self {
        tch::manual_seed(5);
        let channels = case.size[1];
        // Means that are large beside the spread cost digits where sums are taken carelessly.
        let xs = Tensor::randn(case.size, FLOAT) * 0.5 + Tensor::randn([1, channels, 1, 1], FLOAT) * 3.0;
        let leaf = |tensor: Tensor| tensor.detach().set_requires_grad(true);
        Self {
            xs: leaf(channels_last(&xs.to_kind(case.kind))),
            other: leaf(channels_last(&Tensor::randn(case.size, FLOAT).to_kind(case.kind))),
            weight: leaf(Tensor::rand([channels], FLOAT) + 0.5),
            bias: leaf(Tensor::randn([channels], FLOAT)),
            mean: Tensor::zeros([channels], FLOAT),
            var: Tensor::ones([channels], FLOAT),
            batches: Tensor::zeros([0i64; 0], (Kind::Int64, GPU)),
        }
    }

    fn other(&self, case: &Case) -> Option<&Tensor> {
        case.adds.then_some(&self.other)
    }

    fn ours(&self, case: &Case) -> Tensor {
        let layer = BatchNormLayer {
            weight: &self.weight,
            bias: &self.bias,
            running_mean: &self.mean,
            running_var: &self.var,
            batches: Some(&self.batches),
            momentum: 0.1,
            eps: 1e-5,
        };
        batch_norm_cuda(&self.xs, layer, self.other(case), case.activation).unwrap().unwrap()
    }

    fn libtorchs(&self, case: &Case) -> Tensor {
        let (weight, bias) = (Some(&self.weight), Some(&self.bias));
        let mut y =
            self.xs.batch_norm(weight, bias, Some(&self.mean), Some(&self.var), true, 0.1, 1e-5, false);
        if let Some(other) = self.other(case) {
            y += other;
        }
        if case.activation == Activation::Relu { y.relu() } else { y }
    }

    fn backward(&self, y: &Tensor, case: &Case) -> Vec<(&'static str, Tensor)> {
        tch::manual_seed(6);
        let grad = channels_last(&Tensor::randn(case.size, FLOAT).to_kind(case.kind));
        (y * grad).sum(Kind::Float).backward();
        let mut found = vec![
            ("y", y.detach()),
            ("dx", self.xs.grad()),
            ("dweight", self.weight.grad()),
            ("dbias", self.bias.grad()),
            ("mean", self.mean.shallow_clone()),
            ("var", self.var.shallow_clone()),
        ];
        if case.adds {
            found.push(("dother", self.other.grad()));
        }
        found
    }
}

fn check(case: &Case) {
    let (ours, theirs) = (Layer::new(case), Layer::new(case));
    let found = ours.backward(&ours.ours(case), case);
    let expected = theirs.backward(&theirs.libtorchs(case), case);
    // Where a tensor is added, libtorch rounds before the sum, so that some numbers near zero lie on the other side of the ReLU.
    let close = if case.kind == Kind::Float { 2e-5 } else { 5e-2 };
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
        let off = (&found - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]).max(1e-9);
        assert!(
            off < close,
            "{name} of {:?} {:?} adds {} {:?}: {off}",
            case.size,
            case.kind,
            case.adds,
            case.activation
        );
    }
    assert_eq!(ours.batches.int64_value(&[]), 1);
}

#[test]
fn it_computes_what_libtorch_computes() {
    let _turn = gpu();
    for size in
        [[2, 8, 3, 5], [128, 64, 8, 8], [128, 512, 1, 1], [4, 2048, 7, 7], [3, 24, 5, 5], [32, 256, 28, 28]]
    {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for (adds, activation) in [
                (false, Activation::None),
                (false, Activation::Relu),
                (true, Activation::Relu),
                (true, Activation::None),
            ] {
                check(&Case { size, kind, adds, activation });
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_left_to_libtorch() {
    let _turn = gpu();
    let layer = Layer::new(&Case {
        size: [2, 8, 3, 5],
        kind: Kind::Float,
        adds: false,
        activation: Activation::None,
    });
    let fields = BatchNormLayer {
        weight: &layer.weight,
        bias: &layer.bias,
        running_mean: &layer.mean,
        running_var: &layer.var,
        batches: None,
        momentum: 0.1,
        eps: 1e-5,
    };
    let fits = |xs: &Tensor| batch_norm_cuda(xs, fields, None, Activation::None).unwrap().is_some();
    assert!(fits(&layer.xs));
    assert!(!fits(&layer.xs.contiguous()));
    assert!(!fits(&layer.xs.to_device(tch::Device::Cpu)));
    assert!(!fits(&layer.xs.to_kind(Kind::Double)));
}
