//! The message of a caught panic.

use std::any::Any;

/// The message of a panic that `catch_unwind` or `JoinHandle::join` returned, or `no message`.
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("{} left", 3)).unwrap_err();
/// assert_eq!(drumline_comm::panic_text(&*panic), "3 left");
/// ```
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
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
