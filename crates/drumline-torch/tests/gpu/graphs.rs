//! Recorded work: the same numbers as without recording, also random ones; a recording that fails leaves everything usable.

use drumline_torch::cuda::{Graph, GraphedStep, Pool, Priority, Stream};
use drumline_torch::{Optimizer, Sgd, SgdOptions, TorchError, parameters};
use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use super::shared::{FLOAT, GPU, gpu, values};

#[test]
fn a_graph_computes_what_was_recorded_on_the_present_inputs() {
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
fn random_numbers_are_those_that_would_have_been_drawn() {
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

/// A small network with dropout and a norm, and what trains it.
struct Trained {
    net: nn::SequentialT,
    optimizer: Sgd,
    _store: VarStore,
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
        Self { net, optimizer, _store: store }
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
    let losses: Vec<f64> =
        (0..5).map(|_| trained.step((&input, &target)).unwrap().double_value(&[])).collect();
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    tch::manual_seed(1);
    let first = values(&Tensor::rand([4], FLOAT));
    tch::manual_seed(1);
    assert_eq!(values(&Tensor::rand([4], FLOAT)), first);
}
