//! Panics that are expected and dealt with: caught as any trouble is, and not printed.
//!
//! The hook that prints panics is the whole process's, so ours is put before it once, and asks whose panic it is: other threads' panics, and this one's at
//! other times, go on to the hook that was there. A backward on a GPU runs on autograd's threads: what panics there is printed.

use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

use crate::loader::Cause;
use crate::shared_failure::{Trouble, guarded};

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The thread's panics are silent until this is dropped.
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

/// Runs `body`; an error or a panic in it is trouble that nobody has heard of yet.
pub(crate) fn guarded_quietly<T>(body: impl FnOnce() -> Result<T, Cause>) -> Result<T, Trouble> {
    let _quiet = Quiet::begin();
    guarded(body).map_err(Trouble::untold)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread;

    use super::*;
    use crate::shared_failure::SharedFailure;

    // One test: the hook is the whole process's.
    #[test]
    fn only_this_threads_panics_are_silent_and_only_meanwhile() {
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let (ear, before) = (Arc::clone(&heard), take_hook());
        set_hook(Box::new(move |info| {
            match info.payload_as_str().filter(|text| text.starts_with("quiet test: ")) {
                Some(text) => ear.lock().unwrap().push(text.to_owned()),
                None => before(info), // Of another test.
            }
        }));
        let trouble = guarded_quietly::<()>(|| {
            let other = thread::spawn(|| panic!("quiet test: of another thread"));
            assert!(other.join().is_err());
            let inner = guarded_quietly::<()>(|| panic!("quiet test: within"));
            assert_eq!(inner.unwrap_err().text, "panicked: quiet test: within");
            panic!("quiet test: expected")
        });
        let trouble = trouble.unwrap_err();
        assert_eq!(trouble.text, "panicked: quiet test: expected");
        assert_eq!(SharedFailure::of(&[Some(trouble)]).unwrap().teller(), Some(0), "it is still to be told");
        assert!(guarded::<()>(|| panic!("quiet test: afterwards")).is_err());
        assert_eq!(*heard.lock().unwrap(), ["quiet test: of another thread", "quiet test: afterwards"]);
    }
}
