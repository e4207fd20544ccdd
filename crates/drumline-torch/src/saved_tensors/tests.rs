//! Hooks see what operations save, and backward gets what they return.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind};

use super::*;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn waves(size: &[i64], factor: f64) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, FLOAT) * factor).sin().view(size)
}

/// Hooks that keep tensors, and count what they do.
fn counted<R>(packed: &AtomicUsize, unpacked: &Arc<AtomicUsize>, body: impl FnOnce() -> R) -> R {
    let pack = |tensor: &Tensor| -> Result<Unpack, FunctionError> {
        packed.fetch_add(1, Ordering::Relaxed);
        let (kept, unpacked) = (tensor.copy(), unpacked.clone());
        Ok(Box::new(move || {
            unpacked.fetch_add(1, Ordering::Relaxed);
            Ok(kept.shallow_clone())
        }))
    };
    saved_tensor_hooks(pack, body).unwrap()
}

#[test]
fn copies_give_the_same_gradients_and_parameters_are_not_packed() {
    let weight = waves(&[5, 5], 0.3).set_requires_grad(true);
    let x = waves(&[3, 5], 0.7).set_requires_grad(true);
    let net = || ((&x * 1.0).matmul(&weight.tr()).tanh() * 2.0).exp().sum(Kind::Float);
    net().backward();
    let expected = weight.grad().copy();
    let _ = weight.grad().zero_();
    let (packed, unpacked) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let loss = counted(&packed, &unpacked, net);
    // The left factor, the result of tanh and that of exp; neither the weight nor its transpose.
    assert_eq!((packed.load(Ordering::Relaxed), unpacked.load(Ordering::Relaxed)), (3, 0));
    loss.backward();
    assert_eq!((weight.grad(), unpacked.load(Ordering::Relaxed)), (expected, 3));
}

#[test]
fn only_the_innermost_scope_packs_and_scopes_end() {
    let x = waves(&[4], 0.3).set_requires_grad(true);
    let [outer, inner] = [0; 2].map(|_| AtomicUsize::new(0));
    let unpacked = Arc::new(AtomicUsize::new(0));
    let _y = counted(&outer, &unpacked, || {
        let y = x.exp();
        let _inside = counted(&inner, &unpacked, || y.exp().exp());
        y.exp()
    });
    let _outside = x.exp();
    assert_eq!((outer.load(Ordering::Relaxed), inner.load(Ordering::Relaxed)), (2, 2));
}

#[test]
fn errors_and_panics_of_hooks_end_the_operation_or_the_backward() {
    let x = waves(&[4], 0.3).set_requires_grad(true);
    let failing = |_: &Tensor| -> Result<Unpack, FunctionError> { Err("no room".into()) };
    let error = saved_tensor_hooks(failing, || x.f_exp().unwrap_err().to_string()).unwrap();
    assert!(error.contains("a hook on saved tensors failed: no room"), "{error}");
    let losing = |_: &Tensor| -> Result<Unpack, FunctionError> { Ok(Box::new(|| panic!("lost"))) };
    let y = saved_tensor_hooks(losing, || x.exp().sum(Kind::Float)).unwrap();
    let error = y.f_backward().unwrap_err().to_string();
    assert!(error.contains("panicked: lost"), "{error}");
    assert!(x.exp().sum(Kind::Float).f_backward().is_ok());
}

#[test]
fn changed_tensors_and_parameters_are_errors() {
    let x = waves(&[4], 0.3).set_requires_grad(true);
    let (y, size) = saved_size(|| (&x * 2.0).exp()).unwrap();
    assert_eq!(size, SavedSize { tensors: 1, bytes: 16 });
    let mut changed = y.shallow_clone();
    let _ = changed.g_add_scalar_(1.0);
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("was modified in place (version 1, expected 0); try"), "{error}");
    let mut weight = waves(&[4], 0.3).set_requires_grad(true);
    let (y, size) = saved_size(|| weight.square().sum(Kind::Float)).unwrap();
    assert_eq!(size.tensors, 0);
    let _ = tch::no_grad(|| weight.g_add_scalar_(1.0));
    let error = y.f_backward().unwrap_err().to_string();
    assert!(error.contains("a parameter that backward needs was modified in place"), "{error}");
}

#[test]
fn memory_is_counted_once() {
    let x = waves(&[10, 10], 0.3).set_requires_grad(true);
    // The results of exp and tanh; the operand of square is that of tanh.
    let (_y, size) = saved_size(|| (&x * 1.0).exp().tanh().square()).unwrap();
    assert_eq!(size, SavedSize { tensors: 3, bytes: 800 });
}

#[test]
fn in_host_memory_nothing_is_offloaded() {
    let x = waves(&[300, 300], 0.3).set_requires_grad(true);
    let y = offload_saved(|| (&x * 2.0).exp()).unwrap();
    y.sum(Kind::Float).backward();
    assert_eq!(x.grad(), (&x * 2.0).exp().detach() * 2.0);
    let y = offload_saved(|| (&x * 2.0).exp()).unwrap();
    let _ = y.shallow_clone().g_add_scalar_(1.0);
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("was modified in place"), "{error}");
}
