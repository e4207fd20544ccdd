//! Lists the keys of a configuration in columns.

use crate::config::Entry;

/// The widest column for defaults. A longer default shifts only its own line.
const WIDEST: usize = 24;

/// One line per key: name, default, description, and the values that it takes.
pub(super) fn listed(entries: &[Entry]) -> String {
    let values: Vec<_> = entries.iter().map(|entry| entry.value.to_string()).collect();
    let key_width = entries.iter().map(|entry| entry.key.len()).max().unwrap_or(0);
    let lengths = values.iter().map(String::len).filter(|length| *length <= WIDEST);
    let value_width = lengths.max().unwrap_or(0);
    let line = |(entry, value): (&Entry, &String)| {
        let Entry { key, about, expects, .. } = entry;
        format!("{key:<key_width$}  {value:<value_width$}  {about} ({expects})\n")
    };
    entries.iter().zip(&values).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Kind;
    use clap::ValueEnum;

    #[test]
    fn columns_are_aligned() {
        for kind in Kind::value_variants() {
            let entries = kind.entries();
            let text = listed(&entries);
            let place = |(line, entry): (&str, &Entry)| {
                let about = line.find(&format!("  {} (", entry.about)).unwrap_or_else(|| panic!("{line}"));
                let value = line[entry.key.len()..].find(|c| c != ' ').unwrap() + entry.key.len();
                (value, (entry.value.to_string().len() <= WIDEST).then_some(about))
            };
            let places: Vec<_> = text.lines().zip(&entries).map(place).collect();
            assert_eq!(places.len(), entries.len());
            let first = places.iter().find(|(_, about)| about.is_some()).unwrap();
            for (value, about) in &places {
                assert_eq!((*value, about.or(first.1)), *first, "{text}");
            }
        }
    }
}
