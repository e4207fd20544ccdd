//! Backward from several tensors with given gradients, as PyTorch's `torch.autograd.backward(tensors, grad_tensors)`.
//!
//! ```text
//!   outputs ─▶ GradEdge: the place in the graph, without the values ─┐
//!   gradients of the outputs, such as those that the next stage sends ┴▶ autograd ─▶ gradients of leaves, hooks
//! ```
//! tch's `backward` begins with ones, and at one tensor. A [`GradEdge`] keeps the graph of a tensor alive, but not the
//! tensor's values, which can be freed before backward.
#![allow(unsafe_code)]

use tch::Tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::status::{Message, check, text_of};

/// C++'s `torch::autograd::Edge`.
#[repr(C)]
struct Edge {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn drumline_edge_of(tensor: *const torch_sys::C_tensor, edge: *mut *mut Edge) -> Message;
    fn drumline_edge_free(edge: *mut Edge) -> Message;
    fn drumline_backward_from(edges: *const *mut Edge, grads: List, keep_graph: bool) -> Message;
}

/// What happens to the graph of a backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepGraph {
    /// It is freed while backward runs, as by default in PyTorch.
    No,
    /// It stays, for another backward through the same graph.
    Yes,
}

/// The place of a tensor in autograd's graph: a backward can begin there after the tensor is dropped.
#[derive(Debug)]
pub struct GradEdge(*mut Edge);

impl GradEdge {
    /// The place of this tensor; `None` if it needs no gradient.
    pub fn of(tensor: &Tensor) -> Result<Option<Self>, TorchError> {
        let mut edge = std::ptr::null_mut();
        // SAFETY: the handle is valid for the call; the result is null or an edge that we own.
        check(unsafe { drumline_edge_of(tensor.as_ptr(), &mut edge) }, "cannot find a tensor in the graph")?;
        Ok((!edge.is_null()).then_some(Self(edge)))
    }
}

impl Drop for GradEdge {
    fn drop(&mut self) {
        // SAFETY: made by `of`, and freed once. The message of a failure is freed by `text_of`; nobody can handle it here.
        let _ = text_of(unsafe { drumline_edge_free(self.0) });
    }
}

/// Runs one backward from these tensors, each with its gradient. Gradients of leaves are accumulated.
///
/// ```
/// use drumline_torch::{KeepGraph, backward_from};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let (double, square) = (&x * 2, &x * &x);
/// let grads = [Tensor::from_slice(&[1f32, 10.0]), Tensor::ones([2], (Kind::Float, Device::Cpu))];
/// backward_from(&[&double, &square], &[&grads[0], &grads[1]], KeepGraph::No)?;
/// assert_eq!(Vec::<f32>::try_from(x.grad())?, [2.0 + 2.0, 20.0 + 4.0]);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub fn backward_from(outputs: &[&Tensor], grads: &[&Tensor], graph: KeepGraph) -> Result<(), TorchError> {
    let edge = |output: &&Tensor| {
        let problem = || {
            TorchError::value(
                "an output of a backward",
                "without a graph",
                "a tensor that requires a gradient",
            )
        };
        GradEdge::of(output)?.ok_or_else(problem)
    };
    let edges = outputs.iter().map(edge).collect::<Result<Vec<_>, _>>()?;
    backward_from_edges(&edges.iter().collect::<Vec<_>>(), grads, graph)
}

/// The same from places in the graph.
pub fn backward_from_edges(
    edges: &[&GradEdge],
    grads: &[&Tensor],
    graph: KeepGraph,
) -> Result<(), TorchError> {
    if edges.len() != grads.len() {
        let expected = format!("{}, one for each output", edges.len());
        return Err(TorchError::value("the number of gradients", grads.len(), expected));
    }
    if edges.is_empty() {
        return Ok(());
    }
    let edges: Vec<_> = edges.iter().map(|edge| edge.0).collect();
    let grads = Handles::of(grads);
    // SAFETY: there are as many edges as gradients, and all of them are valid for the call.
    let message = unsafe { drumline_backward_from(edges.as_ptr(), grads.list(), graph == KeepGraph::Yes) };
    check(message, "backward failed")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tch::{Device, Kind};

    use super::*;
    use crate::GradHook;

    fn leaf(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn hooks_run_once_and_gradients_accumulate() {
        let x = leaf(&[1.0, 2.0]);
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = runs.clone();
        let _hook = GradHook::new(&x, move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        for step in 1..3 {
            let (y, z) = (&x * 3, &x + 1);
            let by_y = Tensor::from_slice(&[1f32, -1.0]);
            backward_from(&[&y, &z], &[&by_y, &by_y], KeepGraph::No).unwrap();
            assert_eq!(runs.load(Ordering::Relaxed), step);
            let step = step as f32;
            assert_eq!(values(&x.grad()), [4.0 * step, -4.0 * step]);
        }
    }

    #[test]
    fn values_of_an_output_can_be_freed_before_backward() {
        let x = leaf(&[1.0, 2.0]);
        let y = &x * 3;
        let edge = GradEdge::of(&y).unwrap().unwrap();
        drop(y);
        backward_from_edges(&[&edge], &[&Tensor::from_slice(&[1f32, 2.0])], KeepGraph::No).unwrap();
        assert_eq!(values(&x.grad()), [3.0, 6.0]);
    }

    #[test]
    fn a_leaf_is_an_output_too() {
        let x = leaf(&[1.0, 2.0]);
        backward_from(&[&x], &[&Tensor::from_slice(&[5f32, 6.0])], KeepGraph::No).unwrap();
        assert_eq!(values(&x.grad()), [5.0, 6.0]);
        assert!(GradEdge::of(&Tensor::from_slice(&[1f32])).unwrap().is_none());
        backward_from(&[], &[], KeepGraph::No).unwrap();
    }

    #[test]
    fn a_kept_graph_has_a_second_backward_and_a_freed_one_an_error() {
        let x = leaf(&[2.0]);
        let y = x.square();
        let one = Tensor::ones([1], (Kind::Float, Device::Cpu));
        backward_from(&[&y], &[&one], KeepGraph::Yes).unwrap();
        backward_from(&[&y], &[&one], KeepGraph::No).unwrap();
        assert_eq!(values(&x.grad()), [8.0]);
        let error = backward_from(&[&y], &[&one], KeepGraph::No).unwrap_err().to_string();
        assert!(error.starts_with("backward failed") && error.contains("second time"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let x = leaf(&[1.0, 2.0]);
        let error = |outputs: &[&Tensor], grads: &[&Tensor]| {
            backward_from(outputs, grads, KeepGraph::No).unwrap_err().to_string()
        };
        let (y, wrong) = (&x * 3, Tensor::ones([3], (Kind::Float, Device::Cpu)));
        let text = error(&[&y], &[&wrong]);
        assert!(text.contains("invalid gradient") && text.contains("[3]"), "{text}");
        let text = error(&[&y], &[]);
        assert_eq!(text, "the number of gradients is 0; expected 1, one for each output");
        let text = error(&[&wrong], &[&wrong]);
        assert!(text.contains("a tensor that requires a gradient"), "{text}");
    }
}
