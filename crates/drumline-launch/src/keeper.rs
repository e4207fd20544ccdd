//! The keeper: a small process between the agent and one round's workers. It makes sure that the workers end.
//!
//! ```text
//!   agent ══socket══ keeper ─▶ workers ─▶ whatever they start
//!     │ start, stop, lease ─▶     │ kills all of them when the agent is gone or its lease is over
//!     ◀─ failed, over             │ (even if the agent is frozen), and then exits
//! ```
//!
//! The keeper is the *subreaper* of everything below it: a process whose parent has ended becomes the keeper's child,
//! even if it has left its worker's process group and session. So no process can be overlooked. If the keeper itself is
//! killed, the kernel kills the workers, and the agent adopts what they had started.
//!
//! If this node hosts the round's store, the keeper runs it, so that store and round begin and end together. Not here:
//! when a round begins and ends (`agent`).

mod fault_injector;
mod handle;
mod process;
mod protocol;
mod sweep;

pub(crate) use handle::{Delivery, Keeper, KeeperExit};
pub use process::keep;
pub(crate) use protocol::{KeeperReport, Secret, Start, StoreSettings};
pub(crate) use sweep::{has_children, reap_all_but, sweep};
