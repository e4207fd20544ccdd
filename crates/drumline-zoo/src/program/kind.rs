//! What a configuration is for, told from the keys at the top of its file.

use std::path::Path;

use crate::config::file::top_keys;
use crate::config::{Config, Entry};
use crate::gpt::GptConfig;
use crate::nmt::NmtConfig;
use crate::text::TextConfig;

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

impl Kind {
    /// Every key with its default.
    pub(super) fn entries(self) -> Vec<Entry> {
        match self {
            Self::Images => Config::default().entries(),
            Self::Translation => NmtConfig::default().entries(),
            Self::Text => TextConfig::default().entries(),
            Self::Gpt => GptConfig::default().entries(),
        }
    }

    /// What a file of this kind may hold.
    pub(super) fn schema(self) -> serde_json::Value {
        match self {
            Self::Images => Config::schema(),
            Self::Translation => NmtConfig::schema(),
            Self::Text => TextConfig::schema(),
            Self::Gpt => GptConfig::schema(),
        }
    }
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
    use clap::ValueEnum;
    use serde_json::Value as Json;
    use std::path::PathBuf;

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

    fn config_folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config")
    }

    fn name(kind: Kind) -> String {
        kind.to_possible_value().unwrap().get_name().to_owned()
    }

    /// An error says where a file does not fit a schema.
    fn fits(schema: &Json, file: &Json) -> Result<(), String> {
        const PLACE: &str = "file:///schema.json";
        let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
        compiler.add_resource(PLACE, schema.clone()).unwrap();
        let schema = compiler.compile(PLACE, &mut schemas).unwrap();
        schemas.validate(file, schema).map_err(|error| error.to_string())
    }

    #[test]
    fn the_schemas_of_the_repository_are_up_to_date() {
        for kind in Kind::value_variants() {
            let path = config_folder().join(format!("schema/{}.json", name(*kind)));
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let is_same = serde_json::from_str::<Json>(&text).is_ok_and(|schema| schema == kind.schema());
            let advice = format!("try drumline keys {} --schema > {}", name(*kind), path.display());
            assert!(is_same, "{advice}");
        }
    }

    #[test]
    fn every_file_of_the_repository_names_its_schema_and_fits_it() {
        for entry in std::fs::read_dir(config_folder()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "yaml") {
                continue;
            }
            let (text, kind) = (std::fs::read_to_string(&path).unwrap(), kind_of(&path));
            let line = format!("# yaml-language-server: $schema=schema/{}.json", name(kind));
            assert_eq!(text.lines().next(), Some(&*line), "{}", path.display());
            let fits = |text: &str| fits(&kind.schema(), &serde_saphyr::from_str(text).unwrap());
            fits(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            // Controls: a key that does not exist, and a value of another type.
            for wrong in ["NO_SUCH_KEY: 1\n", "FP16: {HYSTERESIS: many}\n", "FP16: {NO_SUCH_KEY: 1}\n"] {
                assert!(fits(&format!("{text}\n{wrong}")).is_err(), "{}: {wrong}", path.display());
            }
        }
    }
}
