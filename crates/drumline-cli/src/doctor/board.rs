//! Notes that ranks exchange through the job's store. This needs no link between them, so it works where links do not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use drumline_rendezvous::{Member, Store};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The number of notes in one reply of the store.
const AT_ONCE: usize = 64;

/// Notes of all ranks, by name. Each is written once.
pub(super) struct Board {
    store: Arc<dyn Store>,
    prefix: String,
    rank: usize,
    size: usize,
}

impl Board {
    pub(super) fn of(member: &Member) -> Self {
        let prefix = format!("drumline/doctor/{}/{}", member.round, member.incarnation);
        Self { store: member.store.clone(), prefix, rank: member.rank, size: member.world_size }
    }

    #[cfg(test)]
    pub(super) fn new(store: Arc<dyn Store>, rank: usize, size: usize) -> Self {
        Self { store, prefix: "doctor".into(), rank, size }
    }

    pub(super) fn write<T: Serialize>(&self, name: &str, note: &T) -> anyhow::Result<()> {
        let note = serde_json::to_vec(note)?;
        Ok(self.store.set(&self.key(name), &note)?)
    }

    /// Waits for the note `name`.
    pub(super) fn read<T: DeserializeOwned>(&self, name: &str, within: Duration) -> anyhow::Result<T> {
        let note = self.store.get(&self.key(name), Instant::now() + within);
        let note = note.with_context(|| format!("waiting for {name}"))?;
        Ok(serde_json::from_slice(&note)?)
    }

    /// Each rank's note `name`, in the order of ranks. All ranks call it.
    pub(super) fn gather<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        own: &T,
        within: Duration,
    ) -> anyhow::Result<Vec<T>> {
        self.contribute(name, own)?;
        let keys: Vec<String> =
            (0..self.size).map(|rank| self.key(&format!("{name} of rank {rank}"))).collect();
        let (mut all, deadline) = (Vec::new(), Instant::now() + within);
        for some in keys.chunks(AT_ONCE) {
            let some: Vec<&str> = some.iter().map(String::as_str).collect();
            let notes = self.store.multi_get(&some, deadline);
            for note in notes.with_context(|| format!("waiting for each rank's {name}"))? {
                all.push(serde_json::from_slice(&note)?);
            }
        }
        Ok(all)
    }

    /// Writes this rank's note for a `gather` of another.
    pub(super) fn contribute<T: Serialize>(&self, name: &str, own: &T) -> anyhow::Result<()> {
        self.write(&format!("{name} of rank {}", self.rank), own)
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }
}
