//! Files that are written whole or not at all.
//!
//! ```text
//!   bytes ─▶ .NAME.PID.N.part, in the same folder ─▶ (sync) ─▶ rename to NAME ─▶ (sync the folder)
//! ```
//! A reader sees the old file or the new one, never a part. In: a path and bytes. Out: the file, or an error and what was
//! there before. Not here: folders that take their place as one (checkpoints), and files in a folder that is held open
//! because it may be somebody else's (keys).
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("status.json");
//! use drumline_files::Durability;
//!
//! drumline_files::replace(&path, "{}\n", Durability::Process)?;
//! assert_eq!(std::fs::read_to_string(&path)?, "{}\n");
//! # Ok::<(), std::io::Error>(())
//! ```

#![forbid(unsafe_code)]

mod replacement;

pub use replacement::{Durability, Replacement, replace};

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
