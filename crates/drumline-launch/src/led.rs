//! A launcher that is led: whoever holds the other end of its stdin gives it the job key and then its orders.
//!
//! ```text
//!   stdin: 64 hex digits ─▶ the job key
//!          SIGTERM       ─▶ Led::Signal, to be taken as if received      one name in each line
//!          (end)         ─▶ Led::Gone: nobody leads any more, everything must end now
//! ```
//! Not here: what leads (`fleet`), and what becomes of the orders (the agent).

use std::io::{self, BufRead, BufReader, Read};
use std::thread::JoinHandle;

use drumline_rendezvous::{JobKey, KeyError};

use crate::{Signal, parse_signals};

/// More than any line that a leader writes.
const LONGEST_LINE: u64 = 1024;

/// What a leader has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Led {
    /// To be taken as if this process had received it.
    Signal(Signal),
    /// The leader has ended, or let go.
    Gone,
}

/// Why there is nobody to follow.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedError {
    /// Nothing can be read.
    #[error(
        "cannot read the job key from stdin: {0}; try without --led, which is for launchers started by another"
    )]
    Read(#[from] io::Error),
    /// The leader ended before it gave the key.
    #[error("stdin ended before the job key: the leading launcher is gone")]
    Gone,
    /// What came first is no key.
    #[error(
        "the first line of stdin is no job key: {0}; try without --led, which is for launchers started by another"
    )]
    Key(#[from] KeyError),
}

/// The orders that come after the key.
pub struct Listener {
    lines: BufReader<Box<dyn Read + Send>>,
}

/// Reads the key from a leader, such as this process's stdin.
pub fn take(stdin: impl Read + Send + 'static) -> Result<(JobKey, Listener), LedError> {
    let mut lines = BufReader::new(Box::new(stdin) as Box<dyn Read + Send>);
    let key = line(&mut lines)?.ok_or(LedError::Gone)?;
    Ok((JobKey::from_hex(&key)?, Listener { lines }))
}

impl Listener {
    /// Calls `tell` with each order, on a thread of its own, which ends after [`Led::Gone`].
    pub fn listen(mut self, tell: impl FnMut(Led) + Send + 'static) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name("drumline-led".to_string()).spawn(move || self.follow(tell))
    }

    fn follow(&mut self, mut tell: impl FnMut(Led)) {
        // A pipe that cannot be read any more has nobody at its other end.
        while let Ok(Some(order)) = line(&mut self.lines) {
            match parse_signals(&order) {
                Ok(signals) => signals.into_iter().for_each(|signal| tell(Led::Signal(signal))),
                Err(error) => tracing::warn!(%error, "the leading launcher said something unknown"),
            }
        }
        tell(Led::Gone);
    }
}

/// The next line without its end; `None` when there is none. A line that was cut off is none either: its writer died.
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
    fn nonsense_and_lines_cut_off_are_no_orders() {
        let key = JobKey::random();
        assert_eq!(orders(format!("{}\nSIGFOO\n\nSIGKILL\nSIGTE", *key.to_hex())), [Led::Gone]);
        assert_eq!(orders(format!("{}\n{}\n", *key.to_hex(), "x".repeat(5000))), [Led::Gone]);
    }

    #[test]
    fn a_missing_or_wrong_key_is_told() {
        let said = |text: &str| take(io::Cursor::new(text.to_string())).err().unwrap().to_string();
        assert!(said("").contains("the leading launcher is gone"));
        assert!(said(&"0".repeat(64)).contains("the leading launcher is gone"), "no end of line");
        assert!(said("hello\n").contains("try without --led"));
    }
}
