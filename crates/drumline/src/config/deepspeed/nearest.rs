//! Which known key an unknown one probably means.

use super::keys::KEYS;

/// Similarity from which a path counts as a typing mistake of another; 1 is equal.
const SIMILAR: f64 = 0.8;

/// `; try …`: the keys with the same name in another section, or the most similar path. Empty if there is none.
pub(super) fn advice(path: &str) -> String {
    let name = path.rsplit('.').next().unwrap_or(path);
    let same: Vec<_> = KEYS.iter().filter(|key| key.name() == name || section_is(key.path, name)).collect();
    if let [first, ..] = same.as_slice() {
        let path = if first.name() == name { first.path } else { section_path(first.path, name) };
        return format!("; try {path}");
    }
    let score = |known: &str| strsim::normalized_damerau_levenshtein(path, known);
    let best = KEYS.iter().map(|key| (score(key.path), key.path)).max_by(|(a, _), (b, _)| a.total_cmp(b));
    match best.filter(|(score, _)| *score >= SIMILAR) {
        Some((_, known)) => format!("; try {known}"),
        None => String::new(),
    }
}

/// Whether a path has a section of this name below the top.
fn section_is(path: &str, name: &str) -> bool {
    let mut sections = path.split('.').rev().skip(1);
    sections.any(|section| section == name)
}

/// The part of a path up to the section of this name.
fn section_path<'a>(path: &'a str, name: &str) -> &'a str {
    let end = path.find(name).map_or(path.len(), |begin| begin + name.len());
    &path[..end]
}

#[cfg(test)]
mod tests {
    use super::advice;

    #[test]
    fn a_similar_key_or_the_same_key_elsewhere_is_suggested() {
        for (typed, meant) in [
            ("train_batchsize", "; try train_batch_size"),
            ("gradient_clip", ""),
            ("gradient_cliping", "; try gradient_clipping"),
            ("zero_optimization.overlap_com", "; try zero_optimization.overlap_comm"),
            ("overlap_comm", "; try zero_optimization.overlap_comm"),
            ("offload_optimizer", "; try zero_optimization.offload_optimizer"),
            ("optimizer.lr", "; try optimizer.params.lr"),
            ("int8", ""),
            ("num_gpus", ""),
        ] {
            assert_eq!(advice(typed), meant, "{typed}");
        }
    }
}
