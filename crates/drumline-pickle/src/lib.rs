//! PyTorch's `.pt` files, read without running anything.
//!
//! ```text
//!   FILE.pt, a zip archive without compression
//!     NAME/data.pkl   a pickle: a program for a stack machine  ─ machine ─▶ Pickle: nodes ─▶ Value
//!     NAME/data/0     the elements of storage 0                ◀─ bytes_of ─ TensorInfo
//! ```
//! Python's reader imports and calls whatever a pickle names. This one calls nothing: it builds plain containers, and
//! knows the few calls from which PyTorch builds tensors. What it does not know becomes an opaque object, which has the
//! name of its class and what it was made from. Nothing is recursive, and no allocation is larger than the file allows.
//!
//! Read in this order: `zip`, `value`, `machine`, `torch`, `file`. Not here: tensors in memory (`drumline::checkpoint`).
#![forbid(unsafe_code)]

mod error;
mod file;
mod machine;
mod opcode;
mod torch;
mod value;
mod zip;

pub use error::{PickleError, TorchFileError, ZipError};
pub use file::TorchFile;
pub use torch::{Dtype, TensorInfo};
pub use value::{Pickle, Value};

// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
