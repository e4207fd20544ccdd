//! Adagrad's steps on a GPU are those on a CPU, also where the device skips one.

use drumline_torch::{Adagrad, AdagradOptions, Named, Optimizer, StepTensors, set_grad};
use tch::{Device, Kind, Tensor};

use super::shared::{GPU, gpu};

const OPTIONS: AdagradOptions = AdagradOptions {
    lr: 0.1,
    lr_decay: 0.05,
    weight_decay: 0.1,
    initial_accumulator_value: 0.2,
    eps: 1e-10,
    maximize: false,
};

/// The weights after five steps, of which one is skipped.
fn trained(device: Device) -> Tensor {
    let start = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([4, 6]) / 24.0;
    // A tensor of its own: the gradients come from the values that it had.
    let leaf = start.copy().to_device(device).set_requires_grad(true);
    let named = Named { name: "w".into(), tensor: leaf.shallow_clone() };
    let mut optimizer = Adagrad::new(vec![named], OPTIONS).unwrap();
    for step in 0..5i64 {
        let grad = ((&start + step) * 3.0).sin().to_device(device);
        set_grad(&leaf, Some(&grad)).unwrap();
        let found_inf = Tensor::from(if step == 2 { 1f32 } else { 0.0 }).to_device(device);
        let tensors = StepTensors { found_inf: Some(&found_inf), ..StepTensors::default() };
        optimizer.step_with(tensors).unwrap();
    }
    let steps = optimizer.state().tensors.into_iter().find(|named| named.name == "w.step").unwrap();
    assert_eq!(steps.tensor.double_value(&[]), 4.0);
    leaf.detach().to_device(Device::Cpu)
}

#[test]
fn adagrad_makes_the_steps_of_a_cpu() {
    let _turn = gpu();
    let (found, expected) = (trained(GPU), trained(Device::Cpu));
    let difference = (&found - &expected).abs().max().double_value(&[]);
    assert!(difference < 1e-6, "{difference:e}");
}
