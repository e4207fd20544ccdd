//! Tensors whose memory is in a file of a disk between their uses.
//!
//! ```text
//!   at home      tensor ─▶ pages of the file, mapped: any read or write works, and the kernel moves the pages
//!   while used   tensor ─▶ a buffer of this process, read from the file past the kernel's caches and written back
//! ```
//! Only the address changes: all handles of a tensor see it. A tensor outlives the file's owner, because it keeps the
//! pages that it is in.
//!
//! - `pages`: memory in whole pages; `file`: a file that has its space from the beginning and no name
//! - `relocated`: moves a tensor
//!
//! Not here: what is moved when, which the crate `drumline-parallel` decides.

mod file;
mod pages;
mod relocated;

pub use file::{Rates, SwapError, SwapFile};
pub use pages::{PAGE, Pages, PinError};
pub use relocated::Relocated;
