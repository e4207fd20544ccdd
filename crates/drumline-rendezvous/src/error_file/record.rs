//! The worker's side: a Rust program writes its error or panic into the error file.
//!
//! The file is written beside its path and then renamed, so that a reader finds all of it or nothing. A later failure
//! replaces an earlier one, as in Python.

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::panic::PanicHookInfo;
use std::path::Path;
use std::sync::Once;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use drumline_files::{Durability, replace};

use super::ErrorFile;
use crate::panic_text::PanicReport;
use crate::worker_env;

/// Longer texts are cut, so that the file stays well below its readers' limit.
const LONGEST_TEXT: usize = 200 << 10;

/// Writes `error` and its causes, each text once, to the launcher's error file. Does nothing without a launcher.
///
/// ```no_run
/// fn train() -> Result<(), std::io::Error> {
///     Err(std::io::Error::other("the data set is gone"))
/// }
///
/// fn main() -> Result<(), std::io::Error> {
///     drumline_rendezvous::error_file::install_panic_file();
///     train().inspect_err(|error| drop(drumline_rendezvous::error_file::record_error(error)))
/// }
/// ```
pub fn record_error(error: &(dyn Error + 'static)) -> io::Result<()> {
    record(&error.to_string(), &with_causes(error))
}

/// The error with each cause on a line. Many errors contain the text of their cause: it is not repeated.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    causes.map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}\n  caused by: {cause}") }
    })
}

/// From now on, each panic is also written to the launcher's error file, with its backtrace if `RUST_BACKTRACE`
/// requests one. The previous hook runs as well. Calling this again changes nothing.
pub fn install_panic_file() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // A panic is printed on stderr in any case; a file that cannot be written must not cause a second one.
            let _ = record_panic(info);
            before(info);
        }));
    });
}

fn record_panic(info: &PanicHookInfo<'_>) -> io::Result<()> {
    let PanicReport { message, place, backtrace } = PanicReport::new(info);
    let thread = thread::current().name().unwrap_or("<unnamed>").to_string();
    record(&message, &format!("thread '{thread}' panicked at {place}:\n{message}{backtrace}"))
}

fn record(message: &str, callstack: &str) -> io::Result<()> {
    let Some(path) = std::env::var_os(worker_env::TORCHELASTIC_ERROR_FILE).filter(|path| !path.is_empty())
    else {
        return Ok(());
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let message = cut(message).to_string();
    let callstack = Some(cut(callstack).to_string());
    write(path, &ErrorFile { message, callstack, timestamp: Some(now) })
}

fn write(path: OsString, error: &ErrorFile) -> io::Result<()> {
    if let Some(folder) = Path::new(&path).parent() {
        std::fs::create_dir_all(folder)?;
    }
    replace(path, error.to_json(), Durability::Process)
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(LONGEST_TEXT)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failure {
        #[error("cannot read the words: {0}")]
        Containing(#[source] io::Error),
        #[error("cannot train")]
        Alone(#[source] Box<Failure>),
    }

    #[test]
    fn each_cause_is_listed_once() {
        let inner = || Failure::Containing(io::Error::other("no disk"));
        assert_eq!(with_causes(&inner()), "cannot read the words: no disk");
        let outer = Failure::Alone(Box::new(inner()));
        assert_eq!(with_causes(&outer), "cannot train\n  caused by: cannot read the words: no disk");
    }
}
