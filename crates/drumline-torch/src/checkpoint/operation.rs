//! Which operations run on this thread: for errors, and to find random ones.

use std::marker::PhantomData;

use crate::error::TorchError;
use crate::status::{Message, check, text_of};

unsafe extern "C" {
    fn drumline_operations_watch(handle: *mut u64) -> Message;
    fn drumline_random_watch(handle: *mut u64) -> Message;
    fn drumline_watch_end(handle: u64);
    fn drumline_operation() -> Message;
    fn drumline_random_operation() -> Message;
    fn drumline_random_forget();
}

/// A callback of libtorch on the operations of this thread, until this is dropped.
pub(super) struct Watch {
    handle: u64,
    /// It belongs to the thread.
    stays: PhantomData<*const ()>,
}

impl Watch {
    fn begin(begin: unsafe extern "C" fn(*mut u64) -> Message) -> Result<Self, TorchError> {
        let mut handle = 0;
        // SAFETY: fills one number.
        check(unsafe { begin(&mut handle) }, "cannot watch operations")?;
        Ok(Self { handle, stays: PhantomData })
    }

    /// Notes which operation runs.
    pub(super) fn operations() -> Result<Self, TorchError> {
        Self::begin(drumline_operations_watch)
    }

    /// Looks for random operations.
    pub(super) fn random() -> Result<Self, TorchError> {
        Self::begin(drumline_random_watch)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: begun on this thread, and ended once.
        unsafe { drumline_watch_end(self.handle) };
    }
}

/// The innermost operation that runs, while operations are watched.
pub(super) fn current() -> String {
    // SAFETY: returns a message that we own, or null.
    text_of(unsafe { drumline_operation() }).unwrap_or_else(|| "an autograd function".to_owned())
}

/// The first random operation since [`Watch::random`].
pub(super) fn random() -> Option<String> {
    // SAFETY: as above.
    text_of(unsafe { drumline_random_operation() })
}

/// Forgets the random operation that was found.
pub(super) fn forget_random() {
    // SAFETY: takes nothing.
    unsafe { drumline_random_forget() };
}
