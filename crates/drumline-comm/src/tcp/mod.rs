//! Ranks of different nodes: authenticated links and the collectives over them.
//!
//! `hub` (how links begin, under a `name`) → `fabric` (those of a group) → `drive` (bytes over several at once) →
//! `collectives`; `frame` is the header of data. A `link` is a `pipe`, which survives the end of its connection because a
//! `ring` keeps the last bytes sent, with `record`s above it if its `security` needs them. The `reconnector` reconnects links.

mod collectives;
mod drive;
mod fabric;
mod faults;
pub(crate) mod frame;
mod hub;
mod link;
mod name;
mod outstanding;
mod pipe;
mod reconnector;
mod record;
mod resumption;
mod ring;
mod security;

pub(crate) use collectives::Team;
pub(crate) use drive::UNDER_WAY;
pub(crate) use fabric::{CLOSED, Fabric, GRACE};
pub(crate) use faults::LinkFaults;
pub(crate) use hub::{DialError, Hub, LinkRules};
pub(crate) use link::Link;
#[cfg(fuzzing)]
pub(crate) use name::LinkNote;
pub(crate) use name::{Channel, LinkName};
pub(crate) use reconnector::{Reconnector, SharedLinks};
#[cfg(fuzzing)]
pub(crate) use record::opens_any;
pub use security::{LinkSecurity, UnknownLinkSecurity};
