//! Parses a list of signal names: `SIGTERM,SIGUSR1`.

use crate::{Signal, signal_name};

/// The signals that are only forwarded to the workers, unless the plan lists them as stop signals. For the workers they
/// are requests, such as to save a checkpoint.
pub const PASSED_ON: [Signal; 2] = [Signal::USR1, Signal::USR2];

/// Why a list of signals is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignalsError {
    /// No signal has this name.
    #[error("`{0}` is not a signal; try a list such as SIGTERM,SIGINT,SIGUSR1")]
    Unknown(String),
    /// No program can handle it.
    #[error("no program can handle {0}; try SIGTERM")]
    Uncatchable(String),
}

/// Parses a list of names, with or without `SIG`; it may be empty.
pub fn parse_signals(list: &str) -> Result<Vec<Signal>, SignalsError> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(named).collect()
}

fn named(name: &str) -> Result<Signal, SignalsError> {
    let is = |number: &i32| signal_name(*number).trim_start_matches("SIG") == name.trim_start_matches("SIG");
    let signal = (1..=31).find(is).and_then(Signal::from_named_raw);
    match signal.ok_or_else(|| SignalsError::Unknown(name.to_string()))? {
        Signal::KILL | Signal::STOP => Err(SignalsError::Uncatchable(name.to_string())),
        signal => Ok(signal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_parsed_by_name() {
        let both = Ok(vec![Signal::TERM, Signal::USR1]);
        assert_eq!(parse_signals("SIGTERM,SIGUSR1"), both);
        assert_eq!(parse_signals("TERM, USR1,"), both);
        assert_eq!(parse_signals(""), Ok(vec![]));
        assert_eq!(parse_signals("SIGFOO"), Err(SignalsError::Unknown("SIGFOO".into())));
        assert_eq!(parse_signals("SIGKILL"), Err(SignalsError::Uncatchable("SIGKILL".into())));
    }
}
