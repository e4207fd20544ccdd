//! Dropout by position draws the masks of a CPU, alone and fused, and others with each launch of a graph.

use drumline_torch::cuda::{Graph, Pool, Priority, Stream};
use drumline_torch::{
    BranchEnd, LayerNormLayer, Masks, StepSamples, TorchError, dropout, mask_layer, relu_dropout,
    sum_layer_norm_cuda, sum_with_dropout,
};
use tch::{Device, Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu, leaf, off, values};

const HOST: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The samples of a rank of two that has seen three.
fn samples(count: i64) -> StepSamples {
    StepSamples { first: 7, stride: 2, count: count as u64 }
}

/// Numbers that are exact in 16 bits, also times two, and none of them zero.
fn numbers(size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, HOST).remainder(13) - 6.5).view(size)
}

type Operation = fn(&Tensor, &Tensor) -> Result<Tensor, TorchError>;

const OPERATIONS: [(&str, Operation); 3] = [
    ("dropout", |xs, _| dropout(xs, 0.5)),
    ("relu_dropout", |xs, _| relu_dropout(xs, 0.5)),
    ("sum_with_dropout", |xs, base| sum_with_dropout(base, xs, 0.5)),
];

/// The result and the gradients of an operation on this device.
fn made(operation: Operation, size: &[i64], kind: Kind, device: Device) -> [Vec<f32>; 3] {
    let masks = Masks::new(42, device).unwrap();
    masks.set_step(5).unwrap();
    let on = |tensor: Tensor| leaf(&tensor.to_kind(kind).to_device(device));
    let (xs, base) = (on(numbers(size)), on(numbers(size) * 2.0));
    let _scope = masks.enter(samples(4));
    let _layer = mask_layer("block", 3);
    let _ = dropout(&base, 0.3).unwrap();
    let out = operation(&xs, &base).unwrap();
    (&out * numbers(size).to_kind(kind).to_device(device)).sum(Kind::Float).backward();
    let by_base = if base.grad().defined() { base.grad() } else { base.zeros_like() };
    [out.detach(), xs.grad(), by_base].map(|tensor| values(&tensor))
}

#[test]
fn a_backward_in_another_step_is_an_error() {
    let _turn = gpu();
    let masks = Masks::new(42, GPU).unwrap();
    let _scope = masks.enter(samples(4));
    for (name, operation) in OPERATIONS {
        let run = |advances: bool| {
            let (xs, base) = (leaf(&numbers(&[4, 64]).to_device(GPU)), numbers(&[4, 64]).to_device(GPU));
            let loss = operation(&xs, &base).unwrap().sum(Kind::Float);
            if advances {
                masks.advance().unwrap();
            }
            loss.f_backward().map_err(|error| error.to_string())
        };
        run(false).unwrap();
        match run(true) {
            Err(error) => {
                assert!(error.contains("the step of its Masks has changed since forward"), "{name}: {error}")
            }
            // Its result says what was dropped.
            Ok(()) => assert_eq!(name, "relu_dropout"),
        }
    }
}

#[test]
fn masks_are_those_of_a_cpu() {
    let _turn = gpu();
    for (name, operation) in OPERATIONS {
        // The last of these has no sample for each row, and the one before a size that vectors do not divide.
        for size in [&[4, 16, 64][..], &[4, 1000, 48], &[4, 7, 5], &[6, 32]] {
            let expected = made(operation, size, Kind::Float, Device::Cpu);
            assert!(expected[0].contains(&0.0) || name == "sum_with_dropout");
            assert_eq!(made(operation, size, Kind::Float, GPU), expected, "{name} of {size:?}");
            // 16 bits round the results, but zeros are zeros.
            for kind in [Kind::BFloat16, Kind::Half] {
                let found = made(operation, size, kind, GPU);
                for (found, expected) in found.iter().zip(&expected) {
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.01 * b.abs();
                    assert!(found.iter().zip(expected).all(close), "{name} of {size:?} in {kind:?}");
                }
            }
        }
    }
}

#[test]
fn a_double_and_a_view_are_dropped_by_the_same_masks() {
    let _turn = gpu();
    let masks = Masks::new(1, GPU).unwrap();
    let xs = Tensor::ones([4, 40, 24], FLOAT);
    let drawn = |xs: &Tensor| {
        let _scope = masks.enter(samples(4));
        dropout(xs, 0.5).unwrap()
    };
    let expected = values(&drawn(&xs));
    assert_eq!(values(&drawn(&xs.to_kind(Kind::Double))), expected);
    assert_eq!(values(&drawn(&xs.transpose(1, 2).contiguous().transpose(1, 2))), expected);
}

#[test]
fn each_launch_of_a_graph_draws_the_masks_of_its_step() {
    let _turn = gpu();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _stream = stream.enter().unwrap();
    let (masks, ones) = (Masks::new(9, GPU).unwrap(), Tensor::ones([4, 512], FLOAT));
    let draw = || {
        let _scope = masks.enter(samples(4));
        dropout(&ones, 0.5)
    };
    let eager: Vec<_> = (1..=3)
        .map(|step| {
            masks.set_step(step).unwrap();
            values(&draw().unwrap())
        })
        .collect();
    masks.set_step(0).unwrap();
    let (graph, drawn) = Graph::record(Pool::new().unwrap(), || {
        masks.advance()?;
        draw()
    })
    .unwrap();
    let launch = || {
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        values(&drawn)
    };
    let launched: Vec<_> = (1..=3).map(|_| launch()).collect();
    assert_eq!(launched, eager);
    assert!(launched[0] != launched[1] && launched[1] != launched[2]);
    masks.set_step(1).unwrap();
    assert_eq!(launch(), eager[1], "the step is set from outside");
}

#[test]
fn a_norm_of_a_sum_with_dropout_equals_the_same_in_two_operations() {
    let _turn = gpu();
    for (kind, sum_kind, size, close) in [
        (Kind::Float, Kind::Float, [3, 50, 768], 1e-5),
        (Kind::BFloat16, Kind::BFloat16, [4, 64, 1600], 1e-2),
        (Kind::BFloat16, Kind::BFloat16, [5, 9, 64], 1e-2),
    ] {
        tch::manual_seed(8);
        let masks = Masks::new(3, GPU).unwrap();
        let columns = [1.0, 0.0, 0.0].map(|mean| Tensor::randn([size[2]], FLOAT) * 0.5 + mean);
        let (xs, branch) =
            (Tensor::randn(size, FLOAT).to_kind(sum_kind), Tensor::randn(size, FLOAT).to_kind(kind));
        let [by_sum, by_normed] = [0, 1].map(|_| Tensor::randn(size, FLOAT));
        let run = |fused: bool| {
            let [weight, bias, extra] = columns.each_ref().map(leaf);
            let wide =
                |tensor: &Tensor| leaf(&if fused { tensor.copy() } else { tensor.to_kind(Kind::Float) });
            let (xs, branch) = (wide(&xs), wide(&branch));
            let _scope = masks.enter(samples(size[0]));
            let [sum, normed] = if fused {
                let layer = LayerNormLayer { weight: &weight, bias: &bias, eps: 1e-5 };
                let end = BranchEnd { branch: &branch, bias: &extra, dropout: 0.2 };
                sum_layer_norm_cuda(&xs, end, layer).unwrap().unwrap()
            } else {
                let sum = sum_with_dropout(&xs, &(&branch + &extra), 0.2).unwrap();
                let normed = sum.layer_norm([size[2]], Some(&weight), Some(&bias), 1e-5, false);
                [sum, normed]
            };
            ((&sum * &by_sum).sum(Kind::Float) + (&normed * &by_normed).sum(Kind::Float)).backward();
            [
                sum.detach(),
                normed.detach(),
                xs.grad(),
                branch.grad(),
                extra.grad(),
                weight.grad(),
                bias.grad(),
            ]
        };
        let names = ["sum", "normed", "dx", "dbranch", "dextra", "dweight", "dbias"];
        for ((name, found), expected) in names.iter().zip(run(true)).zip(run(false)) {
            let off = off(&found, &expected);
            assert!(off < close, "{name} of {size:?} in {kind:?}: {off}");
        }
    }
}
