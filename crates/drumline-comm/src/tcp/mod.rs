//! Ranks of different nodes: authenticated links and the collectives over them.
//!
//! `hub` (how links begin) → `mesh` (those of a group) → `drive` (bytes over several at once) → `collectives`; `frame` is
//! what precedes data.

mod collectives;
mod drive;
pub(crate) mod frame;
mod hub;
mod mesh;

pub(crate) use collectives::Team;
pub(crate) use drive::UNDER_WAY;
pub(crate) use hub::{Channel, Hub, LinkName};
pub(crate) use mesh::{CLOSED, GRACE, Mesh, prepare};
