//! Parses times that users give in seconds, in flags, variables and settings.

use std::time::Duration;

use drumline_rendezvous::worker_env::LONGEST_DURATION;

/// Why a text is not a valid time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecondsError {
    /// Not a number, or below 0.
    #[error("not a number of seconds; try 0.5")]
    NotSeconds,
    /// Longer than a clock can represent.
    #[error("more than 100 years; try a number of seconds up to {}", LONGEST_DURATION.as_secs())]
    TooLong,
}

/// Parses a number of seconds, at most 100 years.
///
/// ```
/// use drumline_launch::parse_seconds;
///
/// assert_eq!(parse_seconds("2.5"), Ok(std::time::Duration::from_millis(2500)));
/// assert!(parse_seconds("1e19").unwrap_err().to_string().contains("more than 100 years"));
/// ```
pub fn parse_seconds(text: &str) -> Result<Duration, SecondsError> {
    let seconds: f64 = text.trim().parse().map_err(|_| SecondsError::NotSeconds)?;
    if seconds > LONGEST_DURATION.as_secs_f64() {
        return Err(SecondsError::TooLong);
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| SecondsError::NotSeconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_times_are_accepted() {
        for (text, expected) in [
            ("0", Ok(Duration::ZERO)),
            (" 1e3 ", Ok(Duration::from_secs(1000))),
            ("3153600000", Ok(LONGEST_DURATION)),
            ("3153600001", Err(SecondsError::TooLong)),
            ("1e19", Err(SecondsError::TooLong)),
            ("1e400", Err(SecondsError::TooLong)),
            ("inf", Err(SecondsError::TooLong)),
            ("nan", Err(SecondsError::NotSeconds)),
            ("-1", Err(SecondsError::NotSeconds)),
            ("-inf", Err(SecondsError::NotSeconds)),
            ("", Err(SecondsError::NotSeconds)),
            ("5s", Err(SecondsError::NotSeconds)),
        ] {
            assert_eq!(parse_seconds(text), expected, "{text:?}");
        }
    }
}
