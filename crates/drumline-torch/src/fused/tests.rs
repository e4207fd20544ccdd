//! The bare kernels: learning rates as tensors, and lists with wrong tensors.

use tch::{Device, Kind, Tensor};

use super::*;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

fn sgd<'a>(params: &'a [&'a Tensor], grads: &'a [&'a Tensor], lr: Lr<'a>) -> FusedSgd<'a> {
    FusedSgd {
        params,
        grads,
        momentum_buffers: &[],
        lr,
        momentum: 0.0,
        dampening: 0.0,
        weight_decay: 0.0,
        nesterov: false,
        maximize: false,
        is_first_step: false,
        tensors: StepTensors::default(),
    }
}

fn adam<'a>(tensors: &'a [[&'a Tensor; 1]; 5], lr: Lr<'a>, decay: WeightDecay) -> FusedAdam<'a> {
    let [params, grads, exp_avgs, exp_avg_sqs, steps] = tensors;
    FusedAdam {
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs: None,
        steps,
        lr,
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.1,
        decay,
        maximize: false,
        tensors: StepTensors::default(),
    }
}

fn adam_result(lr: Lr<'_>, decay: WeightDecay) -> Vec<f32> {
    let (param, grad) = (Tensor::from_slice(&[1f32, -2.0]), Tensor::from_slice(&[0.5f32, 0.25]));
    let (avg, sq) = (Tensor::zeros([2], FLOAT), Tensor::zeros([2], FLOAT));
    let step = Tensor::zeros([], FLOAT);
    adam(&[[&param], [&grad], [&avg], [&sq], [&step]], lr, decay).run().unwrap();
    assert_eq!(step.double_value(&[]), 1.0);
    values(&param)
}

#[test]
fn a_tensor_may_be_the_learning_rate() {
    let lr = Tensor::from_slice(&[0.5f32]).squeeze();
    let step = |lr| {
        let (param, grad) = (Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[4f32, -8.0]));
        sgd(&[&param], &[&grad], lr).run().unwrap();
        values(&param)
    };
    assert_eq!(step(Lr::Tensor(&lr)), [-1.0, 6.0]);
    assert_eq!(step(Lr::Value(0.5)), [-1.0, 6.0]);
    for decay in [WeightDecay::L2, WeightDecay::Decoupled] {
        assert_eq!(adam_result(Lr::Tensor(&lr), decay), adam_result(Lr::Value(0.5), decay));
    }
    assert_ne!(
        adam_result(Lr::Value(0.5), WeightDecay::L2),
        adam_result(Lr::Value(0.5), WeightDecay::Decoupled)
    );
}

#[test]
fn wrong_gradients_are_errors() {
    let refused = |grad: &Tensor, word: &str| {
        let param = Tensor::zeros([2, 3], FLOAT);
        let error = sgd(&[&param], &[grad], Lr::Value(1.0)).run().unwrap_err().to_string();
        assert!(error.starts_with("cannot make an SGD step: a gradient ") && error.contains(word), "{error}");
        assert_eq!(values(&param), [0.0; 6]);
    };
    refused(&Tensor::ones([3, 2], FLOAT).tr(), "strides [1, 2]");
    refused(&Tensor::ones([6], FLOAT), "shape [6]");
    refused(&Tensor::ones([2, 3], (Kind::Double, Device::Cpu)), "Double");
    refused(&Tensor::ones([2, 6], FLOAT).slice(1, 0, 6, 2), "strides [6, 2]");
    refused(&Tensor::new(), "undefined");
    let param = Tensor::zeros([2], FLOAT);
    assert!(sgd(&[&param], &[], Lr::Value(1.0)).run().is_err());
    sgd(&[], &[], Lr::Value(1.0)).run().unwrap();
}

#[test]
fn the_stride_of_a_dim_of_size_1_does_not_matter() {
    let param = Tensor::zeros([2, 3, 1, 1], FLOAT);
    let grad = Tensor::ones([2, 3, 1, 1], FLOAT).as_strided([2, 3, 1, 1], [3, 1, 3, 3], 0);
    sgd(&[&param], &[&grad], Lr::Value(1.0)).run().unwrap();
    assert_eq!(values(&param), [-1.0; 6]);
}

#[test]
fn a_gradient_is_copied_only_if_its_layout_differs() {
    let leaf = Tensor::zeros([2, 3], FLOAT).set_requires_grad(true);
    assert!(grad_with_layout(&leaf).unwrap().is_none());
    let across = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).view([3, 2]).tr();
    crate::set_grad(&leaf, Some(&across)).unwrap();
    let fitting = grad_with_layout(&leaf).unwrap().unwrap();
    assert_eq!(fitting.stride(), [3, 1]);
    assert_eq!(values(&fitting), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
    let along = across.contiguous();
    crate::set_grad(&leaf, Some(&along)).unwrap();
    assert_eq!(grad_with_layout(&leaf).unwrap().unwrap().data_ptr(), along.data_ptr());
}

/// One number as the kernels read it.
fn number(value: f32) -> Tensor {
    Tensor::from_slice(&[value]).squeeze()
}

#[test]
fn gradients_are_divided_by_their_scale_in_place() {
    let (param, grad) = (Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[64f32, -128.0]));
    let scale = number(64.0);
    let tensors = StepTensors { grad_scale: Some(&scale), ..StepTensors::default() };
    FusedSgd { tensors, ..sgd(&[&param], &[&grad], Lr::Value(0.5)) }.run().unwrap();
    assert_eq!(values(&param), [0.5, 3.0]);
    assert_eq!(values(&grad), [1.0, -2.0]);
}

#[test]
fn tensors_of_another_kind_are_errors() {
    let (param, grad) = (Tensor::zeros([2], FLOAT), Tensor::ones([2], FLOAT));
    for wrong in [Tensor::from(1f64), Tensor::zeros([2], FLOAT), Tensor::new()] {
        let tensors = StepTensors { found_inf: Some(&wrong), ..StepTensors::default() };
        let error = FusedSgd { tensors, ..sgd(&[&param], &[&grad], Lr::Value(0.5)) }.run();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("a found_inf is one number of type Float"), "{error}");
    }
    assert_eq!(values(&param), [0.0, 0.0]);
}
