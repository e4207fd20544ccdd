//! The keys of a configuration in columns, for people.

use crate::config::Entry;

/// A default that is longer pushes the rest of its own line aside, and not that of all.
const WIDEST: usize = 24;

/// Each in a line: name, default, what it is for and what it takes.
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
    use crate::config::Config;
    use crate::nmt::NmtConfig;
    use crate::text::TextConfig;

    #[test]
    fn columns_begin_at_the_same_place() {
        for entries in
            [Config::default().entries(), TextConfig::default().entries(), NmtConfig::default().entries()]
        {
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
