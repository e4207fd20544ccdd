//! The bits of weight gradients that are computed apart, against libtorch's own backward.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::{Conv2d, autocast, checkpoint};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn waves(size: &[i64], speed: f64) -> Tensor {
    let count = size.iter().product::<i64>();
    (Tensor::arange(count, FLOAT) * speed).sin().view(size)
}

fn leaf(size: &[i64], speed: f64) -> Tensor {
    waves(size, speed).set_requires_grad(true)
}

/// When weight gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// In libtorch's own backward.
    Plain,
    /// In the backward of our layers.
    AtOnce,
    /// After each backward.
    Apart,
    /// After all backwards.
    Later,
}

/// The gradients of these leaves after three backwards.
fn gradients(leaves: &[&Tensor], when: When, loss: impl Fn(f64) -> Tensor) -> Vec<Tensor> {
    let grads = WeightGrads::default();
    let mut queued = Vec::new();
    for micro_batch in 1..4 {
        let factor = f64::from(micro_batch);
        match when {
            When::Plain => loss(factor).backward(),
            When::AtOnce => grads.forward(|| loss(factor)).backward(),
            When::Apart | When::Later => {
                let loss = grads.forward(|| loss(factor));
                queued.push(grads.apart(|| loss.f_backward().map_err(TorchError::from)).unwrap());
                if when == When::Apart {
                    queued.drain(..).for_each(|queued| queued.compute().unwrap());
                }
            }
        }
    }
    queued.drain(..).for_each(|queued| queued.compute().unwrap());
    let taken = |leaf: &&Tensor| {
        let taken = leaf.grad().copy();
        set_grad(leaf, None).unwrap();
        taken
    };
    leaves.iter().map(taken).collect()
}

fn have_equal_bits(leaves: &[&Tensor], loss: impl Fn(f64) -> Tensor) {
    let plain = gradients(leaves, When::Plain, &loss);
    for when in [When::AtOnce, When::Apart, When::Later] {
        for (place, (plain, ours)) in plain.iter().zip(gradients(leaves, when, &loss)).enumerate() {
            assert_eq!((plain.size(), plain.kind()), (ours.size(), ours.kind()));
            assert_eq!(*plain, ours, "leaf {place}, {when:?}");
        }
    }
}

#[test]
fn linear_layers_have_the_bits_of_a_whole_backward() {
    for (rows, features, out) in [(&[5i64][..], 7, 3), (&[2, 9], 64, 48), (&[1], 4, 1), (&[3, 2, 2], 16, 33)]
    {
        let x = leaf(&[rows, &[features]].concat(), 0.37);
        let (weight, bias) = (leaf(&[out, features], 0.11), leaf(&[out], 0.7));
        have_equal_bits(&[&x, &weight, &bias], |factor| {
            linear(&(&x * factor), &weight, Some(&bias)).unwrap().square().sum(Kind::Float)
        });
        have_equal_bits(&[&x, &weight], |factor| {
            linear(&(&x * factor), &weight, None).unwrap().square().sum(Kind::Float)
        });
    }
}

#[test]
fn products_by_columns_have_the_bits_of_a_whole_backward() {
    for (rows, features, out) in [(5i64, 7, 3), (18, 64, 48), (1, 4, 1), (12, 16, 33)] {
        let x = leaf(&[rows, features], 0.37);
        let (weight, bias) = (leaf(&[features, out], 0.11), leaf(&[out], 0.7));
        have_equal_bits(&[&x, &weight, &bias], |factor| {
            addmm(Some(&bias), &(&x * factor), &weight).unwrap().square().sum(Kind::Float)
        });
        have_equal_bits(&[&x, &weight], |factor| {
            addmm(None, &(&x * factor), &weight).unwrap().square().sum(Kind::Float)
        });
    }
}

#[test]
fn convolutions_and_embeddings_have_the_bits_of_a_whole_backward() {
    let (x, weight) = (leaf(&[2, 4, 7, 9], 0.37), leaf(&[6, 2, 3, 3], 0.11));
    let conv = Conv2d { stride: 2, padding: 1, groups: 2 };
    have_equal_bits(&[&x, &weight], |factor| {
        conv.forward(&(&x * factor), &weight).unwrap().square().sum(Kind::Float)
    });
    let (table, ids) = (leaf(&[11, 6], 0.3), Tensor::from_slice(&[1i64, 10, 1, 4]));
    have_equal_bits(&[&table], |factor| {
        (embedding(&table, &ids).unwrap() * factor).square().sum(Kind::Float)
    });
}

#[test]
fn a_weight_that_is_used_twice_has_one_gradient() {
    let (table, ids) = (leaf(&[11, 6], 0.3), Tensor::from_slice(&[1i64, 10, 1, 4]));
    have_equal_bits(&[&table], |factor| {
        let features = (embedding(&table, &ids).unwrap() * factor).tanh();
        linear(&features, &table, None).unwrap().square().sum(Kind::Float)
    });
}

#[test]
fn checkpoints_have_the_same_bits() {
    let (x, weight, bias) = (leaf(&[4, 8], 0.37), leaf(&[8, 8], 0.11), leaf(&[8], 0.7));
    let grads = |is_apart: bool| {
        let grads = WeightGrads::default();
        let block = {
            let (grads, weight, bias) = (grads.clone(), weight.shallow_clone(), bias.shallow_clone());
            move |xs: &[Tensor]| Ok(grads.forward(|| linear(&xs[0], &weight, Some(&bias)))?.f_tanh()?)
        };
        let loss = checkpoint(block, &[&x]).unwrap().square().sum(Kind::Float);
        if is_apart {
            let queued = grads.apart(|| loss.f_backward().map_err(TorchError::from)).unwrap();
            assert_eq!((queued.len(), queued.is_empty()), (1, false));
            queued.compute().unwrap();
        } else {
            loss.backward();
        }
        [&x, &weight, &bias].map(|leaf| {
            let taken = leaf.grad().copy();
            set_grad(leaf, None).unwrap();
            taken
        })
    };
    assert_eq!(grads(true), grads(false));
}

#[test]
fn autocast_and_frozen_weights() {
    let (x, weight) = (leaf(&[4, 8], 0.37), leaf(&[8, 8], 0.11));
    have_equal_bits(&[&x, &weight], |factor| {
        let y =
            autocast(Device::Cpu, Kind::BFloat16, || linear(&(&x * factor), &weight, None).unwrap()).unwrap();
        assert_eq!(y.kind(), Kind::BFloat16);
        y.to_kind(Kind::Float).square().sum(Kind::Float)
    });
    let frozen = waves(&[8, 8], 0.11);
    have_equal_bits(&[&x], |factor| linear(&(&x * factor), &frozen, None).unwrap().square().sum(Kind::Float));
    // Not a leaf: its gradient goes through autograd.
    have_equal_bits(&[&x, &weight], |factor| {
        linear(&(&x * factor), &(&weight * 2), None).unwrap().square().sum(Kind::Float)
    });
}

#[test]
fn a_failed_backward_leaves_nothing_in_the_queue() {
    let (x, weight) = (leaf(&[4, 8], 0.37), leaf(&[8, 8], 0.11));
    let grads = WeightGrads::default();
    let loss = grads.forward(|| linear(&x, &weight, None)).unwrap().square().sum(Kind::Float);
    let failed = grads.apart(|| {
        loss.f_backward().map_err(TorchError::from)?;
        Err(TorchError::Internal { what: "a test" })
    });
    assert!(failed.is_err());
    assert_eq!(format!("{grads:?}"), "WeightGrads { queued: 0, .. }");
    assert!(linear(&waves(&[4, 7], 0.1), &weight, None).is_err());
}
