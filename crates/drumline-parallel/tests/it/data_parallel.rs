//! DataParallel against the same model on one device.

use drumline_parallel::{DataParallel, StageBytes};
use drumline_torch::{parameters, set_grad};
use tch::nn::{self, ModuleT, Path};
use tch::{Device, Kind, Tensor};

use super::net::{assert_close, samples};

/// A layer, a norm with buffers, another layer.
fn net(path: &Path<'_>) -> nn::SequentialT {
    nn::seq_t()
        .add(nn::linear(path / "a", 6, 8, Default::default()))
        .add(nn::batch_norm1d(path / "n", 8, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(path / "b", 8, 3, Default::default()))
}

fn without_norm(path: &Path<'_>) -> nn::Sequential {
    let (a, b) =
        (nn::linear(path / "a", 6, 8, Default::default()), nn::linear(path / "b", 8, 3, Default::default()));
    nn::seq().add(a).add_fn(|x| x.tanh()).add(b)
}

#[test]
fn gradients_are_those_of_one_device() {
    for (devices, batch) in [(1, 5), (2, 8), (3, 7), (4, 2)] {
        let mut model = DataParallel::new(&vec![Device::Cpu; devices], |path| without_norm(&path)).unwrap();
        let (x, y) = samples(0..batch);
        let mut one = nn::VarStore::new(Device::Cpu);
        let reference = without_norm(&one.root());
        one.copy(model.store()).unwrap();
        for step in 0..3 {
            let output = model.forward_t(&x, true).unwrap();
            assert_eq!(output.size(), [batch, 3]);
            model.backward(&output.mse_loss(&y, tch::Reduction::Mean)).unwrap();
            reference.forward_t(&x, true).mse_loss(&y, tch::Reduction::Mean).backward();
            for (ours, theirs) in parameters(model.store()).iter().zip(parameters(&one)) {
                assert_eq!(ours.name, theirs.name);
                assert_close(&[ours.tensor.grad()], &[theirs.tensor.grad()], 1e-6);
                for tensor in [&ours.tensor, &theirs.tensor] {
                    let moved = tensor.detach() - tensor.grad() * (0.1 * f64::from(step + 1));
                    tch::no_grad(|| tensor.shallow_clone().copy_(&moved));
                    set_grad(tensor, None).unwrap();
                }
            }
        }
    }
}

#[test]
fn every_byte_between_devices_is_counted() {
    let mut model = DataParallel::new(&[Device::Cpu; 3], |path| net(&path)).unwrap();
    let (x, y) = samples(0..9);
    let output = model.forward_t(&x, true).unwrap();
    model.backward(&output.mse_loss(&y, tch::Reduction::Mean)).unwrap();
    let (params, buffers) = ((6 * 8 + 8 + 8 + 8 + 8 * 3 + 3) * 4, 2 * 8 * 4);
    let expected = StageBytes {
        scatter_inputs: 6 * 6 * 4,
        replicate: 2 * (params + buffers),
        gather_outputs: 6 * 3 * 4,
        scatter_gradients: 6 * 3 * 4,
        reduce_gradients: 2 * params,
    };
    assert_eq!(model.traffic(), expected);
    let one = DataParallel::new(&[Device::Cpu], |path| net(&path))
        .and_then(|mut model| model.forward_t(&x, true).map(|_| model.traffic()));
    assert_eq!(one.unwrap(), StageBytes::default(), "control: one device sends nothing");
}

#[test]
fn the_buffers_of_the_first_device_are_used() {
    let mut model = DataParallel::new(&[Device::Cpu; 2], |path| net(&path)).unwrap();
    let (x, _) = samples(0..8);
    let _ = model.forward_t(&x, true).unwrap();
    let mean = model.store().variables()["n.running_mean"].copy();
    assert!(f64::try_from(mean.abs().max()).unwrap() > 0.0);
    let before = mean.copy();
    let _ = model.forward_t(&x, false).unwrap();
    assert_close(&[model.store().variables()["n.running_mean"].copy()], &[before], 0.0);
}

#[test]
fn misuse_is_an_error() {
    assert!(DataParallel::new(&[], |path| net(&path)).is_err());
    let refused = DataParallel::<nn::Linear>::try_new(&[Device::Cpu], |_| anyhow::bail!("no such model"));
    assert_eq!(refused.unwrap_err().to_string(), "no such model");
    let mut model = DataParallel::new(&[Device::Cpu; 2], |path| net(&path)).unwrap();
    let error = model.backward(&Tensor::ones([], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
    assert!(error.contains("needs a forward in training"), "{error}");
    let wrong = Tensor::ones([4, 5], (Kind::Float, Device::Cpu));
    assert!(model.forward_t(&wrong, true).unwrap_err().to_string().contains("a replica panicked"));
    let (x, _) = samples(0..4);
    assert!(model.forward_t(&x, true).is_ok(), "control: the model can still be used");
}
