//! Identifies a spawn call by its place in the source and the number of earlier calls from there. The program that is
//! executed again makes its calls in the same order, so both processes give a call the same name.

use std::fmt;
use std::panic::Location;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::SpawnError;

/// One call of this program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    place: String,
    before: usize,
}

impl Call {
    /// `file:line:column`.
    pub(super) fn place(&self) -> &str {
        &self.place
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (call {})", self.place, self.before + 1)
    }
}

/// A call that failed, and its error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failed {
    pub(super) call: Call,
    pub(super) error: String,
}

/// The calls of this process so far. It is a global because calls are counted per process.
static HISTORY: Mutex<History> = Mutex::new(History { calls: Vec::new(), failed: Vec::new() });

#[derive(Debug)]
struct History {
    calls: Vec<Call>,
    failed: Vec<Failed>,
}

/// The call at `place`.
pub(super) fn next(place: &Location<'_>) -> Call {
    history().next(place.to_string())
}

/// Keeps a failure for the ranks of later calls, which must get the same error from this call.
pub(super) fn remember_failure(call: &Call, error: &SpawnError) {
    history().failed.push(Failed { call: call.clone(), error: error.to_string() });
}

/// The calls that failed so far.
pub(super) fn failed() -> Vec<Failed> {
    history().failed.clone()
}

fn history() -> MutexGuard<'static, History> {
    HISTORY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl History {
    fn next(&mut self, place: String) -> Call {
        let before = self.calls.iter().filter(|call| call.place == place).count();
        let call = Call { place, before };
        self.calls.push(call.clone());
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_place() {
        let mut history = History { calls: Vec::new(), failed: Vec::new() };
        let names: Vec<_> =
            ["a:1:1", "b:2:2", "a:1:1"].map(|p| history.next(p.to_owned()).to_string()).into();
        assert_eq!(names, ["a:1:1 (call 1)", "b:2:2 (call 1)", "a:1:1 (call 2)"]);
    }
}
