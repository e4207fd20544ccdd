//! What a host should run, as one line of text. Any byte survives, whatever shell is in between.
//!
//! ```text
//!   leader: Order ─line()─▶ stdin of `drumline on-host` ─read()─▶ Order ─exec()─▶ the agent itself, same process
//! ```
//! Arguments and variables are sent on stdin and not on the starter's command line: a shell in between would interpret
//! them, and a command line has a length limit. The agent then has its arguments on its own command line, like any
//! program.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Both ends must have the same version, so that each understands the other.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// More than any command line that the kernel accepts.
const LONGEST_LINE: usize = 16 << 20;

/// What a host should run, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Order {
    /// The working folder.
    pub dir: PathBuf,
    /// Variables with these prefixes are removed first.
    pub without: Vec<String>,
    /// Variables to set.
    pub env: Vec<(OsString, OsString)>,
    /// The program.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// Why an order cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// Stdin cannot be read.
    #[error("cannot read an order from stdin: {0}")]
    Read(#[from] io::Error),
    /// Stdin holds no order.
    #[error(
        "stdin holds no order; try `drumline run`: `on-host` is only for agents that another launcher starts"
    )]
    NoOrder,
    /// The leader has another version.
    #[error(
        "this host has drumline {VERSION}, the leading launcher is {0}; try the same version on all hosts"
    )]
    Version(String),
    /// The working folder cannot be entered.
    #[error("cannot enter the folder {}: {source}; try a folder that all hosts have", dir.display())]
    Dir {
        /// The folder.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot start `{}`: {source}; try the same path on all hosts", program.display())]
    Program {
        /// The program.
        program: OsString,
        /// The system's error.
        source: io::Error,
    },
}

impl Order {
    /// The order as one line, with its newline.
    pub fn line(&self) -> String {
        let mut line = format!("drumline={VERSION}");
        let mut add = |name: &str, value: &OsStr| {
            line.push(' ');
            line.push_str(name);
            line.push('=');
            escape(value, &mut line);
        };
        add("dir", self.dir.as_os_str());
        self.without.iter().for_each(|prefix| add("without", prefix.as_ref()));
        for (name, value) in &self.env {
            add("env", &[name.as_os_str(), value].join(OsStr::new("=")));
        }
        add("program", &self.program);
        self.args.iter().for_each(|arg| add("arg", arg));
        line.push('\n');
        line
    }

    /// Reads one order and not a byte more: the rest of stdin is for the program.
    pub fn read(mut stdin: impl Read) -> Result<Self, OrderError> {
        let mut line = Vec::new();
        let mut byte = [0];
        while line.len() < LONGEST_LINE && stdin.read(&mut byte)? == 1 && byte != *b"\n" {
            line.push(byte[0]);
        }
        Self::parse(std::str::from_utf8(&line).map_err(|_| OrderError::NoOrder)?)
    }

    fn parse(line: &str) -> Result<Self, OrderError> {
        let mut words = line.split(' ').map(|word| word.split_once('=').ok_or(OrderError::NoOrder));
        match words.next().ok_or(OrderError::NoOrder)?? {
            ("drumline", VERSION) => {}
            ("drumline", other) => return Err(OrderError::Version(other.to_string())),
            _ => return Err(OrderError::NoOrder),
        }
        let mut order = Self::default();
        for word in words {
            let (name, value) = word?;
            order.set(name, unescape(value).ok_or(OrderError::NoOrder)?)?;
        }
        Ok(order)
    }

    fn set(&mut self, name: &str, value: OsString) -> Result<(), OrderError> {
        match name {
            "dir" => self.dir = value.into(),
            "without" => self.without.push(value.into_string().map_err(|_| OrderError::NoOrder)?),
            "env" => self.env.push(pair(&value).ok_or(OrderError::NoOrder)?),
            "program" => self.program = value,
            "arg" => self.args.push(value),
            _ => return Err(OrderError::NoOrder),
        }
        Ok(())
    }

    /// Replaces this process with the program; returns only on failure.
    pub fn exec(self) -> Result<Infallible, OrderError> {
        let dir = |source| OrderError::Dir { dir: self.dir.clone(), source };
        std::env::set_current_dir(&self.dir).map_err(dir)?;
        let mut command = Command::new(&self.program);
        let unwanted = |name: &OsString| self.without.iter().any(|prefix| starts_with(name, prefix));
        for (name, _) in std::env::vars_os().filter(|(name, _)| unwanted(name)) {
            command.env_remove(name);
        }
        let source = command.args(&self.args).envs(self.env).exec();
        Err(OrderError::Program { program: self.program, source })
    }
}

/// Whether a variable's name begins with `prefix`.
pub(super) fn starts_with(name: &OsStr, prefix: &str) -> bool {
    name.as_bytes().starts_with(prefix.as_bytes())
}

fn pair(text: &OsStr) -> Option<(OsString, OsString)> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
    Some((OsStr::from_bytes(&bytes[..at]).to_owned(), OsStr::from_bytes(&bytes[at + 1..]).to_owned()))
}

fn escape(value: &OsStr, line: &mut String) {
    for &byte in value.as_bytes() {
        match byte {
            b'!'..=b'~' if byte != b'%' => line.push(byte.into()),
            // Writing to a String cannot fail.
            _ => drop(write!(line, "%{byte:02x}")),
        }
    }
}

fn unescape(text: &str) -> Option<OsString> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = after;
    }
    Some(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> Order {
        let every_byte = OsString::from_vec((1..=255).collect());
        Order {
            dir: "/a folder".into(),
            without: vec!["PET_".to_string()],
            env: vec![("A".into(), "x=y\n%z".into()), ("B".into(), every_byte.clone())],
            program: "./a b".into(),
            args: vec!["".into(), "-x".into(), every_byte, " ".into()],
        }
    }

    #[test]
    fn every_byte_survives_and_the_rest_is_not_read() {
        let line = order().line();
        assert!(line.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte)), "{line}");
        let text = format!("{line}the rest");
        let mut stdin = text.as_bytes();
        assert_eq!(Order::read(&mut stdin).unwrap(), order());
        assert_eq!(stdin, b"the rest");
    }

    #[test]
    fn malformed_orders_are_errors() {
        for (line, expected) in [
            ("", "try `drumline run`"),
            ("hello", "try `drumline run`"),
            ("drumline=9.9.9 x=1", "the leading launcher is 9.9.9"),
            (&format!("drumline={VERSION} arg=%4"), "no order"),
            (&format!("drumline={VERSION} arg=%zz"), "no order"),
            (&format!("drumline={VERSION} env=noequals"), "no order"),
            (&format!("drumline={VERSION} other=1"), "no order"),
        ] {
            let error = Order::read(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let order = Order { dir: "/no/such/folder".into(), ..order() };
        let error = order.exec().unwrap_err().to_string();
        assert!(error.contains("/no/such/folder") && error.contains("all hosts have"), "{error}");
    }
}
