//! Autograd functions from closures: gradients against libtorch's and against finite differences, errors, and memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};

use super::{FunctionError, autograd_function};
use crate::error::TorchError;

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// Two inputs and two outputs: the product, and the sine of the first.
fn product_and_sine(a: &Tensor, b: &Tensor) -> Vec<Tensor> {
    autograd_function(
        &[a, b],
        |cx, inputs| {
            cx.save(inputs[0]);
            cx.save(inputs[1]);
            Ok(vec![inputs[0] * inputs[1], inputs[0].sin()])
        },
        |cx, grads| {
            let (a, b) = (&cx.saved()[0], &cx.saved()[1]);
            let by_product = grads[0].as_ref().map(|grad| (grad * b, grad * a));
            let by_sine = grads[1].as_ref().map(|grad| grad * a.cos());
            let (product_a, product_b) = by_product.unzip();
            let of_a = match (product_a, by_sine) {
                (Some(one), Some(other)) => Some(one + other),
                (one, other) => one.or(other),
            };
            Ok(vec![of_a, product_b])
        },
    )
    .unwrap()
}

fn square(x: &Tensor) -> Tensor {
    let outputs = autograd_function(
        &[x],
        |cx, inputs| {
            cx.save(inputs[0]);
            Ok(vec![inputs[0].square()])
        },
        |cx, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * &cx.saved()[0] * 2)]),
    );
    outputs.unwrap().swap_remove(0)
}

fn failing(
    x: &Tensor,
    backward: impl Fn() -> Result<Vec<Option<Tensor>>, FunctionError> + Send + 'static,
) -> String {
    let y = autograd_function(&[x], |_, inputs| Ok(vec![inputs[0] * 1]), move |_, _| backward()).unwrap();
    y[0].sum(Kind::Double).f_backward().unwrap_err().to_string()
}

#[test]
fn gradients_equal_finite_differences() {
    let (a, b) = (leaf(&[0.3, -1.2, 2.0]), leaf(&[1.5, 0.7, -0.4]));
    let weights = Tensor::from_slice(&[0.9, -0.2, 1.7]);
    let value = |a: &Tensor, b: &Tensor| {
        let outputs = product_and_sine(a, b);
        (&outputs[0] * &weights + &outputs[1] * 3).sum(Kind::Double)
    };
    value(&a, &b).backward();
    let step = 1e-6;
    for i in 0..3 {
        let nudge = Tensor::zeros([3], (Kind::Double, Device::Cpu));
        let _ = nudge.get(i).fill_(step);
        let slope = |up: Tensor, down: Tensor| (up - down).double_value(&[]) / (2.0 * step);
        let by_a = slope(value(&(&a + &nudge), &b), value(&(&a - &nudge), &b));
        let by_b = slope(value(&a, &(&b + &nudge)), value(&a, &(&b - &nudge)));
        assert!((a.grad().double_value(&[i]) - by_a).abs() < 1e-7);
        assert!((b.grad().double_value(&[i]) - by_b).abs() < 1e-7);
    }
}

#[test]
fn an_output_that_is_not_used_has_no_gradient() {
    let (a, b) = (leaf(&[0.3]), leaf(&[1.5]));
    product_and_sine(&a, &b)[1].backward();
    assert_eq!(a.grad(), a.cos());
    assert!(!b.grad().defined());
}

#[test]
fn only_needed_gradients_are_computed() {
    let (a, fixed) = (leaf(&[2.0]), Tensor::from_slice(&[3.0]));
    let outputs = autograd_function(
        &[&a, &fixed],
        |cx, inputs| {
            assert!(cx.needs_input_grad(0) && !cx.needs_input_grad(1) && !cx.needs_input_grad(2));
            Ok(vec![inputs[0] * inputs[1]])
        },
        |cx, grads| {
            assert!(cx.needs_input_grad(0) && !cx.needs_input_grad(1));
            Ok(vec![grads[0].as_ref().map(|grad| grad * 3.0), None])
        },
    );
    outputs.unwrap()[0].backward();
    assert_eq!(a.grad().double_value(&[0]), 3.0);
}

#[test]
fn non_differentiable_outputs_keep_their_places() {
    let x = leaf(&[1.0, -2.0]);
    let outputs = autograd_function(
        &[&x],
        |cx, inputs| {
            let sign = inputs[0].sign();
            cx.mark_non_differentiable(&sign);
            Ok(vec![sign, inputs[0].argmax(0, false), inputs[0].abs()])
        },
        |_, grads| {
            assert!(grads[0].is_none() && grads[1].is_none());
            Ok(vec![grads[2].as_ref().map(|grad| grad * 7)])
        },
    )
    .unwrap();
    assert_eq!(outputs.iter().map(Tensor::requires_grad).collect::<Vec<_>>(), [false, false, true]);
    outputs[2].sum(Kind::Double).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[7.0, 7.0]));
}

#[test]
fn an_input_may_be_the_output() {
    let x = leaf(&[1.0]);
    let outputs = autograd_function(
        &[&x],
        |_, inputs| Ok(vec![inputs[0].shallow_clone(), inputs[0].view([1, 1])]),
        |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * 5)]),
    )
    .unwrap();
    assert!(x.is_leaf() && !outputs[0].is_leaf());
    assert_eq!(outputs[0].data_ptr(), x.data_ptr());
    outputs[0].backward();
    assert_eq!(x.grad().double_value(&[0]), 5.0);
}

#[test]
fn changing_a_saved_tensor_is_an_error() {
    let x = leaf(&[1.0, 2.0]);
    let mut inner = &x * 1;
    let y = square(&inner);
    let _ = inner.fill_(0.0);
    let error = y.sum(Kind::Double).f_backward().unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
    // The control: without the change it works.
    square(&(&x * 1)).sum(Kind::Double).backward();
    assert_eq!(x.grad(), &x * 2);
}

#[test]
fn errors_and_panics_in_backward_are_its_errors() {
    let x = leaf(&[1.0, 2.0]);
    let error = failing(&x, || Err("the link is down".into()));
    assert!(error.contains("backward failed: the link is down"), "{error}");
    let error = failing(&x, || panic!("no such stage"));
    assert!(error.contains("panicked: no such stage"), "{error}");
    let error = failing(&x, || Ok(Vec::new()));
    assert!(error.contains("0 gradients, expected one for each of 1 inputs"), "{error}");
    let error = failing(&x, || Ok(vec![Some(Tensor::zeros([4], (Kind::Double, Device::Cpu)))]));
    assert!(error.contains("invalid gradient"), "{error}");
    // The next backward works.
    square(&x).sum(Kind::Double).backward();
    assert_eq!(x.grad().double_value(&[0]), 2.0);
}

#[test]
fn errors_in_forward_keep_their_type() {
    let x = leaf(&[1.0]);
    let fail = |error: FunctionError| {
        autograd_function(&[&x], |_, _| Err(error), |_, _| Ok(Vec::new())).unwrap_err()
    };
    let error = fail(TorchError::DuplicateParameter { name: "w".into() }.into());
    assert!(matches!(error, TorchError::DuplicateParameter { .. }), "{error}");
    let undefined = autograd_function(
        &[&x],
        |cx, inputs| {
            cx.save(&Tensor::new());
            Ok(vec![inputs[0] * 1])
        },
        |_, grads| Ok(grads),
    );
    assert!(undefined.unwrap_err().to_string().contains("undefined"));
    assert!(fail("no data".into()).to_string().contains("forward failed: no data"));
    // Grad mode is on again after a forward that failed or panicked.
    let panicked = std::panic::catch_unwind(|| {
        autograd_function(&[&leaf(&[1.0])], |_, _| panic!("on purpose"), |_, _| Ok(Vec::new()))
    });
    assert!(panicked.is_err() && (&x * 2).requires_grad());
}

#[test]
fn double_backward_is_an_error() {
    let x = leaf(&[3.0]);
    let y = square(&x);
    let first = Tensor::run_backward(&[&y], &[&x], true, true).swap_remove(0);
    assert_eq!(first.double_value(&[0]), 6.0);
    let error = Tensor::f_run_backward(&[&first], &[&x], false, false).unwrap_err().to_string();
    assert!(error.contains("cannot be differentiated twice"), "{error}");
    let error = first.f_backward().unwrap_err().to_string();
    assert!(error.contains("cannot be differentiated twice"), "{error}");
}

#[test]
fn the_graph_can_be_used_once_unless_it_is_retained() {
    let x = leaf(&[3.0]);
    let y = square(&x);
    let once = |keep| Tensor::f_run_backward(&[&y], &[&x], keep, false);
    assert_eq!(once(true).unwrap()[0].double_value(&[0]), 6.0);
    assert_eq!(once(false).unwrap()[0].double_value(&[0]), 6.0);
    assert!(once(false).unwrap_err().to_string().contains("second time"));
}

#[test]
fn nothing_is_recorded_without_gradients() {
    let token = Arc::new(AtomicUsize::new(0));
    let count = |x: &Tensor| {
        let held = token.clone();
        let backward = move |_: &super::Backward, grads| {
            held.fetch_add(1, Ordering::Relaxed);
            Ok(grads)
        };
        let y = autograd_function(&[x], |_, inputs| Ok(vec![inputs[0] * 2]), backward).unwrap();
        (y[0].requires_grad(), Arc::strong_count(&token))
    };
    assert_eq!(count(&Tensor::from_slice(&[1.0])), (false, 1));
    assert_eq!(tch::no_grad(|| count(&leaf(&[1.0]))), (false, 1));
    assert_eq!(count(&leaf(&[1.0])), (true, 2));
}

#[test]
fn closures_and_saved_tensors_are_dropped_with_the_graph() {
    let token = Arc::new(());
    let x = leaf(&[1.0]);
    for keep in [false, true] {
        let mut y = &x * 1;
        for _ in 0..10_000 {
            let held = token.clone();
            let outputs = autograd_function(
                &[&y],
                |cx, inputs| {
                    let out = inputs[0] * 1;
                    cx.save(inputs[0]);
                    // A saved output must not keep its own node alive.
                    cx.save(&out);
                    Ok(vec![out])
                },
                move |_, grads| {
                    let _ = &held;
                    Ok(grads)
                },
            );
            y = outputs.unwrap().swap_remove(0);
        }
        assert_eq!(Arc::strong_count(&token), 10_001);
        Tensor::run_backward(&[&y], &[&x], keep, false);
        drop(y);
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

#[test]
fn backward_may_run_on_another_thread() {
    let x = leaf(&[3.0]);
    let y = square(&x);
    std::thread::spawn(move || y.backward()).join().unwrap();
    assert_eq!(x.grad().double_value(&[0]), 6.0);
}
