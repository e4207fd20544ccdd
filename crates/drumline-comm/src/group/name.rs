//! What errors call a group and its ranks.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::mesh::MeshShape;

/// The name of a group, which also knows the places of its ranks if they are part of a mesh.
#[derive(Clone)]
pub struct GroupName {
    name: Arc<str>,
    /// Of the group, those made from it and the one it was made from.
    places: Arc<OnceLock<Places>>,
}

/// How the ranks of a group were arranged.
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

    /// The ranks are part of a mesh from now on. Those of a second mesh over the same ranks keep the places of the first.
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
