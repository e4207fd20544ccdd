//! The keeper: a small process between the agent and one round's workers, which sees to it that they end.
//!
//! ```text
//!   agent ══socket══ keeper ─▶ workers ─▶ whatever they start
//!     │ start, stop, lease ─▶     │ kills all of them when the agent is gone, or its lease is over
//!     ◀─ failed, over             │ (also when the agent is frozen), and goes
//! ```
//!
//! It is the *subreaper* of all that runs below it: a process whose parent ended becomes its child, however far it moved
//! from its worker's group and session, so that none can be overlooked. If the keeper itself is killed, the kernel
//! kills the workers, and what they had started becomes the agent's.
//!
//! It also hosts the round's store where this node does, so that store and round begin and end together.
//! Not here: when a round begins and ends (`agent`).

mod handle;
mod process;
mod protocol;
mod rehearsal;
mod sweep;

pub(crate) use handle::{Keeper, Parting, Told};
pub use process::keep;
pub(crate) use protocol::{News, Secret, Start, StoreOrder};
pub(crate) use sweep::{has_children, reap_all_but, sweep};
