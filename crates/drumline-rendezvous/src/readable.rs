//! Makes errors readable as the `Err` of `main`, which prints them with `Debug`.

/// Gives an error the same text for programmers (`Debug`) as for users (`Display`).
macro_rules! debug_as_display {
    ($($error:ty),+) => {$(
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}

debug_as_display!(crate::HandshakeError, crate::InitError, crate::KeyError, crate::StoreError);

#[cfg(test)]
mod tests {
    use crate::{HandshakeError, InitError, KeyError, StoreError};
    use std::time::Duration;

    #[test]
    fn main_shows_what_users_should_read() {
        let key = || KeyError::NotHex { digits: 4, bad: 0 };
        let timeout = || StoreError::Timeout { what: "get of \"a\"".into(), after: Duration::from_secs(5) };
        let errors: [(String, String); 4] = [
            (format!("{:?}", HandshakeError::Closed), HandshakeError::Closed.to_string()),
            (format!("{:?}", key()), key().to_string()),
            (format!("{:?}", timeout()), timeout().to_string()),
            (format!("{:?}", InitError::from(timeout())), timeout().to_string()),
        ];
        for (debug, display) in errors {
            assert_eq!(debug, display);
        }
    }
}
