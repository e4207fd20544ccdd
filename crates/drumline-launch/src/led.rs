//! A launcher that is led by another one: its stdin carries the job key first, and then signals.
//!
//! ```text
//!   stdin: 64 hex digits ─▶ the job key
//!          SIGTERM       ─▶ Led::Signal, handled as if received      one name in each line
//!          (end)         ─▶ Led::Gone: the leader is gone, everything must end now
//! ```
//! Not here: the leading side (`fleet`), and how the agent reacts.

use std::io::{self, BufRead, BufReader, Read};
use std::thread::JoinHandle;

use drumline_rendezvous::{JobKey, KeyError};

use crate::{Signal, parse_signals};

/// Longer than any line that a leader writes.
const LONGEST_LINE: u64 = 1024;

/// A message of the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Led {
    /// A signal, to be handled as if this process had received it.
    Signal(Signal),
    /// The leader has ended, or closed the connection.
    Gone,
}

/// Why the connection to the leader failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedError {
    /// Stdin cannot be read.
    #[error(
        "cannot read the job key from stdin: {0}; try without --led, which is only for agents that another launcher starts"
    )]
    Read(#[from] io::Error),
    /// The leader ended before it sent the key.
    #[error("stdin ended before the job key: the leading launcher is gone")]
    Gone,
    /// The first line is not a key.
    #[error(
        "the first line of stdin is not a job key: {0}; try without --led, which is only for agents that another launcher starts"
    )]
    Key(#[from] KeyError),
}

/// Receives the signals that follow the key.
pub struct Listener {
    lines: BufReader<Box<dyn Read + Send>>,
}

/// Reads the key that the leader sends first, usually on this process's stdin.
pub fn take(stdin: impl Read + Send + 'static) -> Result<(JobKey, Listener), LedError> {
    let mut lines = BufReader::new(Box::new(stdin) as Box<dyn Read + Send>);
    let key = line(&mut lines)?.ok_or(LedError::Gone)?;
    Ok((JobKey::from_hex(&key)?, Listener { lines }))
}

impl Listener {
    /// Calls `handle` with each message, on a thread of its own, which ends after [`Led::Gone`].
    pub fn listen(mut self, handle: impl FnMut(Led) + Send + 'static) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name("drumline-led".to_string()).spawn(move || self.follow(handle))
    }

    fn follow(&mut self, mut handle: impl FnMut(Led)) {
        // A read error also means that the other end is gone.
        while let Ok(Some(order)) = line(&mut self.lines) {
            match parse_signals(&order) {
                Ok(signals) => signals.into_iter().for_each(|signal| handle(Led::Signal(signal))),
                Err(error) => tracing::warn!(%error, "the leading launcher sent an unknown message"),
            }
        }
        handle(Led::Gone);
    }
}

/// The next line without its newline; `None` at the end. An incomplete line is dropped: its writer died.
fn line(lines: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut bytes)?;
    let whole = bytes.strip_suffix(b"\n");
    Ok(whole.map(|line| String::from_utf8_lossy(line).trim().to_string()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn orders(text: String) -> Vec<Led> {
        let (_, listener) = take(io::Cursor::new(text)).unwrap();
        let (sender, receiver) = mpsc::channel();
        listener.listen(move |led| sender.send(led).unwrap()).unwrap().join().unwrap();
        receiver.try_iter().collect()
    }

    #[test]
    fn the_key_comes_first_then_signals_then_the_end() {
        let key = JobKey::random();
        let text = format!("{}\nSIGTERM\nINT\n", *key.to_hex());
        assert_eq!(take(io::Cursor::new(text.clone())).unwrap().0, key);
        assert_eq!(orders(text), [Led::Signal(Signal::TERM), Led::Signal(Signal::INT), Led::Gone]);
    }

    #[test]
    fn unknown_and_incomplete_lines_are_ignored() {
        let key = JobKey::random();
        assert_eq!(orders(format!("{}\nSIGFOO\n\nSIGKILL\nSIGTE", *key.to_hex())), [Led::Gone]);
        assert_eq!(orders(format!("{}\n{}\n", *key.to_hex(), "x".repeat(5000))), [Led::Gone]);
    }

    #[test]
    fn a_missing_or_wrong_key_is_an_error() {
        let error = |text: &str| take(io::Cursor::new(text.to_string())).err().unwrap().to_string();
        assert!(error("").contains("the leading launcher is gone"));
        assert!(error(&"0".repeat(64)).contains("the leading launcher is gone"), "no end of line");
        assert!(error("hello\n").contains("try without --led"));
    }
}
