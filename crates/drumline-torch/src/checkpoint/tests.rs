//! Checkpoints against the same functions without them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor, no_grad};

use super::*;
use crate::{SavedSize, autocast, autograd_function, saved_size};

mod random;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn waves(size: &[i64], factor: f64) -> Tensor {
    let count: i64 = size.iter().product();
    (Tensor::arange(count, FLOAT) * factor).sin().view(size)
}

/// Two layers with GELU between them, and how often they have run.
struct Block {
    weights: [Tensor; 2],
    runs: Arc<AtomicUsize>,
}

impl Block {
    fn new() -> Self {
        let weights = [0.37, 0.91].map(|factor| (waves(&[8, 8], factor) * 0.5).set_requires_grad(true));
        Self { weights, runs: Arc::default() }
    }

    fn shared(&self) -> Self {
        let [one, other] = &self.weights;
        Self { weights: [one.shallow_clone(), other.shallow_clone()], runs: self.runs.clone() }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        self.runs.fetch_add(1, Ordering::Relaxed);
        let [one, other] = &self.weights;
        let product = |xs: &Tensor, weight: &Tensor| xs.linear(weight, None::<&Tensor>);
        product(&product(xs, one).gelu("none"), other) + xs
    }

    fn runs(&self) -> usize {
        self.runs.swap(0, Ordering::Relaxed)
    }

    /// Takes the gradients of the weights and of `x`.
    fn grads(&self, x: &Tensor) -> Vec<Tensor> {
        let take = |tensor: &Tensor| {
            let grad = tensor.grad();
            let taken = grad.copy();
            no_grad(|| drop(grad.shallow_clone().zero_()));
            taken
        };
        self.weights.iter().chain([x]).map(take).collect()
    }

    fn checkpointed(&self, xs: &Tensor) -> Tensor {
        let block = self.shared();
        checkpoint(move |xs| Ok(block.forward(&xs[0])), &[xs]).unwrap()
    }
}

fn leaf() -> Tensor {
    waves(&[4, 8], 0.53).set_requires_grad(true)
}

#[test]
fn gradients_are_equal_and_only_inputs_are_kept() {
    let (block, x) = (Block::new(), leaf());
    let run = |checkpointed: bool| {
        let xs = &x * 1.5;
        let forward = || if checkpointed { block.checkpointed(&xs) } else { block.forward(&xs) };
        let (y, size) = saved_size(forward).unwrap();
        assert_eq!(block.runs(), 1);
        y.square().sum(Kind::Float).backward();
        (block.grads(&x), size, block.runs())
    };
    let (expected, all, none) = run(false);
    let (found, size, once) = run(true);
    assert_eq!((expected == found, none, once), (true, 0, 1));
    // The input, and the input and output of GELU.
    assert_eq!(all, SavedSize { tensors: 3, bytes: 3 * 4 * 8 * 4 });
    assert_eq!(size, SavedSize { tensors: 1, bytes: 4 * 8 * 4 });
}

#[test]
fn inputs_may_be_leaves_parameters_views_and_constants() {
    let (weight, x, index) = (leaf(), leaf(), Tensor::from_slice(&[1i64, 0, 3]));
    let function = |xs: &[Tensor]| -> Result<(Tensor, Tensor), FunctionError> {
        let rows = (xs[0].tanh() * &xs[1]).index_select(0, &xs[2]);
        Ok((rows.exp() * xs[3].tr().narrow(0, 0, 3).narrow(1, 0, 1), xs[4].sigmoid() * &xs[0]))
    };
    let mut all = Vec::new();
    for checkpointed in [false, true] {
        let inputs = [
            x.shallow_clone(),
            (&x * 2.0).square(),
            index.shallow_clone(),
            weight.narrow(0, 1, 2),
            waves(&[4, 8], 0.1),
        ];
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let (one, other) = if checkpointed {
            checkpoint(function, &inputs).unwrap()
        } else {
            function(&inputs.iter().map(|input| input.shallow_clone()).collect::<Vec<_>>()).unwrap()
        };
        (one.sum(Kind::Float) + other.square().sum(Kind::Float)).backward();
        let grads = [&x, &weight].map(|tensor| tensor.grad().copy());
        [&x, &weight].iter().for_each(|tensor| no_grad(|| drop(tensor.grad().zero_())));
        all.push(grads);
    }
    assert_eq!(all[0], all[1]);
}

#[test]
fn without_gradients_of_inputs_weights_get_theirs_and_frozen_ones_none() {
    let (block, x) = (Block::new(), waves(&[4, 8], 0.53));
    block.forward(&x).square().sum(Kind::Float).backward();
    let expected = block.weights[1].grad().copy();
    let block = Block::new();
    let _ = block.weights[0].set_requires_grad(false);
    block.checkpointed(&x).square().sum(Kind::Float).backward();
    assert_eq!(block.weights[1].grad(), expected);
    assert!(!block.weights[0].grad().defined());
}

#[test]
fn checkpoints_may_be_nested() {
    let (block, x) = (Block::new(), leaf());
    block.forward(&block.forward(&block.forward(&x)).tanh()).square().sum(Kind::Float).backward();
    let expected = block.grads(&x);
    block.runs();
    let outer = block.shared();
    let function = move |xs: &[Tensor]| {
        let inner = outer.shared();
        let two = checkpoint(
            move |xs| {
                let innermost = inner.shared();
                let one = checkpoint(move |xs| Ok(innermost.forward(&xs[0])), &[&xs[0]])?;
                Ok(inner.forward(&one).tanh())
            },
            &[&xs[0]],
        )?;
        Ok(outer.forward(&two))
    };
    let (y, size) = saved_size(|| checkpoint(function, &[&(&x * 1.0)]).unwrap()).unwrap();
    assert_eq!((block.runs(), size.bytes), (3, 4 * 8 * 4));
    y.square().sum(Kind::Float).backward();
    assert_eq!(block.grads(&x), expected);
    // All three again, then the inner two, then the innermost.
    assert_eq!(block.runs(), 3 + 2 + 1);
}

#[test]
fn operations_in_place_are_allowed_inside_and_errors_on_inputs() {
    let x = leaf();
    let function = |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
        let mut out = &xs[0] * 3.0;
        let _ = out.g_add_scalar_(0.1);
        Ok(out.relu_().exp())
    };
    function(&[x.shallow_clone()]).unwrap().sum(Kind::Float).backward();
    let expected = x.grad().copy();
    no_grad(|| drop(x.grad().zero_()));
    checkpoint(function, &[&x]).unwrap().sum(Kind::Float).backward();
    assert_eq!(x.grad(), expected);

    let mut xs = &x * 1.0;
    let y = checkpoint(function, &[&xs]).unwrap();
    let _ = no_grad(|| xs.g_add_scalar_(1.0));
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");

    // An operation needs its result, which is then modified, as without a checkpoint.
    let spoiled = |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
        let mut out = xs[0].exp();
        let _ = out.g_add_scalar_(1.0);
        Ok(out)
    };
    let y = checkpoint(spoiled, &[&(&x * 1.0)]).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("was modified in place (version 1, expected 0)"), "{error}");
}

#[test]
fn autocast_of_the_first_forward_is_that_of_the_second() {
    let (block, x) = (Block::new(), leaf());
    let run = |checkpointed: bool| {
        let forward = || if checkpointed { block.checkpointed(&x) } else { block.forward(&x) };
        let y = autocast(Device::Cpu, Kind::BFloat16, forward).unwrap();
        y.to_kind(Kind::Float).square().sum(Kind::Float).backward();
        block.grads(&x)
    };
    let (expected, found) = (run(false), run(true));
    assert_eq!(found, expected);
    // The control.
    block.forward(&x).square().sum(Kind::Float).backward();
    assert_ne!(block.grads(&x), expected);
}

/// A function whose second forward does something else.
fn changing(
    change: impl Fn(&Tensor) -> Tensor + Send + 'static,
) -> impl Fn(&[Tensor]) -> Result<Tensor, FunctionError> + Send + 'static {
    move |xs| Ok(if is_recomputing() { change(&xs[0]) } else { xs[0].exp().tanh() })
}

#[test]
fn another_second_forward_is_an_error_that_names_the_operation() {
    let x = leaf();
    let said = |change: fn(&Tensor) -> Tensor| {
        let y = checkpoint(changing(change), &[&(&x * 1.0)]).unwrap();
        let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
        // The next step works.
        let block = Block::new();
        block.checkpointed(&x).sum(Kind::Float).backward();
        assert!(block.weights[0].grad().defined() && !is_recomputing());
        error
    };
    for (change, words) in [
        (
            (|x| x.exp().narrow(0, 0, 2).tanh()) as fn(&Tensor) -> Tensor,
            "differs from the first: aten::tanh saved [2, 8] of Float on Cpu as tensor 1, expected [4, 8] of Float on Cpu; try a",
        ),
        (|x| x.to_kind(Kind::Double).exp().tanh(), "aten::exp saved [4, 8] of Double on Cpu as tensor 0"),
        (
            |x| x.exp().tanh().sigmoid(),
            "aten::sigmoid saved [4, 8] of Float on Cpu as tensor 2, and the first",
        ),
        (|x| x.exp(), "it saved 1 tensors, expected 2; the first that is missing is [4, 8] of Float on Cpu"),
        (|_| panic!("on purpose"), "the second forward of a checkpoint failed: panicked: on purpose"),
    ] {
        let error = said(change);
        assert!(error.contains(words), "{error}");
    }
    let failing = |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
        if is_recomputing() { Err("no luck".into()) } else { Ok(xs[0].exp()) }
    };
    let y = checkpoint(failing, &[&(&x * 1.0)]).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("failed: no luck"), "{error}");
}

#[test]
fn an_error_of_the_first_forward_is_returned() {
    let failing = |_: &[Tensor]| -> Result<Tensor, FunctionError> { Err("no luck".into()) };
    let error = checkpoint(failing, &[&leaf()]).unwrap_err().to_string();
    assert!(error.contains("no luck"), "{error}");
    let (y, size) = saved_size(|| leaf().exp()).unwrap();
    assert_eq!(size.tensors, 1, "hooks of the failed checkpoint have ended: {y:?}");
}

#[test]
fn under_no_grad_nothing_is_done() {
    let (block, x) = (Block::new(), leaf());
    let y = no_grad(|| block.checkpointed(&x));
    assert!(!y.requires_grad());
    assert_eq!(block.runs(), 1);
}

#[test]
fn backward_may_run_twice_and_outputs_may_be_used_twice_or_not_at_all() {
    let (block, x) = (Block::new(), leaf());
    let run = |checkpointed: bool| {
        let (one, two) = if checkpointed {
            let block = block.shared();
            checkpoint(move |xs| Ok((block.forward(&xs[0]), block.forward(&xs[0].tanh()))), &[&x]).unwrap()
        } else {
            (block.forward(&x), block.forward(&x.tanh()))
        };
        drop(two);
        let loss = (one.square() + one.exp()).sum(Kind::Float);
        let grads = Tensor::run_backward(&[&loss], &[&x], true, false);
        let again = Tensor::run_backward(&[&loss], &[&x], true, false);
        assert_eq!(grads, again);
        loss.backward();
        let mut all = block.grads(&x);
        all.extend(grads);
        all
    };
    let expected = run(false);
    block.runs();
    assert_eq!(run(true), expected);
    assert_eq!(block.runs(), 2 + 3 * 2, "each backward makes one second forward");
}

#[test]
fn gradients_of_gradients_are_equal() {
    let (block, x) = (Block::new(), leaf());
    let run = |checkpointed: bool| {
        let y = if checkpointed { block.checkpointed(&x) } else { block.forward(&x) };
        let first = Tensor::run_backward(&[&y.square().sum(Kind::Float)], &[&x], true, true);
        first[0].square().sum(Kind::Float).backward();
        block.grads(&x)
    };
    let expected = run(false);
    assert_eq!(run(true), expected);
}

#[test]
fn functions_of_closures_are_computed_again() {
    let x = leaf();
    let cube = |x: &Tensor| {
        let made = autograd_function(
            &[x],
            |cx, inputs| {
                cx.save(inputs[0]);
                Ok(vec![inputs[0].pow_tensor_scalar(3)])
            },
            |cx, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * cx.saved()[0].square() * 3.0)]),
        );
        made.unwrap().swap_remove(0)
    };
    let net = move |x: &Tensor| cube(&cube(&x.tanh()).sin());
    net(&x).sum(Kind::Float).backward();
    let expected = x.grad().copy();
    no_grad(|| drop(x.grad().zero_()));
    checkpoint(move |xs| Ok(net(&xs[0])), &[&x]).unwrap().sum(Kind::Float).backward();
    assert_eq!(x.grad(), expected);
}

/// A block whose products are marked, and how often they have run.
fn marked(block: Block) -> impl Fn(&[Tensor]) -> Result<Tensor, FunctionError> + Send + 'static {
    move |xs| {
        let product = |xs: &Tensor, weight: &Tensor| {
            keep(&[xs], || {
                block.runs.fetch_add(1, Ordering::Relaxed);
                Ok(xs.f_linear(weight, None::<&Tensor>)?)
            })
        };
        let [one, other] = &block.weights;
        let hidden = product(&xs[0], one)?.gelu("none");
        Ok(product(&hidden, other)? + &xs[0])
    }
}

#[test]
fn marked_results_are_kept_and_the_last_is_never_computed_again() {
    let (block, x) = (Block::new(), leaf());
    for precision in [None, Some(Kind::BFloat16)] {
        let under = |forward: &dyn Fn() -> Tensor| match precision {
            Some(kind) => autocast(Device::Cpu, kind, forward).unwrap(),
            None => forward(),
        };
        let backward = |y: Tensor| {
            y.to_kind(Kind::Float).square().sum(Kind::Float).backward();
            block.grads(&x)
        };
        let expected = backward(under(&|| block.forward(&(&x * 1.0))));
        for (selective, again) in [(false, 1), (true, 0)] {
            let forward = || {
                let (function, xs) = (marked(block.shared()), &x * 1.0);
                let made = if selective {
                    selective_checkpoint(function, &[&xs])
                } else {
                    checkpoint(function, &[&xs])
                };
                made.unwrap()
            };
            block.runs();
            let (y, size) = saved_size(|| under(&forward)).unwrap();
            assert_eq!(block.runs(), 2);
            assert_eq!(backward(y), expected, "{precision:?} {selective}");
            assert_eq!(block.runs(), again, "{precision:?} {selective}");
            let hidden = if precision.is_some() { 2 } else { 4 };
            let bytes = 4 * 8 * if selective { 4 + hidden } else { 4 };
            assert_eq!(size.bytes, bytes, "{precision:?} {selective}");
        }
    }
}

#[test]
fn attention_is_kept_and_saves_its_own_result() {
    let [queries, keys, values] = [0.3, 0.7, 1.1].map(|f| waves(&[2, 2, 8, 4], f).set_requires_grad(true));
    let attend = |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
        let seen = keep(&[&xs[0], &xs[1], &xs[2]], || {
            let none = None::<&Tensor>;
            let seen =
                Tensor::f_scaled_dot_product_attention(&xs[0], &xs[1], &xs[2], none, 0.0, true, None, false);
            Ok(seen?)
        })?;
        Ok(seen.exp().square())
    };
    let mut all = Vec::new();
    for selective in [false, true] {
        let inputs = [&queries, &keys, &values].map(|input| input * 1.0);
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let made = if selective {
            selective_checkpoint(attend, &inputs).unwrap()
        } else {
            attend(&inputs.iter().map(|input| input.shallow_clone()).collect::<Vec<_>>()).unwrap()
        };
        made.sum(Kind::Float).backward();
        all.push([&queries, &keys, &values].map(|input| {
            let grad = input.grad().copy();
            no_grad(|| drop(input.grad().zero_()));
            grad
        }));
    }
    assert_eq!(all[0], all[1]);
}

#[test]
fn a_marked_result_that_is_modified_is_computed_again() {
    let (x, runs) = (leaf(), Arc::new(AtomicUsize::new(0)));
    let weight = (waves(&[8, 8], 0.37) * 0.5).set_requires_grad(true);
    let function = {
        let (weight, runs) = (weight.shallow_clone(), runs.clone());
        move |xs: &[Tensor]| -> Result<Tensor, FunctionError> {
            let mut product = keep(&[&xs[0]], || {
                runs.fetch_add(1, Ordering::Relaxed);
                Ok(xs[0].f_matmul(&weight)?)
            })?;
            Ok(product.f_relu_()?.exp())
        }
    };
    function(&[&x * 1.0]).unwrap().sum(Kind::Float).backward();
    let expected = weight.grad().copy();
    no_grad(|| drop(weight.grad().zero_()));
    runs.store(0, Ordering::Relaxed);
    selective_checkpoint(function, &[&(&x * 1.0)]).unwrap().sum(Kind::Float).backward();
    assert_eq!((weight.grad(), runs.load(Ordering::Relaxed)), (expected, 2));
}
