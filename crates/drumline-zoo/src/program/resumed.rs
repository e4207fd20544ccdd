//! What a checkpoint says of the run that left it, against what is asked for now.

use drumline::SamplerPosition;
use drumline::checkpoint::Loaded;
use serde_json::Value as Json;

/// A key, or a print of a text, that is not as it was.
pub(super) struct Change<'a> {
    pub(super) key: String,
    pub(super) saved: &'a Json,
    pub(super) now: Json,
}

/// What has changed of `now`; what the checkpoint does not know has not.
pub(super) fn changes<'a>(
    found: &'a Loaded,
    now: impl IntoIterator<Item = (String, Json)>,
) -> impl Iterator<Item = Change<'a>> {
    now.into_iter().filter_map(|(key, now)| {
        let saved = found.state.config.get(&key).filter(|saved| **saved != now)?;
        Some(Change { key, saved, now })
    })
}

/// Whether it stands in the midst of an epoch: it counts the batches that were seen, and what is left of the epoch are others where batches are made
/// otherwise.
pub(super) fn is_within_epoch(found: &Loaded) -> anyhow::Result<bool> {
    let place: SamplerPosition = serde_json::from_value(found.state.sampler.clone())?;
    Ok(place.samples_seen > 0)
}
