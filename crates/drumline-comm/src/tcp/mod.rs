//! Ranks of different nodes: authenticated links and the collectives over them.
//!
//! `hub` (how links begin, under a `name`) → `fabric` (those of a group) → `drive` (bytes over several at once) →
//! `collectives`; `frame` is what precedes data. A `link` is a `pipe`, which outlives its connections thanks to a `ring` of
//! what it sent last, with `record`s above it if its `security` asks for them. The `mender` makes broken links again.

mod collectives;
mod drive;
mod fabric;
mod faults;
pub(crate) mod frame;
mod hub;
mod link;
mod mender;
mod name;
mod outstanding;
mod pipe;
mod record;
mod ring;
mod security;

pub(crate) use collectives::Team;
pub(crate) use drive::UNDER_WAY;
pub(crate) use fabric::{CLOSED, Fabric, GRACE};
pub(crate) use faults::LinkFaults;
pub(crate) use hub::{Dialled, Hub, LinkRules};
pub(crate) use link::Link;
pub(crate) use mender::{Mender, SharedLinks};
#[cfg(fuzzing)]
pub(crate) use name::LinkNote;
pub(crate) use name::{Channel, LinkName};
#[cfg(fuzzing)]
pub(crate) use record::opens_any;
pub use security::LinkSecurity;
