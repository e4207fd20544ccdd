//! How errors name a group and its ranks.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::mesh::MeshShape;

/// The name of a group. It also knows the places of its ranks in a mesh, if there is one.
#[derive(Clone)]
pub struct GroupName {
    name: Arc<str>,
    /// Shared with the group that this one was made from, and with those made from this one.
    places: Arc<OnceLock<Places>>,
}

/// How the ranks of a group are arranged.
struct Places {
    /// The ranks, counted in the whole job.
    members: Vec<usize>,
    shape: MeshShape,
}

impl GroupName {
    /// The name of a group that is made from this one.
    pub(crate) fn child(&self, name: String) -> Self {
        Self { name: name.into(), places: self.places.clone() }
    }

    /// Arranges the ranks in a mesh. If there was a mesh over the same ranks before, its places stay.
    pub(crate) fn arrange(&self, members: &[usize], shape: MeshShape) {
        let _ = self.places.set(Places { members: members.to_vec(), shape });
    }

    /// A rank, counted in the whole job, as errors name it: `rank 3`, or `rank 3 (dp 1, tp 1)` in a mesh.
    pub fn rank(&self, rank: usize) -> String {
        let place = self.places.get().and_then(|Places { members, shape }| {
            let place = shape.place(members.iter().position(|member| *member == rank)?);
            (!place.is_empty()).then_some(place)
        });
        place.map_or_else(|| format!("rank {rank}"), |place| format!("rank {rank} ({place})"))
    }
}

impl From<String> for GroupName {
    fn from(name: String) -> Self {
        Self { name: name.into(), places: Arc::default() }
    }
}

impl From<&str> for GroupName {
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

impl Deref for GroupName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.name)
    }
}

impl PartialEq<&str> for GroupName {
    fn eq(&self, other: &&str) -> bool {
        *self.name == **other
    }
}
