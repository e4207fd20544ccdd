//! The shim's way to answer and to call back, seen from Rust: `shim/status.h` and `shim/callback.h`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::TorchError;

/// Null, or a message to give back.
pub(crate) type Message = *mut c_char;

unsafe extern "C" {
    fn drumline_message_free(message: Message);
    fn strdup(text: *const c_char) -> Message;
}

/// Turns the answer of a shim function into a result; `doing` begins the error's text.
pub(crate) fn check(message: Message, doing: &'static str) -> Result<(), TorchError> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim hands over a string that ends in zero, and its ownership.
    let text = unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        drumline_message_free(message);
        text
    };
    Err(match crate::cuda::out_of_memory(&text) {
        Some(told) => TorchError::OutOfMemory(told),
        None => TorchError::Refused { doing, message: text },
    })
}

/// A closure that C++ owns. Laid out as `drumline::Closure`.
#[repr(C)]
pub(crate) struct Closure {
    context: *mut c_void,
    call: extern "C" fn(*mut c_void) -> Message,
    drop: extern "C" fn(*mut c_void),
}

/// What is called from C++: the error's text becomes a C++ exception.
pub(crate) type Body = Box<dyn FnMut() -> Result<(), String>>;

impl Closure {
    pub(crate) fn new(body: impl FnMut() -> Result<(), String> + 'static) -> Self {
        let body: Body = Box::new(body);
        Self { context: Box::into_raw(Box::new(body)).cast(), call, drop: drop_body }
    }

    /// Something that is only kept, and dropped when C++ lets go of it.
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
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panic_text(&*panic)));
    match outcome {
        Ok(()) => std::ptr::null_mut(),
        // SAFETY: a copy made by malloc, which C++ frees.
        Err(text) => unsafe { strdup(c_string(text).as_ptr()) },
    }
}

extern "C" fn drop_body(context: *mut c_void) {
    // SAFETY: made by `Closure::new`, and dropped once. A panic while dropping cannot be told to anybody.
    let body = unsafe { Box::from_raw(context.cast::<Body>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(body)));
}

pub(crate) fn c_string(text: String) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a word"))
}
