//! What the ranks report to the process that spawned them: that they have reached the call, and how they failed.
//!
//! ```text
//!   rank ─append a JSON line─▶ memory without a name, inherited by all ─read after their end─▶ Findings
//! ```
//!
//! The kernel appends each line atomically, and frees the memory with its last holder: no file is left.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use drumline_launch::Evidence;
use drumline_rendezvous::error_file::ErrorFile;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::SpawnError;

/// Longer texts are cut off.
const LONGEST: usize = 100 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    Reached { rank: usize },
    Failed { rank: usize, message: String, details: String },
}

/// The parent's end.
#[derive(Debug)]
pub(super) struct Notes(Arc<OwnedFd>);

impl Notes {
    pub(super) fn new() -> Result<Self, SpawnError> {
        let memory = memfd_create("drumline-spawn", MemfdFlags::CLOEXEC);
        Ok(Self(Arc::new(memory.map_err(|error| SpawnError::Setup(error.into()))?)))
    }

    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }

    pub(super) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn read(&self) -> Result<Findings, SpawnError> {
        let mut bytes = Vec::new();
        let mut read = || -> io::Result<usize> {
            let mut file = File::from(self.0.try_clone()?);
            file.rewind()?;
            file.read_to_end(&mut bytes)
        };
        read().map_err(SpawnError::Setup)?;
        // An invalid line is one that a rank could not finish.
        let lines = bytes.split(|byte| *byte == b'\n');
        Ok(Findings(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()))
    }
}

/// A rank's end.
#[derive(Debug)]
pub(super) struct NotePad(File);

impl NotePad {
    /// Opens the inherited descriptor `number` for appending.
    pub(super) fn open(number: RawFd) -> io::Result<Self> {
        Ok(Self(OpenOptions::new().append(true).open(format!("/proc/self/fd/{number}"))?))
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    pub(super) fn reached(&self, rank: usize) -> io::Result<()> {
        self.write(&Note::Reached { rank })
    }

    /// Reports a failure, if that is possible. The exit code reports it in any case.
    pub(super) fn failed(&self, rank: usize, message: &str, details: &str) {
        let (message, details) = (cut(message), cut(details));
        let _ = self.write(&Note::Failed { rank, message, details });
    }

    fn write(&self, note: &Note) -> io::Result<()> {
        let mut line = serde_json::to_vec(note)?;
        line.push(b'\n');
        (&self.0).write_all(&line)
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(LONGEST)].to_owned()
}

/// The notes of all ranks.
#[derive(Debug)]
pub(super) struct Findings(Vec<Note>);

impl Findings {
    pub(super) fn has_reached(&self, rank: usize) -> bool {
        self.0.contains(&Note::Reached { rank })
    }

    /// Adds the last failure of a rank to the evidence, where the report looks for it.
    pub(super) fn add_to(&self, mut evidence: Evidence) -> Evidence {
        evidence.error_file = self.0.iter().rev().find_map(|note| match note {
            Note::Failed { rank, message, details } if *rank == evidence.rank => {
                let (message, callstack) = (message.clone(), Some(details.clone()));
                Some(ErrorFile { message, callstack, timestamp: None })
            }
            _ => None,
        });
        evidence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_of_all_ranks_are_read_and_half_a_line_is_ignored() {
        let notes = Notes::new().unwrap();
        std::thread::scope(|scope| {
            for rank in 0..8 {
                let pad = NotePad::open(notes.number()).unwrap();
                scope.spawn(move || {
                    pad.reached(rank).unwrap();
                    pad.failed(rank, &format!("first of {rank}"), "");
                    pad.failed(rank, &format!("last of {rank}"), &"long ".repeat(10_000));
                });
            }
        });
        (&NotePad::open(notes.number()).unwrap().0).write_all(b"{\"Reached\":{\"ra").unwrap();
        let findings = notes.read().unwrap();
        assert_eq!(findings.0.len(), 24);
        assert!((0..8).all(|rank| findings.has_reached(rank)) && !findings.has_reached(8));
        let message = findings.add_to(Evidence::at(3, 3, "host")).error_file.unwrap();
        assert_eq!(message.message, "last of 3");
    }
}
