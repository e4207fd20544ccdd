//! How the shim returns errors and calls back into Rust: the Rust side of `shim/status.h` and `shim/callback.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_comm::panic_text;

use crate::error::TorchError;
use crate::function::FunctionError;

/// Null for success, or a message that the caller must free.
pub(crate) type Message = *mut c_char;

unsafe extern "C" {
    fn drumline_message_free(message: Message);
    fn strdup(text: *const c_char) -> Message;
}

/// Turns the answer of a shim function into a result; the error's text begins with `operation`.
pub(crate) fn check(message: Message, operation: &'static str) -> Result<(), TorchError> {
    text_of(message).map_or(Ok(()), |text| Err(TorchError::from_text(operation, text)))
}

/// A closure that C++ owns. Laid out as `drumline::Closure`.
#[repr(C)]
pub(crate) struct Closure {
    context: *mut c_void,
    call: extern "C" fn(*mut c_void) -> Message,
    drop: extern "C" fn(*mut c_void),
}

/// What C++ calls. The text of its error becomes the message of a C++ exception.
pub(crate) type Body = Box<dyn FnMut() -> Result<(), FunctionError>>;

impl Closure {
    pub(crate) fn new(body: impl FnMut() -> Result<(), FunctionError> + 'static) -> Self {
        let body: Body = Box::new(body);
        Self { context: Box::into_raw(Box::new(body)).cast(), call, drop: drop_body }
    }

    /// Keeps a value alive until C++ drops the closure.
    pub(crate) fn keeping(kept: impl Send + 'static) -> Self {
        Self::new(move || {
            let _ = &kept;
            Ok(())
        })
    }
}

extern "C" fn call(context: *mut c_void) -> Message {
    // SAFETY: made by `Closure::new`; C++ calls it on one thread at a time and not after `drop_body`.
    let body = unsafe { &mut *context.cast::<Body>() };
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic).into()));
    match outcome {
        Ok(()) => std::ptr::null_mut(),
        Err(error) => message(&error.to_string()),
    }
}

extern "C" fn drop_body(context: *mut c_void) {
    // SAFETY: made by `Closure::new`, and dropped once. Nobody can handle a panic while dropping.
    let body = unsafe { Box::from_raw(context.cast::<Body>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(body)));
}

/// A message that C++ frees.
pub(crate) fn message(text: &str) -> Message {
    // SAFETY: a copy made by malloc, which C++ frees.
    unsafe { strdup(c_string(text).as_ptr()) }
}

/// The text of a message that the shim has handed over; `None` for null.
pub(crate) fn text_of(message: Message) -> Option<String> {
    if message.is_null() {
        return None;
    }
    // SAFETY: the shim returns a zero-terminated string and its ownership.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        drumline_message_free(message);
        Some(text)
    }
}

pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    format!("panicked: {}", panic_text(panic))
}
