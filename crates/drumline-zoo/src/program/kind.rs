//! What a configuration is for, told from the keys at the top of its file.

use std::path::Path;

use crate::config::file::top_keys;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Kind {
    /// A network on images, by Distribuuuu's keys.
    Images,
    /// A Transformer that translates, by NJUNMT's keys.
    Translation,
    /// A net that classifies or tags text.
    Text,
    /// A GPT, which continues text.
    Gpt,
}

/// Sections that only one kind has.
const SECTIONS: [(&str, Kind); 6] = [
    ("data_configs", Kind::Translation),
    ("model_configs", Kind::Translation),
    ("optimizer_configs", Kind::Translation),
    ("training_configs", Kind::Translation),
    ("TEXT", Kind::Text),
    ("GPT", Kind::Gpt),
];

/// The kind of a file. One that cannot be read, or has no section that tells, is of images: whoever loads it as such says what is wrong.
pub(super) fn kind_of(file: &Path) -> Kind {
    let keys = top_keys(file).unwrap_or_default();
    let told = SECTIONS.iter().find(|(section, _)| keys.iter().any(|key| key == section));
    told.map_or(Kind::Images, |(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::gpt::GptConfig;
    use crate::nmt::NmtConfig;
    use crate::text::TextConfig;

    #[test]
    fn the_keys_at_the_top_tell_the_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.yaml");
        for (text, kind) in [
            ("MODEL: {ARCH: resnet18}\nOUT_DIR: x\n", Kind::Images),
            ("", Kind::Images),
            ("OUT_DIR: [\n", Kind::Images),
            ("- TEXT\n", Kind::Images),
            ("MODEL: {TEXT: 1}\n", Kind::Images),
            ("OUT_DIR: x\nTEXT:\n  TASK: tag\n", Kind::Text),
            ("GPT: {TRAIN: a.tokens}\n", Kind::Gpt),
            ("model_configs: {n_layers: 2}\n", Kind::Translation),
            ("training_configs:\ndata_configs:\n", Kind::Translation),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(kind_of(&path), kind, "{text}");
        }
        assert_eq!(kind_of(Path::new("/nonexistent.yaml")), Kind::Images);
        std::fs::write(&path, TextConfig::default().to_yaml()).unwrap();
        assert_eq!(kind_of(&path), Kind::Text, "what a run has saved");
    }

    #[test]
    fn the_files_of_the_repository_are_right() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
        let mut kinds = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "yaml") {
                continue;
            }
            let kind = kind_of(&path);
            let loaded = match kind {
                Kind::Images => Config::load::<&str>(Some(&path), &[]).map(drop),
                Kind::Translation => NmtConfig::load::<&str>(Some(&path), &[]).map(drop),
                Kind::Text => TextConfig::load::<&str>(Some(&path), &[]).map(drop),
                Kind::Gpt => GptConfig::load::<&str>(Some(&path), &[]).map(drop),
            };
            loaded.unwrap_or_else(|error| panic!("{error}"));
            kinds.push(kind);
        }
        let count = |kind| kinds.iter().filter(|found| **found == kind).count();
        assert!(count(Kind::Images) >= 3 && count(Kind::Text) >= 2 && count(Kind::Gpt) >= 2, "{kinds:?}");
    }
}
