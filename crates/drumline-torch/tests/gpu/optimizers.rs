//! Optimizers on a GPU: our kernels against those of the CPU, and CUDA graphs against eager steps.

use std::sync::Arc;

use drumline_comm::LocalGroup;
use drumline_torch::cuda::{Graph, Pool, Priority, Stream};
use drumline_torch::{
    Adafactor, AdafactorOptions, AdamOptions, AdamW, BiasCorrection, Division, Lamb, LambOptions, Lion,
    LionOptions, MasterKind, MasterWeights, Moments, Named, Optimizer, OwnRows, ParameterGroup,
    ParameterGroups, StepTensors, TorchError, set_grad,
};
use tch::{Device, Kind, Tensor, no_grad};

use super::shared::{GPU, gpu};

const STEPS: usize = 6;

type Boxed = Box<dyn Optimizer>;
type Make = fn(ParameterGroups) -> Result<Boxed, TorchError>;

/// Which weights are trained.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Weights {
    F32,
    Copied(Kind),
    Split,
}

const ALL_WEIGHTS: [Weights; 4] =
    [Weights::F32, Weights::Copied(Kind::BFloat16), Weights::Copied(Kind::Half), Weights::Split];

fn adam(moments: Moments) -> AdamOptions {
    AdamOptions { lr: 0.01, betas: (0.9, 0.99), weight_decay: Some(0.1), moments, ..AdamOptions::default() }
}

/// Optimizers whose steps on a GPU have the bits of those on a CPU.
fn exact() -> Vec<(&'static str, Make)> {
    vec![
        ("bf16", |all| Ok(Box::new(AdamW::new(all, adam(Moments::Bf16 { seed: 3 << 32 | 5 }))?))),
        ("8bit", |all| Ok(Box::new(AdamW::new(all, adam(Moments::EightBit))?))),
        ("lion", |all| {
            let options =
                LionOptions { lr: 0.01, weight_decay: 0.1, maximize: true, ..LionOptions::default() };
            Ok(Box::new(Lion::new(all, options)?))
        }),
    ]
}

/// Optimizers with sums, whose order is another one on a GPU.
fn with_sums() -> Vec<(&'static str, Make)> {
    vec![
        ("lamb", |all| {
            Ok(Box::new(Lamb::new(all, LambOptions { weight_decay: 0.1, ..LambOptions::default() })?))
        }),
        ("lamb, deepspeed", |all| {
            let options = LambOptions {
                bias_correction: BiasCorrection::StepSize,
                maximize: true,
                ..LambOptions::default()
            };
            Ok(Box::new(Lamb::new(all, options)?))
        }),
        ("adafactor", |all| {
            let options = AdafactorOptions { weight_decay: 0.1, ..AdafactorOptions::default() };
            Ok(Box::new(Adafactor::new(all, options)?))
        }),
    ]
}

fn numbers(size: &[i64], by: f64) -> Tensor {
    let numel: i64 = size.iter().product();
    let angles = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * by + by;
    // Magnitudes of several decades, as gradients have.
    let decades = ((angles.shallow_clone() * 3.7).sin() * 2.0 - 2.0).exp();
    (angles.sin() * decades).view(size)
}

/// More parameters than a launch takes: with rows that are not multiples of a vector, blocks of 8 bits that are full and
/// that are not, channels last, in f32 among others in 16 bits, and without elements.
fn parameters(weights: Weights, device: Device) -> Vec<Named> {
    let small = (0..45).map(|index| vec![1 + index * 5]);
    let large = [vec![9, 512], vec![16, 3, 100], vec![64, 32, 3, 3], vec![9000, 3], vec![2, 20_001], vec![0]];
    let made = small.chain(large).enumerate().map(|(index, size)| {
        let kind = match weights {
            Weights::Copied(kind) if index != 20 => kind,
            Weights::Split if index != 20 => Kind::BFloat16,
            _ => Kind::Float,
        };
        let tensor = numbers(&size, 0.37 + index as f64 * 0.01).to_kind(kind).to_device(device);
        let tensor = match &size[..] {
            [64, ..] => tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
            _ => tensor,
        };
        Named { name: format!("p{index}"), tensor: tensor.set_requires_grad(true) }
    });
    made.collect()
}

/// Of one tensor, so that each parameter has the same gradients on both devices.
fn gradient(tensor: &Tensor, by: f64) -> Tensor {
    let mut placed = no_grad(|| tensor.empty_like());
    placed.copy_(&numbers(&tensor.size(), by).to_kind(tensor.kind()));
    placed
}

fn give_gradients(parameters: &[Named], step: usize) {
    for (index, Named { tensor, .. }) in parameters.iter().enumerate() {
        let gradient = gradient(tensor, 0.11 + (step * 100 + index) as f64 * 0.003);
        // One parameter sometimes has no gradient.
        set_grad(tensor, Some(&gradient).filter(|_| index != 5 || step % 3 != 1)).unwrap();
    }
}

/// An optimizer with two groups.
fn optimizer(parameters: &[Named], weights: Weights, make: Make) -> Boxed {
    let (some, others) = parameters.split_at(10);
    let groups: ParameterGroups = vec![
        some.to_vec().into(),
        ParameterGroup { lr_factor: 0.5, weight_decay: Some(0.0), ..others.to_vec().into() },
    ]
    .into();
    match weights {
        Weights::F32 => make(groups).unwrap(),
        Weights::Copied(_) => Box::new(MasterWeights::new(groups, make).unwrap()),
        Weights::Split => Box::new(MasterWeights::with_kind(MasterKind::Split, groups, make).unwrap()),
    }
}

/// Parameters and state after some steps, one of them skipped and one by an optimizer that resumes from a saved state.
fn trained(weights: Weights, device: Device, make: Make) -> Vec<Named> {
    let parameters = parameters(weights, device);
    let mut stepped = optimizer(&parameters, weights, make);
    for step in 0..STEPS {
        if step == 4 {
            let mut resumed = optimizer(&parameters, weights, make);
            resumed.load_state(&stepped.state()).unwrap();
            stepped = resumed;
        }
        give_gradients(&parameters, step);
        stepped.set_lr(0.02 / (step + 1) as f64);
        let found_inf = Tensor::full([], f64::from(u8::from(step == 2)), (Kind::Float, device));
        stepped.step_with(StepTensors { found_inf: Some(&found_inf), grad_scale: None }).unwrap();
    }
    parameters.into_iter().chain(stepped.state().tensors).collect()
}

fn bits(tensor: &Tensor) -> Tensor {
    let tensor = tensor.to_device(Device::Cpu);
    match tensor.kind() {
        Kind::Float => tensor.view_dtype(Kind::Int),
        Kind::BFloat16 | Kind::Half => tensor.view_dtype(Kind::Int16),
        _ => tensor,
    }
}

fn assert_same_bits(found: &[Named], expected: &[Named], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((&found.name, found.tensor.kind()), (&expected.name, expected.tensor.kind()), "{what}");
        let (found_bits, expected_bits) = (bits(&found.tensor), bits(&expected.tensor));
        let differ = found_bits.not_equal_tensor(&expected_bits).to_kind(Kind::Int64).sum(Kind::Int64);
        let (differ, numel) = (differ.int64_value(&[]), found.tensor.numel());
        assert_eq!(differ, 0, "{what}: {differ} of {numel} elements of {} differ", found.name);
    }
}

#[test]
fn steps_on_a_gpu_have_the_bits_of_those_on_a_cpu() {
    let _gpu = gpu();
    for (name, make) in exact() {
        for weights in ALL_WEIGHTS {
            let expected = trained(weights, Device::Cpu, make);
            assert_same_bits(&trained(weights, GPU, make), &expected, &format!("{name}, {weights:?}"));
        }
    }
    let make: Make = |all| Ok(Box::new(AdamW::new(all, adam(Moments::F32))?));
    let expected = trained(Weights::Split, Device::Cpu, make);
    assert_same_bits(&trained(Weights::Split, GPU, make), &expected, "f32, split");
}

#[test]
fn steps_with_sums_are_near_those_on_a_cpu() {
    let _gpu = gpu();
    for (name, make) in with_sums() {
        // On a CPU, Adafactor's kernel does not take split weights in channels last, of which there are some.
        for weights in
            ALL_WEIGHTS.into_iter().filter(|weights| name != "adafactor" || *weights != Weights::Split)
        {
            let expected = trained(weights, Device::Cpu, make);
            let found = trained(weights, GPU, make);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected).filter(|(found, _)| found.tensor.numel() > 0)
            {
                assert_eq!(found.name, expected.name, "{name}, {weights:?}");
                let (right, what) = (expected.tensor.to_kind(Kind::Double), &expected.name);
                let found = found.tensor.to_device(Device::Cpu).to_kind(Kind::Double);
                let difference = (&found - &right).abs();
                // The last bit of f32 may change the rounding of a parameter in 16 bits.
                let near = if expected.tensor.kind() == Kind::Float { 1e-5 } else { 8e-3 };
                let most = right.abs() * near + 1e-6;
                let off = difference.gt_tensor(&most).to_kind(Kind::Double).sum(Kind::Double);
                assert_eq!(off.double_value(&[]), 0.0, "{name}, {weights:?}: elements of {what}");
            }
        }
    }
}

#[test]
fn graphs_have_the_bits_of_eager_steps() {
    let _gpu = gpu();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _scope = stream.enter().unwrap();
    let f32_moments: (&str, Make) = ("adam", |all| Ok(Box::new(AdamW::new(all, adam(Moments::F32))?)));
    for (name, make) in exact().into_iter().chain(with_sums()).chain([f32_moments]) {
        for weights in ALL_WEIGHTS {
            let [eager, recorded] = [false, true].map(|records| run(&stream, weights, make, records));
            assert_same_bits(&recorded, &eager, &format!("{name}, {weights:?}"));
        }
    }
}

/// Steps with gradients that stay in place, of which the graph, if there is one, makes all but the first. One is skipped.
fn run(stream: &Stream, weights: Weights, make: Make, records: bool) -> Vec<Named> {
    let parameters = parameters(weights, GPU);
    let mut stepped = optimizer(&parameters, weights, make);
    stepped.keep_lr_on_device().unwrap();
    let places: Vec<_> = parameters.iter().map(|parameter| gradient(&parameter.tensor, 0.1)).collect();
    parameters
        .iter()
        .zip(&places)
        .for_each(|(parameter, place)| set_grad(&parameter.tensor, Some(place)).unwrap());
    let mut found_inf = Tensor::zeros([], (Kind::Float, GPU));
    let mut graph = None;
    for step in 0..STEPS {
        for (index, place) in places.iter().enumerate() {
            let new = gradient(place, 0.11 + (step * 100 + index) as f64 * 0.003);
            place.shallow_clone().copy_(&new);
        }
        stepped.set_lr(0.02 / (step + 1) as f64);
        let _ = found_inf.fill_(f64::from(u8::from(step == 3)));
        let tensors = StepTensors { found_inf: Some(&found_inf), grad_scale: None };
        if records && step == 1 {
            let (made, ()) = Graph::record(Pool::new().unwrap(), || stepped.step_with(tensors)).unwrap();
            graph = Some(made);
        }
        match &graph {
            Some(graph) => graph.launch().unwrap(),
            None => stepped.step_with(tensors).unwrap(),
        }
        stream.synchronize().unwrap();
    }
    parameters.into_iter().chain(stepped.state().tensors).collect()
}

/// The rows from 7 to 27. Their memory is not aligned for vectors.
fn some_rows(tensor: &Tensor) -> Tensor {
    tensor.narrow(0, 7, 20)
}

/// Split weights after three steps: the whole, or some rows of it.
fn steps_of_split(whole: &Tensor, has_all: bool, make: Make) -> Tensor {
    let parameter = Named { name: "w".into(), tensor: whole.copy().set_requires_grad(true) };
    let mut optimizer = MasterWeights::with_kind(MasterKind::Split, vec![parameter.clone()], make).unwrap();
    let mut stepped = parameter.tensor.shallow_clone();
    if !has_all {
        let rows = some_rows(&parameter.tensor.detach()).set_requires_grad(true);
        let own = |_: &Named| Some(OwnRows { tensor: rows.shallow_clone(), first: 7, whole: whole.size() });
        let groups = LocalGroup::run(1, |group| Ok(Arc::new(group))).unwrap();
        optimizer.divide(&Division { group: Arc::clone(&groups[0]), rows: &own }).unwrap();
        stepped = rows;
    }
    for step in 0..3 {
        let gradient = gradient(whole, 0.1 * f64::from(step + 1));
        let own = if has_all { gradient } else { some_rows(&gradient).copy() };
        set_grad(&stepped, Some(&own)).unwrap();
        optimizer.step().unwrap();
    }
    if has_all { some_rows(&stepped.detach()).copy() } else { stepped.detach().copy() }
}

#[test]
fn rows_make_the_steps_of_the_whole() {
    let _gpu = gpu();
    let whole = numbers(&[40, 301], 0.3).to_kind(Kind::BFloat16).to_device(GPU);
    for (name, make) in exact() {
        let [all, some] = [true, false].map(|has_all| bits(&steps_of_split(&whole, has_all, make)));
        assert_eq!(some, all, "{name}");
    }
}

#[test]
fn states_move_between_devices() {
    let _gpu = gpu();
    for (name, make) in exact() {
        let [host, device] = [Device::Cpu, GPU].map(|device| {
            let parameters = parameters(Weights::Split, device);
            let mut stepped = optimizer(&parameters, Weights::Split, make);
            give_gradients(&parameters, 0);
            stepped.step().unwrap();
            (parameters, stepped.state())
        });
        let resume = |on: &[Named], state: &drumline_torch::OptimizerState| {
            let mut stepped = optimizer(on, Weights::Split, make);
            stepped.load_state(state).unwrap();
            give_gradients(on, 2);
            stepped.step().unwrap();
            on.to_vec()
        };
        let on_host = resume(&host.0, &device.1);
        let on_device = resume(&device.0, &host.1);
        assert_same_bits(&on_device, &on_host, name);
    }
}
