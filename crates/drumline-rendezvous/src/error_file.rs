//! torchrun's error file: a failing worker writes its error there for its launcher, as JSON.
//!
//! ```text
//!   worker: record_error, panic hook, or Python's @record ─▶ $TORCHELASTIC_ERROR_FILE ─▶ launcher: ErrorFile::read
//! ```
//!
//! Two forms are read. The one that is also written is
//! `{"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": "…"}}}`. The older one is
//! `{"message": "…", "timestamp": …}`. The file comes from a process that has just failed, so nothing in it is trusted:
//! it may be missing, huge, incomplete or not a file at all.

mod record;

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use serde_json::{Value, json};

pub use record::{install_panic_file, record_error};

/// The largest file that is read, in bytes.
pub const LARGEST_ERROR_FILE: u64 = 1 << 20;

/// What a worker wrote about its failure.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ErrorFile {
    /// What went wrong, e.g. `ValueError: no such layer`.
    pub message: String,
    /// The traceback, or for a Rust program its panic or its chain of causes.
    pub callstack: Option<String>,
    /// Seconds since 1970 by the worker's own clock; never compared with another host's.
    pub timestamp: Option<u64>,
}

/// Why an error file could not be used. The failure report shows this in addition to the failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorFileError {
    /// A system call failed.
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    /// It is a folder, a pipe or a device.
    #[error("it is not a plain file")]
    NotAFile,
    /// It is larger than [`LARGEST_ERROR_FILE`].
    #[error("it is larger than {LARGEST_ERROR_FILE} bytes")]
    TooLarge,
    /// It is empty, for example because the worker was killed while writing.
    #[error("it is empty")]
    Empty,
    /// It is not JSON.
    #[error("it is not JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    /// It is JSON, but not in a form that torchrun knows.
    #[error("it has no `message` that is a text or an object with a text `message`")]
    NoMessage,
}

impl ErrorFile {
    /// Reads the file at `path`; `None` if there is none.
    pub fn read(path: &Path) -> Result<Option<Self>, ErrorFileError> {
        // Opening a pipe without a writer would block forever.
        let opened = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        if !file.metadata()?.is_file() {
            return Err(ErrorFileError::NotAFile);
        }
        let mut bytes = Vec::new();
        file.take(LARGEST_ERROR_FILE + 1).read_to_end(&mut bytes)?;
        Self::parse(&bytes).map(Some)
    }

    /// Parses either form.
    ///
    /// ```
    /// use drumline_rendezvous::error_file::ErrorFile;
    /// let read = ErrorFile::parse(br#"{"message": "no such layer", "timestamp": 1700000000}"#)?;
    /// assert_eq!((read.message.as_str(), read.timestamp), ("no such layer", Some(1_700_000_000)));
    /// # Ok::<(), drumline_rendezvous::error_file::ErrorFileError>(())
    /// ```
    pub fn parse(bytes: &[u8]) -> Result<Self, ErrorFileError> {
        if bytes.len() as u64 > LARGEST_ERROR_FILE {
            return Err(ErrorFileError::TooLarge);
        }
        if bytes.trim_ascii().is_empty() {
            return Err(ErrorFileError::Empty);
        }
        let whole: Value = serde_json::from_slice(bytes)?;
        let (message, extra) = match &whole["message"] {
            Value::String(message) => (message, &whole),
            Value::Object(inner) => match inner.get("message") {
                Some(Value::String(message)) => (message, &whole["message"]["extraInfo"]),
                _ => return Err(ErrorFileError::NoMessage),
            },
            _ => return Err(ErrorFileError::NoMessage),
        };
        let callstack = extra["py_callstack"].as_str().filter(|stack| !stack.trim().is_empty());
        let message = message.clone();
        let callstack = callstack.map(str::to_owned);
        Ok(Self { message, callstack, timestamp: seconds(&extra["timestamp"]) })
    }

    /// The text of the file, in torchrun's current form. It always has a timestamp, because torchrun's reader requires
    /// one.
    pub fn to_json(&self) -> String {
        let timestamp = self.timestamp.unwrap_or(0).to_string();
        let callstack = self.callstack.as_deref().unwrap_or_default();
        let extra = json!({"py_callstack": callstack, "timestamp": timestamp});
        json!({"message": {"message": self.message, "extraInfo": extra}}).to_string()
    }
}

/// A number, or the text of one.
fn seconds(value: &Value) -> Option<u64> {
    let text = value.as_str().and_then(|text| text.trim().parse().ok());
    value
        .as_u64()
        .or(text)
        .or_else(|| value.as_f64().filter(|number| *number >= 0.0).map(|number| number as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! golden {
        ($name:literal) => {
            include_bytes!(concat!("../../../bench/oracle/error_files/", $name))
        };
    }

    #[test]
    fn files_of_pythons_record_are_read() {
        let plain = ErrorFile::parse(golden!("record.json")).unwrap();
        assert_eq!(plain.message, "ValueError: no such layer: 'Größe'");
        assert_eq!(plain.timestamp, Some(1_700_000_000));
        let stack = plain.callstack.unwrap();
        assert!(stack.starts_with("Traceback (most recent call last):\n"), "{stack}");
        assert!(stack.ends_with("ValueError: no such layer: 'Größe'\n"), "{stack}");

        let chained = ErrorFile::parse(golden!("record_chained.json")).unwrap();
        assert_eq!(chained.message, "RuntimeError: cannot load the data");
        assert!(chained.callstack.unwrap().contains("direct cause of the following exception"));
    }

    #[test]
    fn the_older_form_is_read() {
        let read = ErrorFile::parse(golden!("plain_message.json")).unwrap();
        let message = "the scheduler took the node away".to_string();
        assert_eq!(read, ErrorFile { message, callstack: None, timestamp: Some(1_700_000_000) });
    }

    #[test]
    fn files_round_trip() {
        let message = "quotes \" and \\, tabs\t, NUL \0, 東京".to_string();
        let written = ErrorFile { message, callstack: Some("at x.rs:3".into()), timestamp: Some(5) };
        assert_eq!(ErrorFile::parse(written.to_json().as_bytes()).unwrap(), written);
        let bare = ErrorFile { message: "m".into(), ..ErrorFile::default() };
        let read = ErrorFile::parse(bare.to_json().as_bytes()).unwrap();
        assert_eq!((read.callstack, read.timestamp), (None, Some(0)));
    }

    #[test]
    fn timestamps_may_be_text_or_invalid() {
        for (timestamp, expected) in [
            ("7", Some(7)),
            ("\"7\"", Some(7)),
            ("7.9", Some(7)),
            ("\"soon\"", None),
            ("-1", None),
            ("null", None),
        ] {
            let text = format!(r#"{{"message": "m", "timestamp": {timestamp}}}"#);
            assert_eq!(ErrorFile::parse(text.as_bytes()).unwrap().timestamp, expected, "{timestamp}");
        }
    }

    #[test]
    fn each_kind_of_invalid_file_is_named() {
        let deep = "[".repeat(100_000);
        let huge = vec![b' '; LARGEST_ERROR_FILE as usize + 1];
        let cases: [(&[u8], &str); 9] = [
            (b"", "empty"),
            (b" \n", "empty"),
            (b"{\"message\": {\"mess", "not JSON"),
            (b"\xff\xfe\x00", "not JSON"),
            (deep.as_bytes(), "not JSON"),
            (&huge, "larger"),
            (b"[1]", "no `message`"),
            (b"{\"message\": 3}", "no `message`"),
            (b"{\"message\": {\"text\": \"x\"}}", "no `message`"),
        ];
        for (bytes, expected) in cases {
            let error = ErrorFile::parse(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} instead of {expected}");
        }
    }

    #[test]
    fn paths_that_are_not_plain_files_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        assert!(ErrorFile::read(&folder.path().join("none.json")).unwrap().is_none());
        assert!(matches!(ErrorFile::read(folder.path()), Err(ErrorFileError::NotAFile)));
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(matches!(ErrorFile::read(&fifo), Err(ErrorFileError::NotAFile)));
        let sparse = folder.path().join("sparse");
        std::fs::File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(ErrorFile::read(&sparse), Err(ErrorFileError::TooLarge)));
    }
}
