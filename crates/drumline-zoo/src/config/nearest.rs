//! Suggests known keys that are similar to an unknown one.

/// Similarity from which a key counts as a typing mistake of another; 1 is equal.
const SIMILAR: f64 = 0.8;

/// More suggestions than this would not help.
const MOST: usize = 4;

/// Words that mean the same in a key.
const SYNONYMS: [(&str, &str); 6] = [
    ("learning_rate", "lr"),
    ("batchsize", "batch_size"),
    ("output", "out"),
    ("steps", "step"),
    ("epochs", "epoch"),
    ("workers", "worker"),
];

/// `; try …`: the keys that were probably meant, or the command that lists all keys.
///
/// A key without its section matches all keys that end with it. Otherwise a typing mistake is looked for, and then keys
/// with the same words, in the same section if there are any: `OPTIM.LR` is like `OPTIM.BASE_LR`.
pub(super) fn advice(key: &str, known: &[String]) -> String {
    let key = key.to_lowercase();
    let candidates = [ending_with(&key, known), mistyped(&key, known), with_words(&key, known)];
    match candidates.into_iter().find(|keys| !keys.is_empty()) {
        Some(keys) => format!("; try {}", keys.join(" or ")),
        None => "; try `drumline keys FILE` with the configuration, which lists all keys".to_owned(),
    }
}

fn ending_with<'a>(key: &str, known: &'a [String]) -> Vec<&'a str> {
    let end = format!(".{key}");
    known.iter().map(String::as_str).filter(|known| known.to_lowercase().ends_with(&end)).collect()
}

fn mistyped<'a>(key: &str, known: &'a [String]) -> Vec<&'a str> {
    let score = |known: &str| strsim::normalized_damerau_levenshtein(key, &known.to_lowercase());
    let best =
        known.iter().map(|known| (score(known), known.as_str())).max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.filter(|(score, _)| *score >= SIMILAR).map(|(_, known)| known).into_iter().collect()
}

/// The keys whose names contain the words of this key's name: those of its section, or else of all sections; and those
/// that end with the words, or else all.
fn with_words<'a>(key: &str, known: &'a [String]) -> Vec<&'a str> {
    let (section, typed) = (section_of(key), words_of(key));
    let contains = |known: &&str| words_of(known).windows(typed.len()).any(|words| words == typed);
    let all: Vec<_> = known.iter().map(String::as_str).filter(contains).collect();
    let own = preferred(all, |known| section.is_some() && section_of(&known.to_lowercase()) == section);
    let mut keys = preferred(own, |known| words_of(known).ends_with(&typed));
    keys.truncate(MOST);
    keys
}

/// Those that fit, or all if none does.
fn preferred(keys: Vec<&str>, fits: impl Fn(&str) -> bool) -> Vec<&str> {
    let some: Vec<_> = keys.iter().copied().filter(|key| fits(key)).collect();
    if some.is_empty() { keys } else { some }
}

fn section_of(key: &str) -> Option<&str> {
    key.rsplit_once('.').map(|(section, _)| section)
}

/// The words of a key's name, without its section.
fn words_of(key: &str) -> Vec<String> {
    let name = key.rsplit('.').next().unwrap_or_default().to_lowercase();
    let name = SYNONYMS.iter().fold(name, |name, (typed, ours)| name.replace(typed, ours));
    name.split('_').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::advice;

    #[test]
    fn an_unknown_key_gets_the_keys_that_were_probably_meant() {
        let known =
            ["TRAIN.BATCH_SIZE", "TEST.BATCH_SIZE", "TRAIN.WORKERS", "OPTIM.MAX_EPOCH", "OPTIM.BASE_LR"];
        let known = [&known[..], &["OPTIM.MIN_LR", "OPTIM.LR_POLICY", "OUT_DIR", "RNG_SEED"]].concat();
        let known: Vec<_> = known.into_iter().map(str::to_owned).collect();
        for (typed, meant) in [
            ("OPTIM.BASELR", "OPTIM.BASE_LR"),
            ("optim.base_lr", "OPTIM.BASE_LR"),
            ("BASE_LR", "OPTIM.BASE_LR"),
            ("OPTIM.LR", "OPTIM.BASE_LR or OPTIM.MIN_LR"),
            ("LR", "OPTIM.BASE_LR or OPTIM.MIN_LR"),
            ("TRAIN.LEARNING_RATE", "OPTIM.BASE_LR or OPTIM.MIN_LR"),
            ("OPTIM.EPOCHS", "OPTIM.MAX_EPOCH"),
            ("BATCH", "TRAIN.BATCH_SIZE or TEST.BATCH_SIZE"),
            ("TRAIN.BATCH", "TRAIN.BATCH_SIZE"),
            ("SEED", "RNG_SEED"),
            ("OUTPUT_DIR", "OUT_DIR"),
            ("FOO.BAR", "`drumline keys FILE` with the configuration, which lists all keys"),
        ] {
            assert_eq!(advice(typed, &known), format!("; try {meant}"), "{typed}");
        }
    }
}
