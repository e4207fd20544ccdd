//! Steps on f32 copies by kernels of our own, against libtorch's on the CPU.

use drumline_torch::{
    Adam, AdamOptions, AdamW, MasterWeights, Named, Optimizer, ParameterGroups, Sgd, SgdOptions, StepTensors,
    TorchError, grad, set_grad,
};
use tch::{Device, Kind, Tensor, no_grad};

use super::shared::{GPU, gpu};

const STEPS: usize = 6;

type Boxed = Box<dyn Optimizer>;
type Make = fn(ParameterGroups) -> Result<Boxed, TorchError>;

fn numbers(size: &[i64], by: f64) -> Tensor {
    let numel: i64 = size.iter().product();
    (Tensor::arange(numel, (Kind::Double, Device::Cpu)) * by + by).sin().view(size)
}

/// Parameters of many sizes, more than one launch takes; one lies as images do, one is in f32, one has no elements.
fn parameters(kind: Kind, device: Device) -> Vec<Named> {
    let sizes = (0..60).map(|index| vec![1 + index * 7]).chain([vec![64, 32, 3, 3], vec![9000, 3], vec![0]]);
    let made = sizes.enumerate().map(|(index, size)| {
        let kind = if index == 20 { Kind::Float } else { kind };
        let tensor = numbers(&size, 0.37 + index as f64 * 0.01).to_kind(kind).to_device(device);
        let tensor = match size.len() {
            4 => tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
            _ => tensor,
        };
        Named { name: format!("p{index}"), tensor: tensor.set_requires_grad(true) }
    });
    made.collect()
}

fn give_gradients(parameters: &[Named], step: usize) {
    for (index, Named { tensor, .. }) in parameters.iter().enumerate() {
        let gradient = numbers(&tensor.size(), 0.11 + (step * 100 + index) as f64 * 0.003);
        let gradient = gradient.to_kind(tensor.kind()).to_device(tensor.device());
        let mut placed = no_grad(|| tensor.empty_like());
        placed.copy_(&gradient);
        let gradient = placed;
        // One has none now and then.
        set_grad(tensor, Some(&gradient).filter(|_| index != 5 || step != 3)).unwrap();
    }
}

fn rules() -> Vec<(&'static str, Make)> {
    const SGD: SgdOptions = SgdOptions {
        lr: 0.05,
        momentum: 0.9,
        dampening: 0.0,
        nesterov: true,
        weight_decay: 0.01,
        maximize: false,
    };
    vec![
        ("nesterov", |all| Ok(Box::new(Sgd::new(all, SGD)?))),
        ("momentum", |all| {
            Ok(Box::new(Sgd::new(all, SgdOptions { nesterov: false, maximize: true, ..SGD })?))
        }),
        ("plain", |all| Ok(Box::new(Sgd::new(all, SgdOptions { nesterov: false, momentum: 0.0, ..SGD })?))),
        ("adamw", |all| Ok(Box::new(AdamW::new(all, AdamOptions { lr: 0.01, ..AdamOptions::default() })?))),
        ("adam", |all| {
            let options =
                AdamOptions { lr: 0.01, weight_decay: Some(0.02), maximize: true, ..AdamOptions::default() };
            Ok(Box::new(Adam::new(all, options)?))
        }),
    ]
}

/// Any optimizer in a box is one.
struct Any(Boxed);

impl Optimizer for Any {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        self.0.step_with(tensors)
    }
    fn step_copies(
        &mut self,
        copies: &[drumline_torch::CopiedParameter<'_>],
        tensors: StepTensors<'_>,
    ) -> Result<bool, TorchError> {
        let made = self.0.step_copies(copies, tensors)?;
        assert_eq!(made, copies[0].parameter.device() == GPU, "by kernels of our own");
        Ok(made)
    }
    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.0.keep_lr_on_device()
    }
    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.0.zero_grad()
    }
    fn lr(&self) -> f64 {
        self.0.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.0.set_lr(lr);
    }
    fn parameters(&self) -> Vec<Named> {
        self.0.parameters()
    }
    fn state(&self) -> drumline_torch::OptimizerState {
        self.0.state()
    }
    fn load_state(&mut self, state: &drumline_torch::OptimizerState) -> Result<(), TorchError> {
        self.0.load_state(state)
    }
}

/// What is trained and kept after some steps, of which one is left out by `found_inf`.
fn trained(kind: Kind, device: Device, make: Make, on_device: bool) -> Vec<Named> {
    let parameters = parameters(kind, device);
    let mut optimizer = MasterWeights::new(parameters.clone(), |all| make(all).map(Any)).unwrap();
    if on_device {
        optimizer.keep_lr_on_device().unwrap();
    }
    for step in 0..STEPS {
        give_gradients(&parameters, step);
        optimizer.set_lr(0.02 / (step + 1) as f64);
        let found_inf = Tensor::full([], f64::from(u8::from(step == 2)), (Kind::Float, device));
        optimizer.step_with(StepTensors { found_inf: Some(&found_inf), ..StepTensors::default() }).unwrap();
        if device == GPU {
            assert!(optimizer.parameters().iter().all(|named| grad(&named.tensor).is_ok()));
        }
    }
    let state = optimizer.state().tensors;
    parameters.into_iter().chain(state).collect()
}

#[test]
fn steps_on_copies_are_libtorchs() {
    let _gpu = gpu();
    for kind in [Kind::BFloat16, Kind::Half] {
        for (name, make) in rules() {
            let expected = trained(kind, Device::Cpu, make, false);
            for on_device in [false, true] {
                let found = trained(kind, GPU, make, on_device);
                assert_eq!(found.len(), expected.len(), "{name}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found.name, expected.name);
                    let (found, right) = (found.tensor.to_device(Device::Cpu), &expected.tensor);
                    if right.numel() == 0 {
                        continue;
                    }
                    let difference = (found.to_kind(Kind::Double) - right.to_kind(Kind::Double)).abs();
                    let largest = difference.max().double_value(&[]);
                    // A last bit of f32 may round a parameter the other way.
                    let most = if right.kind() == Kind::Float { 2e-6 } else { 0.008 };
                    assert!(largest <= most, "{name}, {kind:?}: {} is off by {largest}", expected.name);
                    let off = difference.gt(1e-5).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
                    assert!(
                        off < 0.02 || right.numel() < 100,
                        "{name}, {kind:?}: {off} of {}",
                        expected.name
                    );
                }
            }
        }
    }
}
