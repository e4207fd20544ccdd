//! A list of signals by name: `SIGTERM,SIGUSR1`.

use crate::{Signal, signal_name};

/// Handed on to the workers and nothing else, unless the plan has them among those that stop: for the workers these are
/// requests, such as to checkpoint.
pub const PASSED_ON: [Signal; 2] = [Signal::USR1, Signal::USR2];

/// A list that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignalsError {
    /// No signal has this name.
    #[error("`{0}` is no signal; try a list such as SIGTERM,SIGINT,SIGUSR1")]
    Unknown(String),
    /// The kernel hands it to nobody.
    #[error("{0} can be handled by nobody; try SIGTERM")]
    Uncatchable(String),
}

/// Reads a list of names, with or without `SIG`; empty for none.
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
    fn signals_are_known_by_name() {
        let both = Ok(vec![Signal::TERM, Signal::USR1]);
        assert_eq!(parse_signals("SIGTERM,SIGUSR1"), both);
        assert_eq!(parse_signals("TERM, USR1,"), both);
        assert_eq!(parse_signals(""), Ok(vec![]));
        assert_eq!(parse_signals("SIGFOO"), Err(SignalsError::Unknown("SIGFOO".into())));
        assert_eq!(parse_signals("SIGKILL"), Err(SignalsError::Uncatchable("SIGKILL".into())));
    }
}
