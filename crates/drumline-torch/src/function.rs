//! Functions of autograd made of two Rust closures.
//!
//! ```text
//!   inputs ─▶ forward (without gradients) ─▶ outputs          saved tensors ─┐
//!   gradients of the inputs ◀───────────── backward ◀─ gradients of the outputs
//! ```
//! The closures live as long as the graph. Tensors that backward needs are best saved in forward: libtorch then frees them with
//! the graph, and a backward that would use one that was changed in the meantime fails.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use drumline_comm::CommError;
use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::status::{Message, c_string, check, panic_text};

/// Any error: what forward and backward may fail with.
pub type FunctionError = Box<dyn std::error::Error + Send + Sync>;

/// Tensors, as the shim takes them.
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

/// What forward can say about itself.
#[derive(Debug)]
pub struct Forward {
    saved: Vec<Tensor>,
    constant: Vec<Tensor>,
    needed: Vec<bool>,
}

impl Forward {
    /// Keeps an input, an output or any other tensor for backward, which finds them in the order of saving.
    pub fn save(&mut self, tensor: &Tensor) {
        self.saved.push(tensor.shallow_clone());
    }

    /// No gradient flows through this output. For types without gradients, such as integers, that is so anyway.
    pub fn mark_non_differentiable(&mut self, output: &Tensor) {
        self.constant.push(output.shallow_clone());
    }

    /// Whether backward will be asked for a gradient of the input.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        self.needed.get(input).copied().unwrap_or(false)
    }
}

/// What backward knows of its forward.
#[derive(Debug)]
pub struct Backward {
    saved: Vec<Tensor>,
    needed: Vec<bool>,
}

impl Backward {
    /// The tensors that forward saved, as they were.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Whether anybody wants this input's gradient; where not, it may be `None`.
    pub fn needs_input_grad(&self, input: usize) -> bool {
        self.needed.get(input).copied().unwrap_or(false)
    }
}

type Body = dyn FnMut(&Backward, Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, FunctionError> + Send;

/// Runs `forward` on the inputs and makes `backward` its derivative.
///
/// `forward` runs without gradients and returns the outputs. `backward` gets the gradient of each output, `None` where there
/// is none, and returns one for each input, `None` for zero or where none is wanted. It runs on the thread that calls
/// `backward` (for a GPU's tensors on one of libtorch's), once per backward through the graph. Its error, and its panic, end that
/// backward with an error that has its text. It cannot be differentiated itself: doing so is an error.
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
    // SAFETY: the handle is good for the call, which writes one bool.
    let message = unsafe { drumline_requires_grad(tensor.as_ptr().cast_mut(), &mut needed) };
    check(message, "cannot look at an input of a function")?;
    Ok(needed)
}

/// Gives the outputs their history.
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
    // SAFETY: all handles are good for the call; those of the outputs are replaced in place, and nobody else has them. C++ owns
    // the closure from here on, also when it refuses.
    let message = unsafe {
        drumline_function_record(lent(&inputs), lent(&outputs), lent(&saved), lent(&constant), closure)
    };
    check(message, "cannot make a function of autograd")
}

fn pointers<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Vec<*mut C_tensor> {
    tensors.into_iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

fn lent(pointers: &[*mut C_tensor]) -> Handles {
    Handles { data: pointers.as_ptr(), count: pointers.len() }
}

/// Keeps what kind of error it was, where that is known here.
fn forward_failed(error: FunctionError) -> TorchError {
    let error = match error.downcast::<TorchError>() {
        Ok(error) => return *error,
        Err(error) => error,
    };
    match error.downcast::<CommError>() {
        Ok(error) => (*error).into(),
        Err(error) => TorchError::Refused { doing: "forward failed", message: error.to_string() },
    }
}

extern "C" fn call(context: *mut c_void, call: *const BackwardCall) -> Message {
    // SAFETY: C++ passes what it got from `record`, and a call that is good until this returns.
    let (body, call) = unsafe { (&*context.cast::<Mutex<Box<Body>>>(), &*call) };
    // SAFETY: the handles become ours here, before anything can fail, and once.
    let (grads, saved) = unsafe { (taken(&call.grads), taken(&call.saved)) };
    // SAFETY: there are as many flags as results.
    let needed = unsafe { std::slice::from_raw_parts(call.needed, call.num_results) }.to_vec();
    let cx = Backward { saved: saved.into_iter().flatten().collect(), needed };
    let run = || {
        let mut body = body.lock().unwrap_or_else(PoisonError::into_inner);
        body(&cx, grads).and_then(|results| expect(results, call.num_results))
    };
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panic_text(&*panic).into()));
    match outcome {
        Ok(results) => {
            for (i, result) in results.into_iter().enumerate() {
                // SAFETY: room for `num_results`, which C++ takes over.
                unsafe { *call.results.add(i) = result.map_or(std::ptr::null_mut(), given) };
            }
            std::ptr::null_mut()
        }
        // SAFETY: a copy made by malloc, which C++ frees.
        Err(error) => unsafe { libc::strdup(c_string(format!("backward failed: {error}")).as_ptr()) },
    }
}

fn expect(results: Vec<Option<Tensor>>, inputs: usize) -> Result<Vec<Option<Tensor>>, FunctionError> {
    if results.len() == inputs {
        return Ok(results);
    }
    Err(format!("it returned {} gradients, expected one for each of {inputs} inputs", results.len()).into())
}

/// # Safety
/// The handles are good and nobody else's.
unsafe fn taken(handles: &Handles) -> Vec<Option<Tensor>> {
    if handles.count == 0 {
        return Vec::new();
    }
    // SAFETY: passed on to the caller.
    let handles = unsafe { std::slice::from_raw_parts(handles.data, handles.count) };
    // SAFETY: as above.
    handles.iter().map(|&handle| (!handle.is_null()).then(|| unsafe { Tensor::from_ptr(handle) })).collect()
}

/// The handle, without its owner.
fn given(mut tensor: Tensor) -> *mut C_tensor {
    let handle = tensor.as_mut_ptr();
    std::mem::forget(tensor);
    handle
}

extern "C" fn drop_body(context: *mut c_void) {
    // SAFETY: made by `record`, and dropped once. A panic while dropping cannot be told to anybody.
    let body = unsafe { Box::from_raw(context.cast::<Mutex<Box<Body>>>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(body)));
}

#[cfg(test)]
mod tests;
