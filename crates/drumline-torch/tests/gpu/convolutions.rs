//! The first layers of ResNets, and weight gradients on a second stream, against libtorch's operations.

use drumline_torch::cuda::{Graph, Pool, Priority, Stream, synchronize};
use drumline_torch::{
    Beside, Conv2d, Named, Optimizer, Sgd, SgdOptions, TorchError, autocast, conv_stem_cuda, grad,
    max_pool_cuda, set_grad,
};
use tch::{Kind, Tensor};

use super::shared::{FLOAT, GPU, channels_last, gpu, leaf, off};

#[test]
fn max_pool_equals_libtorchs() {
    let _turn = gpu();
    for (size, kind) in [
        ([2, 8, 6, 6], Kind::Float),
        ([3, 16, 7, 5], Kind::BFloat16),
        ([2, 64, 112, 112], Kind::BFloat16),
        ([1, 8, 1, 2], Kind::Half),
    ] {
        tch::manual_seed(1);
        // Few different values, so that many are equal: the first maximum counts.
        let xs = channels_last(&Tensor::randint_low(-3, 4, size, FLOAT).to_kind(kind));
        let (ours, theirs) = (leaf(&xs), leaf(&xs));
        let found = max_pool_cuda(&ours).unwrap().unwrap();
        let expected = theirs.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false);
        assert_eq!(found, expected, "{size:?}");
        let by_y = Tensor::randn(found.size(), FLOAT).to_kind(kind);
        (found * &by_y).sum(Kind::Float).backward();
        (expected * &by_y).sum(Kind::Float).backward();
        assert!(off(&ours.grad(), &theirs.grad()) < 5e-3, "{size:?} {kind:?}");
    }
    assert!(max_pool_cuda(&Tensor::ones([1, 8, 4, 4], FLOAT)).unwrap().is_none(), "not channels last");
}

#[test]
fn the_folded_stem_computes_the_same() {
    let _turn = gpu();
    for (size, as_they_lie) in [([4, 3, 32, 32], false), ([2, 3, 64, 96], true)] {
        tch::manual_seed(2);
        let images = Tensor::randn(size, FLOAT);
        let images = if as_they_lie { images } else { channels_last(&images) };
        let weight = channels_last(&(Tensor::randn([64, 3, 7, 7], FLOAT) * 0.1));
        for kind in [Kind::Float, Kind::BFloat16] {
            let (ours, theirs) = (leaf(&weight.to_kind(kind)), leaf(&weight));
            let found =
                autocast(GPU, Kind::BFloat16, || conv_stem_cuda(&images, &ours)).unwrap().unwrap().unwrap();
            // Both round images and weights to bf16; libtorch then multiplies in f32.
            let rounded = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
            let expected =
                rounded(&images).conv2d(&rounded(&theirs), None::<Tensor>, [2, 2], [3, 3], [1, 1], 1);
            assert_eq!(found.size(), expected.size());
            assert!(off(&found, &expected) < 5e-3, "{size:?}: {}", off(&found, &expected));
            let by_y = Tensor::randn(found.size(), FLOAT).to_kind(Kind::BFloat16);
            (found * &by_y).sum(Kind::Float).backward();
            (expected * by_y.to_kind(Kind::Float)).sum(Kind::Float).backward();
            assert_eq!(ours.grad().kind(), kind);
            assert!(
                off(&ours.grad(), &theirs.grad()) < 1e-2,
                "{size:?}: {}",
                off(&ours.grad(), &theirs.grad())
            );
        }
    }
    let (images, weight) = (Tensor::ones([1, 3, 33, 32], FLOAT), Tensor::ones([64, 3, 7, 7], FLOAT));
    let made = autocast(GPU, Kind::BFloat16, || conv_stem_cuda(&images, &weight)).unwrap().unwrap();
    assert!(made.is_none(), "an odd size cannot be folded");
    assert!(conv_stem_cuda(&images.narrow(2, 0, 32), &weight).unwrap().is_none(), "f32 stays libtorch's");
}

/// Two convolutions; returns the gradients of their weights.
fn two_layers(beside: Option<&Beside>, weights: &[Tensor], images: &Tensor) -> Vec<Tensor> {
    let forward = || -> Result<Tensor, TorchError> {
        let conv = Conv2d { padding: 1, ..Conv2d::default() };
        let hidden = conv.forward(images, &weights[0])?.f_relu()?;
        Ok(conv.forward(&hidden, &weights[1])?.f_square()?.f_mean(Kind::Float)?)
    };
    match beside {
        Some(beside) => {
            let loss = beside.forward(forward).unwrap();
            beside.backward(|| Ok::<_, TorchError>(loss.f_backward()?)).unwrap();
        }
        None => forward().unwrap().backward(),
    }
    weights.iter().map(|weight| grad(weight).unwrap().unwrap()).collect()
}

#[test]
fn gradients_on_the_second_stream_equal_those_of_backward() {
    let _turn = gpu();
    tch::manual_seed(3);
    let images = Tensor::randn([8, 16, 12, 12], FLOAT);
    let weights = [leaf(&Tensor::randn([16, 16, 3, 3], FLOAT)), leaf(&Tensor::randn([8, 16, 3, 3], FLOAT))];
    let expected: Vec<_> = two_layers(None, &weights, &images).iter().map(Tensor::copy).collect();
    let clear = || weights.iter().for_each(|weight| set_grad(weight, None).unwrap());
    let beside = Beside::new(0).unwrap();
    clear();
    for (found, expected) in two_layers(Some(&beside), &weights, &images).iter().zip(&expected) {
        assert!(off(found, expected) < 1e-5);
    }
    // A second backward adds to the first.
    for (found, expected) in two_layers(Some(&beside), &weights, &images).iter().zip(&expected) {
        assert!(off(found, &(expected * 2.0)) < 1e-5);
    }
    clear();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    synchronize(0).unwrap();
    let scope = stream.enter().unwrap();
    let (graph, found) = Graph::record(Pool::new().unwrap(), || {
        Ok::<_, TorchError>(two_layers(Some(&beside), &weights, &images))
    })
    .unwrap();
    for _ in 0..3 {
        graph.launch().unwrap();
    }
    drop(scope);
    synchronize(0).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!(off(found, expected) < 1e-5, "as a graph");
    }
}

/// Gradients have the memory layout of their weights, as with autograd, whatever cuDNN returns.
#[test]
fn gradients_on_the_second_stream_have_the_layout_of_their_weights() {
    let _turn = gpu();
    tch::manual_seed(8);
    let images = channels_last(&Tensor::randn([8, 16, 12, 12], FLOAT));
    let weights = [leaf(&Tensor::randn([16, 16, 3, 3], FLOAT)), leaf(&Tensor::randn([8, 16, 3, 3], FLOAT))];
    let beside = Beside::new(0).unwrap();
    for (found, weight) in two_layers(Some(&beside), &weights, &images).iter().zip(&weights) {
        assert_eq!(found.stride(), weight.stride());
    }
    let named = |(place, tensor): (usize, &Tensor)| Named {
        name: format!("{place}"),
        tensor: tensor.shallow_clone(),
    };
    let parameters: Vec<_> = weights.iter().enumerate().map(named).collect();
    let options = SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() };
    Sgd::new(parameters, options).unwrap().step().unwrap();
}

/// A step without convolutions does not use the second stream, and can be recorded.
#[test]
fn a_step_without_convolutions_can_be_recorded() {
    let _turn = gpu();
    let weight = leaf(&Tensor::ones([4, 4], FLOAT));
    let beside = Beside::new(0).unwrap();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    synchronize(0).unwrap();
    let _scope = stream.enter().unwrap();
    let step = || -> Result<(), TorchError> {
        let loss = beside.forward(|| weight.f_square()?.f_sum(Kind::Float))?;
        beside.backward(|| Ok(loss.f_backward()?))
    };
    step().unwrap();
    set_grad(&weight, None).unwrap();
    assert!(Graph::record(Pool::new().unwrap(), step).is_ok());
}
