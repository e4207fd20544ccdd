//! Suggests known keys that are similar to an unknown one.

/// Similarity from which a key counts as a typing mistake of another; 1 is equal.
const SIMILAR: f64 = 0.8;

/// `; try A or B`, or nothing if no known key is similar.
///
/// A key without its section matches all keys that end with it.
pub(super) fn advice(key: &str, known: &[String]) -> String {
    let key = key.to_lowercase();
    let ends_so = |known: &&String| known.to_lowercase().ends_with(&format!(".{key}"));
    let ends: Vec<_> = known.iter().filter(ends_so).cloned().collect();
    let near = || {
        let scored = known
            .iter()
            .map(|known| (strsim::normalized_damerau_levenshtein(&key, &known.to_lowercase()), known));
        let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.filter(|(score, _)| *score >= SIMILAR).map(|(_, known)| known.clone())
    };
    let names = if ends.is_empty() { near().into_iter().collect() } else { ends };
    if names.is_empty() { String::new() } else { format!("; try {}", names.join(" or ")) }
}
