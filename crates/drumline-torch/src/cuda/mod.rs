//! NVIDIA GPUs: the parts of CUDA that tch lacks, in a plugin that is opened only when a GPU is used.
//!
//! ```text
//!   open() ─▶ driver (libcuda.so.1) ─▶ libtorch_cuda.so ─▶ plugin (cuda/*.cpp, part of this binary) ─▶ Stream, Event, Graph, …
//! ```
//!
//! - `driver`: whether there is a GPU, before anything large is opened
//! - `library`: opens all libraries, once, and reports what is missing
//! - `properties`, `memory`: properties and memory use of a GPU
//! - `stream`: streams and events
//! - `window`: memory that processes share
//! - `graph`: CUDA graphs; `graphed_step`: a training step as a CUDA graph
//! - `kernel`: CUDA C++ compiled at run time
//!
//! The same program runs on machines without a GPU, because nothing here is linked.

mod driver;
mod error;
mod graph;
mod graphed_step;
mod kernel;
mod library;
mod memory;
mod out_of_memory;
mod properties;
mod stream;
mod window;

pub use driver::Driver;
pub use error::CudaError;
pub(crate) use error::cause;
pub(crate) use graph::{Follower, Launched, follow_launches};
pub use graph::{Graph, Pool};
pub use graphed_step::GraphedStep;
pub use kernel::{Argument, Grid, Kernel, Kernels, Rounding};
pub(crate) use library::libtorch_folder;
pub use library::{is_open, open};
pub use memory::{Memory, copy_async, empty_cache, keep_until, memory, pinned, pinned_like, reset_peak};
pub(crate) use memory::{Pinned, pin, unpin};
pub use out_of_memory::GpuOutOfMemory;
pub use properties::{Properties, can_access_peer, device_count, set_device, synchronize};
pub(crate) use stream::is_recorded;
pub use stream::{Event, Priority, Stream, StreamScope, Timing};
pub(crate) use window::{Flags, Window, WindowHandle};
