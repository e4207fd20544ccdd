//! What a panic says: the message of a caught one, and a report of one that a hook sees.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;

/// The message of a panic that `catch_unwind` or `JoinHandle::join` returned, or `no message`.
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("{} left", 3)).unwrap_err();
/// assert_eq!(drumline_rendezvous::panic_text(&*panic), "3 left");
/// ```
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// What a panic hook can say of a panic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PanicReport {
    /// The message.
    pub message: String,
    /// The file, line and column.
    pub place: String,
    /// A line break and the backtrace if `RUST_BACKTRACE` requests one, otherwise empty.
    pub backtrace: String,
}

impl PanicReport {
    /// The report of the panic that a hook is called for. The backtrace is that of the caller.
    pub fn new(info: &PanicHookInfo<'_>) -> Self {
        let backtrace = Backtrace::capture();
        Self {
            message: panic_text(info.payload()).to_owned(),
            place: info.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string),
            backtrace: match backtrace.status() {
                BacktraceStatus::Captured => format!("\nstack backtrace:\n{backtrace}"),
                _ => String::new(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_formatted_messages_and_none() {
        assert_eq!(panic_text(&"a literal"), "a literal");
        assert_eq!(panic_text(&"formatted".to_owned()), "formatted");
        assert_eq!(panic_text(&7), "no message");
    }
}
