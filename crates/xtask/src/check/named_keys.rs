//! Pages and examples on them that name keys of a configuration: each must be in a schema of `config/schema/`.
//!
//! In: the pages and the schemas. A key is `SECTION.KEY` in capitals, or `….configs.key` of a translation. Out: the keys that no schema has.

use super::pages::Page;
use anyhow::Context;
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// Names that look like keys, with the reason why pages have them.
const NO_KEYS: &[(&str, &str)] = &[("OPTIM.BASELR", "a mistake, to show the error")];

/// All keys of all schemas, such as `OPTIM.BASE_LR`.
pub(crate) fn known(root: &Path) -> anyhow::Result<HashSet<String>> {
    let mut keys = HashSet::new();
    let folder = root.join("config/schema");
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let schema: Value =
            serde_json::from_str(&text).with_context(|| format!("{}: not JSON", path.display()))?;
        for (section, schema) in schema["properties"].as_object().into_iter().flatten() {
            let keys_of_section = schema["properties"].as_object().into_iter().flatten();
            keys.extend(keys_of_section.map(|(key, _)| format!("{section}.{key}")));
        }
    }
    Ok(keys)
}

/// The keys on pages that no schema has.
pub(crate) fn problems(pages: &[Page], known: &HashSet<String>) -> Vec<String> {
    let named = pages.iter().flat_map(|page| keys(&page.text).map(move |key| (page, key)));
    let is_known = |key: &str| known.contains(key) || NO_KEYS.iter().any(|(name, _)| *name == key);
    let unknown = named.filter(|(_, key)| !is_known(key));
    unknown.map(|(page, key)| format!("{} names the key {key}, which no schema has", page.path)).collect()
}

fn keys(text: &str) -> impl Iterator<Item = &str> {
    let names = text.split(|c: char| !c.is_ascii_alphanumeric() && !"._".contains(c));
    names.map(|name| name.trim_matches('.')).filter(|name| {
        name.split_once('.').is_some_and(|(section, key)| {
            is_capital(section) && is_capital(key) || section.ends_with("_configs") && is_lower(key)
        })
    })
}

fn is_capital(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase())
        && name.len() > 1
        && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

fn is_lower(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_no_schema_has_are_named() {
        let known = HashSet::from(["OPTIM.BASE_LR".to_owned(), "run_configs.reload".to_owned()]);
        let text = "`OPTIM.BASE_LR 0.1`, OPTIM.LR. `run_configs.reload`, `run_configs.load`; README.md, X.Y, A.B.C, 2.11";
        let page = Page { path: "p.md".to_owned(), text: text.to_owned() };
        let expected = [
            "p.md names the key OPTIM.LR, which no schema has",
            "p.md names the key run_configs.load, which no schema has",
        ];
        assert_eq!(problems(&[page], &known), expected);
    }
}
