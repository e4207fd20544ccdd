//! Layer norms and a language model's loss against libtorch's operations.

use drumline_torch::{
    BranchEnd, LayerNormLayer, RightClasses, autocast, layer_norm_cuda, linear_cross_entropy_cuda,
    sum_layer_norm_cuda,
};
use tch::{Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu, leaf, off};

const EPS: f64 = 1e-5;

/// Columns of weight, bias and branch's bias.
fn columns(size: i64) -> [Tensor; 3] {
    [1.0, 0.0, 0.0].map(|mean| leaf(&(Tensor::randn([size], FLOAT) * 0.5 + mean)))
}

#[test]
fn a_norm_equals_libtorchs() {
    let _turn = gpu();
    for (rows, size, kind, close) in [
        (7, 768, Kind::Float, 1e-5),
        (1000, 768, Kind::BFloat16, 1e-2),
        (33, 64, Kind::Half, 2e-3),
        (5000, 640, Kind::Float, 1e-5),
        (40, 8192, Kind::BFloat16, 1e-2),
        (70, 2048, Kind::Float, 1e-5),
        (9, 16, Kind::Float, 1e-5),
    ] {
        tch::manual_seed(4);
        let xs = (Tensor::randn([rows, size], FLOAT) * 2.0 + 1.0).to_kind(kind);
        let (ours, theirs) = (leaf(&xs), leaf(&xs.to_kind(Kind::Float)));
        let ([weight, bias, _], [their_weight, their_bias, _]) = {
            let columns = columns(size);
            (columns.each_ref().map(leaf), columns)
        };
        let layer = LayerNormLayer { weight: &weight, bias: &bias, eps: EPS };
        let found = layer_norm_cuda(&ours, layer).unwrap().unwrap();
        let expected = theirs.layer_norm([size], Some(&their_weight), Some(&their_bias), EPS, false);
        assert_eq!(found.kind(), kind);
        let by_y = Tensor::randn([rows, size], FLOAT).to_kind(kind);
        (&found * &by_y).sum(Kind::Float).backward();
        (&expected * by_y.to_kind(Kind::Float)).sum(Kind::Float).backward();
        for (name, found, expected) in [
            ("y", found, expected),
            ("dx", ours.grad(), theirs.grad()),
            ("dweight", weight.grad(), their_weight.grad()),
            ("dbias", bias.grad(), their_bias.grad()),
        ] {
            let off = off(&found, &expected);
            assert!(off < close, "{name} of {rows} x {size} {kind:?}: {off}");
        }
    }
}

/// A sum and its norm, both of which are used; the sum is in f32 or in the type of the rest.
#[test]
fn a_norm_of_a_sum_equals_libtorchs() {
    let _turn = gpu();
    for (is_long, close) in [(true, 5e-3), (false, 1e-2)] {
        tch::manual_seed(5);
        let (rows, size) = (515, 768);
        let kind = if is_long { Kind::Float } else { Kind::BFloat16 };
        let xs = Tensor::randn([rows, size], FLOAT).to_kind(kind);
        let branch = Tensor::randn([rows, size], FLOAT).to_kind(Kind::BFloat16);
        let ours = [leaf(&xs), leaf(&branch)];
        let theirs = [&xs, &branch].map(|tensor| leaf(&tensor.to_kind(Kind::Float)));
        let their_columns = columns(size);
        let [weight, bias, extra] = their_columns.each_ref().map(leaf);
        let [their_weight, their_bias, their_extra] = their_columns;
        let layer = LayerNormLayer { weight: &weight, bias: &bias, eps: EPS };
        let end = BranchEnd { branch: &ours[1], bias: &extra, dropout: 0.0 };
        let found = autocast(GPU, Kind::BFloat16, || sum_layer_norm_cuda(&ours[0], end, layer)).unwrap();
        let [sum, normed] = found.unwrap().unwrap();
        assert_eq!((sum.kind(), normed.kind()), (kind, Kind::BFloat16));
        let their_sum = &theirs[0] + &theirs[1] + &their_extra;
        let their_normed = their_sum.layer_norm([size], Some(&their_weight), Some(&their_bias), EPS, false);
        let [by_sum, by_normed] = [0, 1].map(|_| Tensor::randn([rows, size], FLOAT));
        let total = |sum: &Tensor, normed: &Tensor| {
            (sum * &by_sum).sum(Kind::Float) + (normed * &by_normed).sum(Kind::Float)
        };
        total(&sum, &normed).backward();
        total(&their_sum, &their_normed).backward();
        for (name, found, expected) in [
            ("sum", &sum, &their_sum),
            ("normed", &normed, &their_normed),
            ("dx", &ours[0].grad(), &theirs[0].grad()),
            ("dbranch", &ours[1].grad(), &theirs[1].grad()),
            ("dextra", &extra.grad(), &their_extra.grad()),
            ("dweight", &weight.grad(), &their_weight.grad()),
            ("dbias", &bias.grad(), &their_bias.grad()),
        ] {
            let off = off(found, expected);
            assert!(off < close, "{name}, long {is_long}: {off}");
        }
    }
}

#[test]
fn the_loss_of_a_language_model_equals_libtorchs() {
    let _turn = gpu();
    for (kind, close) in [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
        tch::manual_seed(6);
        let (rows, size, count, valid) = (300, 64, 1024, 1000);
        let states = Tensor::randn([rows, size], FLOAT).to_kind(kind);
        let weight = (Tensor::randn([count, size], FLOAT) * 0.3).to_kind(kind);
        let classes = Tensor::randint(valid, [rows], (Kind::Int64, GPU));
        let ours = [&states, &weight].map(leaf);
        let theirs = [&states, &weight].map(|tensor| leaf(&tensor.to_kind(Kind::Float)));
        let right = RightClasses { classes: &classes, valid };
        // As the trainer calls it, f32 weights are cast by autocast.
        let short = kind == Kind::BFloat16;
        let ours =
            if short { [&states, &weight].map(|tensor| leaf(&tensor.to_kind(Kind::Float))) } else { ours };
        let loss = || linear_cross_entropy_cuda(&ours[0], &ours[1], right).unwrap().unwrap();
        let found = if short { autocast(GPU, kind, loss).unwrap() } else { loss() };
        let logits = theirs[0].mm(&theirs[1].narrow(0, 0, valid).tr());
        let expected = logits.cross_entropy_loss::<Tensor>(&classes, None, tch::Reduction::Sum, -100, 0.0);
        assert!(off(&found, &expected) < close / 10.0, "{found:?} {expected:?}");
        (&found * 0.5).backward();
        (&expected * 0.5).backward();
        for place in [0, 1] {
            let off = off(&ours[place].grad(), &theirs[place].grad());
            assert!(off < close, "{kind:?}, gradient {place}: {off}");
        }
        let padding = ours[1].grad().narrow(0, valid, count - valid).abs().max().double_value(&[]);
        assert_eq!(padding, 0.0, "padding has no gradient");
        let _ = classes.get(7).fill_(valid);
        let strange = linear_cross_entropy_cuda(&states, &weight, right).unwrap().unwrap();
        assert!(strange.double_value(&[]).is_nan());
        let states = leaf(&states);
        linear_cross_entropy_cuda(&states, &weight, right).unwrap().unwrap().backward();
        let rows = states.grad().isnan().any_dim(1, false).to_kind(Kind::Int64);
        assert_eq!(
            (rows.sum(Kind::Int64).int64_value(&[]), rows.int64_value(&[7])),
            (1, 1),
            "the row of that class"
        );
    }
}

#[test]
fn a_second_backward_through_the_loss_is_an_error() {
    let _turn = gpu();
    let states = leaf(&Tensor::ones([8, 16], FLOAT));
    let (weight, classes) = (Tensor::ones([32, 16], FLOAT), Tensor::zeros([8], (Kind::Int64, GPU)));
    let right = RightClasses { classes: &classes, valid: 32 };
    let loss = linear_cross_entropy_cuda(&states, &weight, right).unwrap().unwrap();
    let backward = |keep| Tensor::f_run_backward(&[&loss], &[&states], keep, false);
    assert!(backward(true).is_ok());
    let error = backward(false).unwrap_err().to_string();
    assert!(error.contains("the first backward has overwritten the logits"), "{error}");
}
