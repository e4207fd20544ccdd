//! Our batch normalisation against libtorch's operations: outputs, gradients and running statistics.

use drumline_torch::{Activation, BatchNormLayer, batch_norm_cuda, batch_norm_sum_relu_cuda};
use tch::{Kind, Tensor};

use super::shared::{FLOAT, GPU, channels_last, gpu, leaf, off};

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

impl Layer {
    fn new(case: &Case) -> Self {
        tch::manual_seed(5);
        let channels = case.size[1];
        // Means that are large compared with the deviation lose precision in naive sums.
        let xs = Tensor::randn(case.size, FLOAT) * 0.5 + Tensor::randn([1, channels, 1, 1], FLOAT) * 3.0;
        Self {
            xs: leaf(&channels_last(&xs.to_kind(case.kind))),
            other: leaf(&channels_last(&Tensor::randn(case.size, FLOAT).to_kind(case.kind))),
            weight: leaf(&(Tensor::rand([channels], FLOAT) + 0.5)),
            bias: leaf(&Tensor::randn([channels], FLOAT)),
            mean: Tensor::zeros([channels], FLOAT),
            var: Tensor::ones([channels], FLOAT),
            batches: Tensor::zeros([0i64; 0], (Kind::Int64, GPU)),
        }
    }

    fn other(&self, case: &Case) -> Option<&Tensor> {
        case.adds.then_some(&self.other)
    }

    /// With a sum there are two equal outputs. Both are used, so that both have a gradient.
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
        match self.other(case) {
            None => batch_norm_cuda(&self.xs, layer, case.activation).unwrap().unwrap(),
            Some(other) => {
                let [one, again] = batch_norm_sum_relu_cuda(&self.xs, layer, other).unwrap().unwrap();
                assert!(one.allclose(&again, 0.0, 0.0, true));
                // The same if only one of them is used.
                match case.size[0] % 3 {
                    0 => one,
                    1 => again,
                    _ => one * 0.25 + again * 0.75,
                }
            }
        }
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

    /// Before the ReLU, in double precision.
    fn before(&self, case: &Case) -> Tensor {
        let [xs, weight, bias, other] = [&self.xs, &self.weight, &self.bias, &self.other]
            .map(|tensor| tensor.detach().to_kind(Kind::Double));
        let y = xs.batch_norm(
            Some(&weight),
            Some(&bias),
            None::<&Tensor>,
            None::<&Tensor>,
            true,
            0.1,
            1e-5,
            false,
        );
        if case.adds { y + other } else { y }
    }

    /// Values near zero may be on either side of the ReLU because of rounding, so they get no gradient.
    fn backward(&self, y: &Tensor, case: &Case) -> Vec<(&'static str, Tensor)> {
        tch::manual_seed(6);
        let edge = if case.kind == Kind::Float { 1e-4 } else { 0.05 };
        let away = self.before(case).abs().gt(edge);
        let grad = channels_last(&(Tensor::randn(case.size, FLOAT) * away).to_kind(case.kind));
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

/// The cases of the last line use the kernels for large tensors.
const SIZES: [[i64; 4]; 12] = [
    [2, 8, 3, 5],
    [128, 64, 8, 8],
    [128, 512, 1, 1],
    [4, 2048, 7, 7],
    [3, 24, 5, 5],
    [32, 256, 28, 28],
    [32, 64, 32, 32],
    [16, 40, 33, 17],
    [64, 64, 28, 28],
    [40, 40, 33, 33],
    [16, 2048, 20, 20],
    [66, 64, 28, 28],
];

fn check(case: &Case) {
    let (ours, theirs) = (Layer::new(case), Layer::new(case));
    let found = ours.backward(&ours.ours(case), case);
    let expected = theirs.backward(&theirs.libtorchs(case), case);
    let close = if case.kind == Kind::Float { 2e-5 } else { 2e-2 };
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let off = off(found, expected);
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
fn results_equal_libtorchs() {
    let _turn = gpu();
    for size in SIZES {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for (adds, activation) in
                [(false, Activation::None), (false, Activation::Relu), (true, Activation::Relu)]
            {
                check(&Case { size, kind, adds, activation });
            }
        }
    }
}

#[test]
fn unsupported_tensors_are_left_to_libtorch() {
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
    let fits = |xs: &Tensor| batch_norm_cuda(xs, fields, Activation::None).unwrap().is_some();
    assert!(fits(&layer.xs));
    assert!(!fits(&layer.xs.contiguous()));
    assert!(!fits(&layer.xs.to_device(tch::Device::Cpu)));
    assert!(!fits(&layer.xs.to_kind(Kind::Double)));
}

/// A diverged network must be visible.
#[test]
fn nan_stays_nan() {
    let _turn = gpu();
    for size in [[2, 8, 3, 5], [64, 64, 28, 28]] {
        for (adds, activation) in [(false, Activation::Relu), (true, Activation::Relu)] {
            let case = Case { size, kind: Kind::BFloat16, adds, activation };
            let layer = Layer::new(&case);
            let _ = tch::no_grad(|| layer.xs.get(0).get(0).get(0).get(0).fill_(f64::INFINITY));
            let y = layer.ours(&case);
            assert!(y.isnan().any().int64_value(&[]) == 1, "{size:?}");
            y.sum(Kind::Float).backward();
            assert!(layer.xs.grad().isnan().any().int64_value(&[]) == 1, "{size:?}");
        }
    }
}
