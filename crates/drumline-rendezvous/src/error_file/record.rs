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

/// Writes `error` and its causes to the launcher's error file. Does nothing without a launcher.
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
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    let listed = causes.map(|cause| format!("\n  caused by: {cause}")).collect::<String>();
    record(&error.to_string(), &format!("{error}{listed}"))
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
