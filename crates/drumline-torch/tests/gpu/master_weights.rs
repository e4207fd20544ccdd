//! Steps on f32 master weights with our own kernels, against libtorch's on the CPU.

use drumline_torch::cuda::{Graph, Pool, Priority, Stream};
use drumline_torch::{
    Adam, AdamOptions, AdamW, MasterWeights, Named, Optimizer, ParameterGroups, Sgd, SgdOptions, StepTensors,
    TorchError, set_grad,
};
use tch::{Device, Kind, Tensor, no_grad};

use super::shared::{GPU, gpu};

const STEPS: usize = 7;

type Boxed = Box<dyn Optimizer>;
type Make = fn(ParameterGroups) -> Result<Boxed, TorchError>;

fn numbers(size: &[i64], by: f64) -> Tensor {
    let numel: i64 = size.iter().product();
    (Tensor::arange(numel, (Kind::Double, Device::Cpu)) * by + by).sin().view(size)
}

/// Parameters of many sizes, more than fit into one launch; one is channels last, one is in f32, one has no elements.
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
        // One parameter sometimes has no gradient, also after a step of libtorch.
        set_grad(tensor, Some(&gradient).filter(|_| index != 5 || (step != 4 && step != 6))).unwrap();
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
        let parameter = copies[0].parameter;
        let is_adam = self.0.state().kind.starts_with("adam");
        let has_kernel = parameter.device() == GPU || is_adam && parameter.kind() == Kind::BFloat16;
        assert_eq!(made, has_kernel && tensors.grad_scale.is_none(), "with our own kernels");
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
    fn load_state_of(
        &mut self,
        state: &drumline_torch::OptimizerState,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), TorchError> {
        self.0.load_state_of(state, wanted)
    }
}

/// Parameters and state after some steps. `found_inf` skips the first and another one; one divides its gradients, so
/// that libtorch makes it; one is made by an optimizer that resumes from a saved state.
fn trained(kind: Kind, device: Device, make: Make, on_device: bool) -> Vec<Named> {
    let parameters = parameters(kind, device);
    let new = || {
        let mut optimizer = MasterWeights::new(parameters.clone(), |all| make(all).map(Any)).unwrap();
        if on_device {
            optimizer.keep_lr_on_device().unwrap();
        }
        optimizer
    };
    let mut optimizer = new();
    for step in 0..STEPS {
        if step == 5 {
            let mut resumed = new();
            resumed.load_state(&optimizer.state()).unwrap();
            optimizer = resumed;
        }
        give_gradients(&parameters, step);
        optimizer.set_lr(0.02 / (step + 1) as f64);
        let found_inf = Tensor::full([], f64::from(u8::from(step == 0 || step == 2)), (Kind::Float, device));
        let grad_scale = (step == 3).then(|| Tensor::full([], 2.0, (Kind::Float, device)));
        let tensors = StepTensors { found_inf: Some(&found_inf), grad_scale: grad_scale.as_ref() };
        optimizer.step_with(tensors).unwrap();
    }
    let state = optimizer.state().tensors;
    parameters.into_iter().chain(state).collect()
}

#[test]
fn steps_on_master_weights_equal_libtorchs() {
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
                    // The last bit of f32 may change the rounding of a parameter.
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

fn sgd(parameter: &Named) -> MasterWeights<Sgd> {
    let options = SgdOptions { lr: 1.0, momentum: 0.9, ..SgdOptions::default() };
    MasterWeights::new(vec![parameter.clone()], |all| Sgd::new(all, options)).unwrap()
}

fn ones(name: &str, kind: Kind) -> Named {
    let tensor = Tensor::ones([4, 8], (kind, GPU)).set_requires_grad(true);
    Named { name: name.into(), tensor }
}

#[test]
fn autograd_and_other_optimizers_see_that_parameters_were_written() {
    let _gpu = gpu();
    let shared = ones("shared", Kind::BFloat16);
    let (mut first, mut second) = (sgd(&shared), sgd(&shared));
    let step = |optimizer: &mut MasterWeights<Sgd>| {
        set_grad(&shared.tensor, Some(&shared.tensor.ones_like())).unwrap();
        optimizer.step().unwrap();
        shared.tensor.double_value(&[0, 0])
    };
    // Each optimizer has its own momentum: 1, 1, then 1.9 each.
    assert_eq!(step(&mut first), 0.0);
    assert_eq!(step(&mut second), -1.0);
    assert!((step(&mut first) + 2.9).abs() < 0.01);
    assert!((step(&mut second) + 4.8).abs() < 0.03);
    // A tensor that backward needs was changed in between.
    let loss = shared.tensor.square().sum(Kind::Float);
    step(&mut first);
    let said = loss.f_backward().unwrap_err().to_string();
    assert!(said.contains("modified by an inplace operation"), "{said}");
}

#[test]
fn wrong_gradients_are_errors_and_other_layouts_are_copied() {
    let _gpu = gpu();
    let parameter = ones("w", Kind::Half);
    let mut optimizer = sgd(&parameter);
    let mut step_with = |grad: &Tensor| {
        set_grad(&parameter.tensor, Some(grad)).unwrap();
        optimizer.step().map_err(|error| error.to_string())
    };
    let half = (Kind::Half, GPU);
    for (grad, what) in [
        (Tensor::ones([], half), "shape"),
        (Tensor::ones([1, 8], half), "shape"),
        (Tensor::ones([5, 8], half), "shape"),
        (Tensor::ones([4, 8], (Kind::Float, GPU)), "type"),
        (Tensor::ones([4, 8], half).to_sparse_sparse_dim(2), "not dense"),
    ] {
        let said = step_with(&grad).unwrap_err();
        assert!(said.contains("parameter `w`") && said.contains(what), "{said}");
    }
    assert_eq!(parameter.tensor.double_value(&[3, 7]), 1.0);
    step_with(&Tensor::ones([8, 4], half).tr()).unwrap();
    assert_eq!(parameter.tensor.sum(Kind::Double).double_value(&[]), 0.0);
}

#[test]
fn recording_a_first_step_is_an_error() {
    let _gpu = gpu();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _scope = stream.enter().unwrap();
    for kind in [Kind::BFloat16, Kind::Float] {
        let parameter = ones("w", kind);
        let mut optimizer = sgd(&parameter);
        set_grad(&parameter.tensor, Some(&parameter.tensor.ones_like())).unwrap();
        if kind == Kind::BFloat16 {
            // The copy does not exist yet, and each launch would make it.
            let said = Graph::record(Pool::new().unwrap(), || optimizer.step()).unwrap_err().to_string();
            assert!(said.contains("try refresh_master_weights, or a step, before the recording"), "{said}");
            let _ = no_grad(|| parameter.tensor.shallow_clone().fill_(2.0));
            optimizer.refresh_master_weights().unwrap();
            assert_eq!(optimizer.state().tensors[0].tensor.double_value(&[0, 0]), 2.0);
            let _ = no_grad(|| parameter.tensor.shallow_clone().fill_(1.0));
            optimizer.refresh_master_weights().unwrap();
        }
        let said = Graph::record(Pool::new().unwrap(), || optimizer.step()).unwrap_err().to_string();
        assert!(said.contains("`w` would make its first step in a graph"), "{said}");
        optimizer.step().unwrap();
        let (graph, ()) = Graph::record(Pool::new().unwrap(), || optimizer.step()).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let value = parameter.tensor.double_value(&[0, 0]);
        assert!((value + 1.9).abs() < 0.01, "{kind:?}: {value}"); // 1, 0, -1.9
    }
}
