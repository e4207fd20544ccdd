//! Panics that are expected and handled: they are caught like any failure, and not printed.
//!
//! The panic hook belongs to the whole process. Ours is installed once in front of it, and suppresses only panics of a
//! thread that is inside `guarded_quietly`; all others are passed to the hook that was there. A backward on a GPU runs
//! on autograd's threads, so panics there are printed.

use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

use crate::comm::shared_failure::{LocalFailure, guarded};
use crate::data::loader::Cause;

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The thread's panics are not printed until this is dropped.
struct Quiet {
    before: bool,
}

impl Quiet {
    fn begin() -> Self {
        install();
        Self { before: IS_QUIET.replace(true) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        IS_QUIET.set(self.before);
    }
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                before(info);
            }
        }));
    });
}

/// Runs `body`. An error or a panic in it is a failure that was not printed yet.
pub(crate) fn guarded_quietly<T>(body: impl FnOnce() -> Result<T, Cause>) -> Result<T, LocalFailure> {
    let _quiet = Quiet::begin();
    guarded(body).map_err(LocalFailure::still_to_show)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread;

    use super::*;
    use crate::comm::shared_failure::SharedFailure;

    // There is only one test, because the hook belongs to the whole process.
    #[test]
    fn only_this_threads_panics_are_silent_and_only_meanwhile() {
        let printed: Arc<Mutex<Vec<String>>> = Arc::default();
        let (sink, before) = (Arc::clone(&printed), take_hook());
        set_hook(Box::new(move |info| {
            match info.payload_as_str().filter(|text| text.starts_with("quiet test: ")) {
                Some(text) => sink.lock().unwrap().push(text.to_owned()),
                None => before(info), // from another test
            }
        }));
        let failure = guarded_quietly::<()>(|| {
            let other = thread::spawn(|| panic!("quiet test: of another thread"));
            assert!(other.join().is_err());
            let inner = guarded_quietly::<()>(|| panic!("quiet test: within"));
            assert_eq!(inner.unwrap_err().text, "panicked: quiet test: within");
            panic!("quiet test: expected")
        });
        let failure = failure.unwrap_err();
        assert_eq!(failure.text, "panicked: quiet test: expected");
        assert_eq!(
            SharedFailure::of(&[Some(failure)]).unwrap().reporting_rank(),
            Some(0),
            "it was not shown yet"
        );
        assert!(guarded::<()>(|| panic!("quiet test: afterwards")).is_err());
        assert_eq!(*printed.lock().unwrap(), ["quiet test: of another thread", "quiet test: afterwards"]);
    }
}
