//! Autograd functions from two Rust closures, as PyTorch's `torch.autograd.Function`.
//!
//! ```text
//!   inputs ─▶ forward (without gradients) ─▶ outputs          saved tensors ─┐
//!   gradients of the inputs ◀───────────── backward ◀─ gradients of the outputs
//! ```
//! The closures live as long as the graph. Save the tensors that backward needs in forward: libtorch then frees them
//! with the graph, and reports an error if one of them was changed before backward uses it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use drumline_comm::CommError;
use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::status::{Message, check, message, panicked};

/// Any error. Forward and backward may return it.
pub type FunctionError = Box<dyn std::error::Error + Send + Sync>;

/// A list of tensors as the shim takes it.
#[repr(C)]
struct Handles {
    data: *const *mut C_tensor,
    count: usize,
}

#[repr(C)]
struct BackwardCall {
    grads: Handles,
    saved: Handles,
    needed: *const bool,
    results: *mut *mut C_tensor,
    num_results: usize,
}

#[repr(C)]
struct BackwardClosure {
    context: *mut c_void,
    call: extern "C" fn(*mut c_void, *const BackwardCall) -> Message,
    drop: extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    fn drumline_requires_grad(tensor: *mut C_tensor, needed: *mut bool) -> Message;
    fn drumline_function_record(
        inputs: Handles,
        outputs: Handles,
        saved: Handles,
        constant: Handles,
        closure: BackwardClosure,
    ) -> Message;
}

/// The context of forward, PyTorch's `ctx`.
#[derive(Debug)]
pub struct Forward {
    saved: Vec<Tensor>,
    constant: Vec<Tensor>,
    needed: Vec<bool>,
}

impl Forward {
    /// Saves an input, an output or any other tensor for backward, which gets them in the order of saving.
    pub fn save(&mut self, tensor: &Tensor) {
        self.saved.push(tensor.shallow_clone());
    }

    /// Marks an output through which no gradient flows. Outputs of integer types need no mark.
    pub fn mark_non_differentiable(&mut self, output: &Tensor) {
        self.constant.push(output.shallow_clone());
    }

    /// Whether backward will need the gradient of the input.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        self.needed.get(input).copied().unwrap_or(false)
    }
}

/// The context of backward, PyTorch's `ctx`.
#[derive(Debug)]
pub struct Backward {
    saved: Vec<Tensor>,
    needed: Vec<bool>,
}

impl Backward {
    /// The tensors that forward saved.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Whether the gradient of this input is needed; if not, it may be `None`.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        self.needed.get(input).copied().unwrap_or(false)
    }
}

type Body = dyn FnMut(&Backward, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, FunctionError> + Send;

/// Runs `forward` on the inputs and registers `backward` as its derivative.
///
/// `forward` runs without gradients and returns the outputs. `backward` gets the gradient of each output (`None` if
/// there is none), and returns one for each input (`None` for zero, or if it is not needed). It runs once per backward
/// through the graph, on the thread that calls `backward`, or for tensors on a GPU on a thread of libtorch. If it fails
/// or panics, that backward ends with an error that has its text. Double backward is an error.
///
/// ```
/// use drumline_torch::autograd_function;
/// use tch::{Kind, Tensor};
///
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let outputs = autograd_function(
///     &[&x],
///     |cx, inputs| {
///         let y = inputs[0].exp();
///         cx.save(&y);
///         Ok(vec![y])
///     },
///     |cx, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * &cx.saved()[0])]),
/// )?;
/// outputs[0].sum(Kind::Float).backward();
/// assert_eq!(x.grad(), x.exp());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn autograd_function(
    inputs: &[&Tensor],
    forward: impl FnOnce(&mut Forward, &[&Tensor]) -> Result<Vec<Tensor>, FunctionError>,
    backward: impl FnMut(&Backward, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, FunctionError>
    + Send
    + 'static,
) -> Result<Vec<Tensor>, TorchError> {
    let needed = inputs.iter().map(|input| requires_grad(input)).collect::<Result<_, _>>()?;
    let mut cx = Forward { saved: Vec::new(), constant: Vec::new(), needed };
    let outputs = {
        let _no_grad = tch::no_grad_guard();
        forward(&mut cx, inputs).map_err(forward_failed)?
    };
    record(inputs, &outputs, &cx, Box::new(backward))?;
    Ok(outputs)
}

fn requires_grad(tensor: &Tensor) -> Result<bool, TorchError> {
    let mut needed = false;
    // SAFETY: the handle is valid for the call, which writes one bool.
    let message = unsafe { drumline_requires_grad(tensor.as_ptr().cast_mut(), &mut needed) };
    check(message, "cannot inspect an input of a function")?;
    Ok(needed)
}

/// Attaches the autograd node to the outputs.
fn record(
    inputs: &[&Tensor],
    outputs: &[Tensor],
    cx: &Forward,
    backward: Box<Body>,
) -> Result<(), TorchError> {
    let inputs = pointers(inputs.iter().copied());
    let (outputs, saved, constant) = (pointers(outputs), pointers(&cx.saved), pointers(&cx.constant));
    let context = Box::into_raw(Box::new(Mutex::new(backward))).cast();
    let closure = BackwardClosure { context, call, drop: drop_body };
    // SAFETY: all handles are valid for the call. Those of the outputs are replaced in place, and nobody else holds
    // them. C++ owns the closure from here on, also after an error.
    let message = unsafe {
        drumline_function_record(
            borrowed(&inputs),
            borrowed(&outputs),
            borrowed(&saved),
            borrowed(&constant),
            closure,
        )
    };
    check(message, "cannot record an autograd function")
}

fn pointers<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Vec<*mut C_tensor> {
    tensors.into_iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

fn borrowed(pointers: &[*mut C_tensor]) -> Handles {
    Handles { data: pointers.as_ptr(), count: pointers.len() }
}

/// Keeps the type of the error if it is one of ours.
pub(crate) fn forward_failed(error: FunctionError) -> TorchError {
    let error = match error.downcast::<TorchError>() {
        Ok(error) => return *error,
        Err(error) => error,
    };
    match error.downcast::<CommError>() {
        Ok(error) => (*error).into(),
        Err(cause) => TorchError::Custom { operation: "forward failed", cause },
    }
}

extern "C" fn call(context: *mut c_void, call: *const BackwardCall) -> Message {
    // SAFETY: C++ passes the pointer from `record`, and a call that is valid until this returns.
    let (body, call) = unsafe { (&*context.cast::<Mutex<Box<Body>>>(), &*call) };
    // SAFETY: we take ownership of the handles here, once, before anything can fail.
    let (grads, saved) = unsafe { (taken(&call.grads), taken(&call.saved)) };
    // SAFETY: there are as many flags as results.
    let needed = unsafe { std::slice::from_raw_parts(call.needed, call.num_results) }.to_vec();
    let cx = Backward { saved: saved.into_iter().flatten().collect(), needed };
    let run = || {
        let mut body = body.lock().unwrap_or_else(PoisonError::into_inner);
        body(&cx, grads).and_then(|results| expect(results, call.num_results))
    };
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panicked(&*panic).into()));
    match outcome {
        Ok(results) => {
            for (i, result) in results.into_iter().enumerate() {
                // SAFETY: there is room for `num_results` handles, of which C++ takes ownership.
                unsafe { *call.results.add(i) = result.map_or(std::ptr::null_mut(), released) };
            }
            std::ptr::null_mut()
        }
        Err(error) => message(&format!("backward failed: {error}")),
    }
}

fn expect(results: Vec<Option<Tensor>>, inputs: usize) -> Result<Vec<Option<Tensor>>, FunctionError> {
    if results.len() == inputs {
        return Ok(results);
    }
    Err(format!("it returned {} gradients, expected one for each of {inputs} inputs", results.len()).into())
}

/// # Safety
/// The handles are valid, and nobody else owns them.
unsafe fn taken(handles: &Handles) -> Vec<Option<Tensor>> {
    if handles.count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    let handles = unsafe { std::slice::from_raw_parts(handles.data, handles.count) };
    // SAFETY: as above.
    handles.iter().map(|&handle| (!handle.is_null()).then(|| unsafe { Tensor::from_ptr(handle) })).collect()
}

/// Releases the handle from its owner.
pub(crate) fn released(mut tensor: Tensor) -> *mut C_tensor {
    let handle = tensor.as_mut_ptr();
    std::mem::forget(tensor);
    handle
}

extern "C" fn drop_body(context: *mut c_void) {
    // SAFETY: made by `record`, and dropped once. Nobody can handle a panic while dropping.
    let body = unsafe { Box::from_raw(context.cast::<Mutex<Box<Body>>>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(body)));
}

#[cfg(test)]
mod tests;
