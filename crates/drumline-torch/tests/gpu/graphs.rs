//! CUDA graphs compute the same numbers as eager mode, also random ones. After a failed recording everything is usable.

use drumline_torch::cuda::{Graph, GraphedStep, Pool, Priority, Stream, empty_cache, memory, pinned};
use drumline_torch::{
    Autocast, DynamicScale, LossScaler, Optimizer, ScalePolicy, Sgd, SgdOptions, TorchError, parameters,
};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu, values};

#[test]
fn a_graph_uses_the_current_inputs() {
    let _turn = gpu();
    let mut input = Tensor::ones([8], FLOAT);
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _scope = stream.enter().unwrap();
    let (graph, output) =
        Graph::record(Pool::new().unwrap(), || Ok::<_, TorchError>(&input * 3.0 + 1.0)).unwrap();
    for value in [1.0, 5.0, -2.0] {
        let _ = input.fill_(value);
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert_eq!(values(&output), [3.0 * value as f32 + 1.0; 8]);
    }
}

#[test]
fn a_graph_draws_the_same_random_numbers_as_eager_mode() {
    let _turn = gpu();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _scope = stream.enter().unwrap();
    let draw = || Tensor::rand([1000], FLOAT).dropout(0.5, true);
    tch::manual_seed(7);
    let eager: Vec<_> = (0..3).map(|_| values(&draw())).collect();
    tch::manual_seed(7);
    let (graph, drawn) = Graph::record(Pool::new().unwrap(), || Ok::<_, TorchError>(draw())).unwrap();
    let launched: Vec<_> = (0..3)
        .map(|_| {
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            values(&drawn)
        })
        .collect();
    assert_eq!(launched, eager);
    assert_ne!(launched[0], launched[1]);
}

/// A small network with dropout and a norm, and its optimizer.
struct Trained {
    net: nn::SequentialT,
    optimizer: Sgd,
    store: VarStore,
}

impl Trained {
    fn new() -> Self {
        tch::manual_seed(3);
        let store = VarStore::new(GPU);
        let root = store.root();
        let net = nn::seq_t()
            .add(nn::linear(&root / "a", 16, 64, Default::default()))
            .add(nn::batch_norm1d(&root / "norm", 64, Default::default()))
            .add_fn(Tensor::relu)
            .add_fn_t(|x, train| x.dropout(0.25, train))
            .add(nn::linear(&root / "b", 64, 4, Default::default()));
        let options = SgdOptions { lr: 0.1, momentum: 0.9, weight_decay: 1e-4, ..SgdOptions::default() };
        let optimizer = Sgd::new(parameters(&store), options).unwrap();
        Self { net, optimizer, store }
    }

    fn step(&mut self, (input, target): (&Tensor, &Tensor)) -> Result<Tensor, TorchError> {
        self.optimizer.zero_grad()?;
        let loss = self.net.forward_t(input, true).cross_entropy_for_logits(target);
        loss.f_backward()?;
        self.optimizer.step()?;
        Ok(loss.detach())
    }
}

fn batch(step: i64) -> (Tensor, Tensor) {
    let input =
        (Tensor::arange(32 * 16, (Kind::Float, Device::Cpu)) * 0.37 + step as f64).sin().view([32, 16]);
    let target = (Tensor::arange(32, (Kind::Int64, Device::Cpu)) + step).remainder(4);
    (input.to_device(GPU), target.to_device(GPU))
}

#[test]
fn a_graphed_step_has_the_losses_of_an_eager_one_step_by_step() {
    let _turn = gpu();
    let mut eager = Trained::new();
    let expected: Vec<f64> = (0..12)
        .map(|step| {
            let (input, target) = batch(step);
            eager.step((&input, &target)).unwrap().double_value(&[])
        })
        .collect();
    let mut trained = Trained::new();
    let (mut input, mut target) = batch(0);
    let mut graphed = GraphedStep::new(0).unwrap();
    for (step, expected) in expected.iter().enumerate() {
        let (new_input, new_target) = batch(step as i64);
        input.copy_(&new_input);
        target.copy_(&new_target);
        let loss = graphed.run(|| trained.step((&input, &target))).unwrap().double_value(&[]);
        assert!((loss - expected).abs() < 1e-5, "step {step}: {loss}, eager {expected}");
    }
    assert!(graphed.is_recorded());
}

#[test]
fn a_step_that_reads_a_value_is_refused_and_can_be_made_eagerly() {
    let _turn = gpu();
    let mut trained = Trained::new();
    let (input, target) = batch(0);
    let mut graphed = GraphedStep::new(0).unwrap();
    let mut read = |trained: &mut Trained| {
        graphed
            .run(|| {
                let loss = trained.step((&input, &target))?;
                let _ = loss.f_double_value(&[])?;
                Ok::<_, TorchError>(loss)
            })
            .map(|loss| loss.double_value(&[]))
    };
    for _ in 0..3 {
        read(&mut trained).unwrap();
    }
    let error = read(&mut trained).unwrap_err().to_string();
    println!("{error}");
    assert!(error.contains("captur"), "{error}");
    let again = read(&mut trained).unwrap_err().to_string();
    assert_eq!(again, error, "it is tried again, and fails again");
    let losses: Vec<f64> =
        (0..5).map(|_| trained.step((&input, &target)).unwrap().double_value(&[])).collect();
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    tch::manual_seed(1);
    let first = values(&Tensor::rand([4], FLOAT));
    tch::manual_seed(1);
    assert_eq!(values(&Tensor::rand([4], FLOAT)), first);
}

#[test]
fn a_refused_recording_keeps_no_memory() {
    let _turn = gpu();
    let stream = Stream::new(0, Priority::Normal).unwrap();
    let _scope = stream.enter().unwrap();
    let reserved = || {
        empty_cache().unwrap();
        memory(0).unwrap().reserved
    };
    let before = reserved();
    for _ in 0..3 {
        let refused = Graph::record(Pool::new().unwrap(), || {
            let large = Tensor::f_zeros([64 << 20], FLOAT)?;
            let _ = large.f_double_value(&[0])?;
            Ok::<_, TorchError>(large)
        });
        assert!(refused.is_err());
    }
    assert!(reserved() <= before + (2 << 20), "{} were reserved, now {}", before, reserved());
    let pinned = pinned(&Tensor::ones([8], (Kind::Float, Device::Cpu))).unwrap();
    assert_eq!(values(&pinned.to_device(GPU)), [1.0; 8], "pinned memory is the host's again");
    let (graph, made) =
        Graph::record(Pool::new().unwrap(), || Ok::<_, TorchError>(Tensor::ones([8], FLOAT))).unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(values(&made), [1.0; 8]);
}

/// The weights after steps with these learning rates: in fp16, clipped, as one graph or in eager mode.
fn scaled_steps(rates: &[f64], graphed: bool) -> (Vec<f32>, Vec<f64>) {
    let mut trained = Trained::new();
    let policy = DynamicScale { init_scale: 16_777_216.0, growth_interval: 3, ..DynamicScale::default() };
    let mut scaler = LossScaler::new(ScalePolicy::Dynamic(policy), GPU).unwrap();
    trained.optimizer.keep_lr_on_device().unwrap();
    let (mut input, mut target) = batch(0);
    let (mut step, mut scales) = (GraphedStep::new(0).unwrap(), Vec::new());
    for (number, rate) in rates.iter().enumerate() {
        let (new_input, new_target) = batch(number as i64);
        input.copy_(&new_input);
        target.copy_(&new_target);
        trained.optimizer.set_lr(*rate);
        let mut make = || -> Result<Tensor, TorchError> {
            trained.optimizer.zero_grad()?;
            let half = Autocast::new(GPU, Kind::Half)?;
            let loss = trained.net.forward_t(&input, true).cross_entropy_for_logits(&target);
            drop(half);
            let unscaled = scaler.backward(&loss)?.unscale(&scaler, trained.optimizer.parameters())?;
            let norm = unscaled.clip_grad_norm(0.5)?;
            unscaled.step_on_device(&mut scaler, &mut trained.optimizer)?;
            Ok(norm)
        };
        if graphed {
            let _ = step.run(make).unwrap();
        } else {
            drop(make().unwrap());
        }
        scales.push(scaler.scale().unwrap());
    }
    assert_eq!(step.is_recorded(), graphed);
    let weights =
        parameters(&trained.store).iter().flat_map(|named| values(&named.tensor.flatten(0, -1))).collect();
    (weights, scales)
}

#[test]
fn scaler_clipping_and_a_changing_learning_rate_are_part_of_a_graph() {
    let _turn = gpu();
    let rates: Vec<f64> = (0..24).map(|step| 0.1 / f64::from(step + 1)).collect();
    let (eager, scales) = scaled_steps(&rates, false);
    let (graphed, graphed_scales) = scaled_steps(&rates, true);
    assert_eq!(scales, graphed_scales);
    let overflows = scales.windows(2).filter(|pair| pair[1] < pair[0]).count();
    assert!(overflows > 0 && scales.windows(2).any(|pair| pair[1] > pair[0]), "both happen: {scales:?}");
    let most = eager.iter().zip(&graphed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < 1e-4, "weights differ by {most}");
    let (constant, _) = scaled_steps(&[0.1; 24], true);
    let other = constant.iter().zip(&graphed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(other > 1e-2, "the control: learning rates count in launches, {other}");
}
