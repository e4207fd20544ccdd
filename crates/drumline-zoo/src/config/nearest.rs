//! Which key was likely meant by one that does not exist.

/// A word this like another is taken for a slip of the keyboard; 1 is the same word.
const ALIKE: f64 = 0.8;

/// `; try A or B`, or nothing if no known key is like it.
///
/// A key without its section means all that end so.
pub(super) fn advice(key: &str, known: &[String]) -> String {
    let key = key.to_lowercase();
    let ends_so = |known: &&String| known.to_lowercase().ends_with(&format!(".{key}"));
    let ends: Vec<_> = known.iter().filter(ends_so).cloned().collect();
    let near = || {
        let scored = known
            .iter()
            .map(|known| (strsim::normalized_damerau_levenshtein(&key, &known.to_lowercase()), known));
        let best = scored.max_by(|(a, _), (b, _)| a.total_cmp(b));
        best.filter(|(score, _)| *score >= ALIKE).map(|(_, known)| known.clone())
    };
    let names = if ends.is_empty() { near().into_iter().collect() } else { ends };
    if names.is_empty() { String::new() } else { format!("; try {}", names.join(" or ")) }
}
