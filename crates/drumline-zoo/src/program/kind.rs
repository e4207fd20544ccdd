//! Detects which task a configuration file is for, from its top-level keys.

use std::error::Error;
use std::path::Path;

use clap::ValueEnum;

use crate::config::file::top_keys;
use crate::config::{Entry, table};
use crate::task::Task;

/// A kind of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Image classification, with Distribuuuu's keys.
    #[value(aliases = ["image", "imagenet", "cifar", "resnet", "resnet18", "resnet50"])]
    Images,
    /// Translation with a Transformer, with NJUNMT's keys.
    #[value(aliases = ["nmt", "translate", "transformer"])]
    Translation,
    /// Text classification or tagging.
    #[value(aliases = ["texts", "classify", "text-classify", "tag", "text-tag"])]
    Text,
    /// A GPT language model.
    #[value(aliases = ["gpt2", "gpt-tiny", "lm"])]
    Gpt,
    /// A BERT, trained by masked language modelling.
    #[value(aliases = ["bert", "bert-small"])]
    Mlm,
}

/// A text that names neither a kind nor a configuration.
#[derive(Debug, thiserror::Error)]
#[error("expected {kinds}, or a configuration file")]
pub(super) struct UnknownKind {
    kinds: String,
}

/// Parses a kind: its name, another name for it, or a configuration of that kind.
pub(super) fn kind_or_file(text: &str) -> Result<Kind, Box<dyn Error + Send + Sync>> {
    if let Ok(kind) = Kind::from_str(text, true) {
        return Ok(kind);
    }
    let file = Path::new(text);
    if text.ends_with(".yaml") || text.ends_with(".yml") || file.is_file() {
        top_keys(file)?;
        return Ok(kind_of(file));
    }
    let names = Kind::value_variants().iter().filter_map(ValueEnum::to_possible_value);
    let names: Vec<_> = names.map(|kind| kind.get_name().to_owned()).collect();
    Err(UnknownKind { kinds: names.join(", ") }.into())
}

/// Evaluates an expression with the task type of a kind.
macro_rules! with_task {
    ($kind:expr, $task:ident => $body:expr) => {
        match $kind {
            $crate::program::Kind::Images => {
                type $task = $crate::images::ImageTask;
                $body
            }
            $crate::program::Kind::Translation => {
                type $task = $crate::nmt::NmtTask;
                $body
            }
            $crate::program::Kind::Text => {
                type $task = $crate::text::LabelTask;
                $body
            }
            $crate::program::Kind::Gpt => {
                type $task = $crate::gpt::GptTask;
                $body
            }
            $crate::program::Kind::Mlm => {
                type $task = $crate::mlm::MlmTask;
                $body
            }
        }
    };
}

pub(crate) use with_task;

impl Kind {
    /// All keys with their defaults.
    pub(super) fn entries(self) -> Vec<Entry> {
        with_task!(self, T => table::entries(&<T as Task>::Config::default()))
    }

    /// The JSON schema of a configuration file of this kind.
    pub(super) fn schema(self) -> serde_json::Value {
        with_task!(self, T => table::schema::<<T as Task>::Config>())
    }
}

/// The sections that identify a kind; the first one that a file contains decides.
const SECTIONS: [(&str, Kind); 7] = [
    ("data_configs", Kind::Translation),
    ("model_configs", Kind::Translation),
    ("optimizer_configs", Kind::Translation),
    ("training_configs", Kind::Translation),
    ("MLM", Kind::Mlm), // These files also have a section TEXT.
    ("TEXT", Kind::Text),
    ("GPT", Kind::Gpt),
];

/// The kind of a file. A file that cannot be read, or that has none of the sections, counts as image classification:
/// loading it then reports the error.
pub(crate) fn kind_of(file: &Path) -> Kind {
    let keys = top_keys(file).unwrap_or_default();
    let found = SECTIONS.iter().find(|(section, _)| keys.iter().any(|key| key == section));
    found.map_or(Kind::Images, |(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::TextConfig;
    use serde_json::Value as Json;
    use std::path::PathBuf;

    #[test]
    fn the_kind_is_detected_from_the_top_level_keys() {
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
            ("TEXT: {TRAIN: a.csv}\nMLM: {PROBABILITY: 0.2}\n", Kind::Mlm),
            ("model_configs: {n_layers: 2}\n", Kind::Translation),
            ("training_configs:\ndata_configs:\n", Kind::Translation),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(kind_of(&path), kind, "{text}");
        }
        assert_eq!(kind_of(Path::new("/nonexistent.yaml")), Kind::Images);
        std::fs::write(&path, TextConfig::default().to_yaml()).unwrap();
        assert_eq!(kind_of(&path), Kind::Text, "a saved configuration");
    }

    #[test]
    fn the_configurations_of_the_repository_load() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
        let mut kinds = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "yaml") {
                continue;
            }
            let kind = kind_of(&path);
            with_task!(kind, T => {
                table::load::<<T as Task>::Config, &str>(Some(&path), &[]).map(drop)
            })
            .unwrap_or_else(|error| panic!("{error}"));
            kinds.push(kind);
        }
        let count = |kind| kinds.iter().filter(|found| **found == kind).count();
        assert!(count(Kind::Images) >= 3 && count(Kind::Text) >= 2 && count(Kind::Gpt) >= 2, "{kinds:?}");
    }

    #[test]
    fn a_kind_has_other_names_and_files() {
        let bert = config_folder().join("bert-small.yaml");
        for (typed, kind) in [
            ("mlm", Kind::Mlm),
            ("bert", Kind::Mlm),
            ("BERT", Kind::Mlm),
            (bert.to_str().unwrap(), Kind::Mlm),
            ("nmt", Kind::Translation),
            ("resnet50", Kind::Images),
        ] {
            assert_eq!(kind_or_file(typed).unwrap(), kind, "{typed}");
        }
        let error = kind_or_file("OPTIM").unwrap_err().to_string();
        assert_eq!(error, "expected images, translation, text, gpt, mlm, or a configuration file");
        let error = kind_or_file("nosuch.yaml").unwrap_err().to_string();
        assert!(error.contains("cannot read the configuration nosuch.yaml"), "{error}");
    }

    fn config_folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config")
    }

    fn name(kind: Kind) -> String {
        kind.to_possible_value().unwrap().get_name().to_owned()
    }

    /// Returns an error that says where a file violates a schema.
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
    fn every_configuration_names_its_schema_and_satisfies_it() {
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
            // Controls: an unknown key, and a value of the wrong type.
            for wrong in ["NO_SUCH_KEY: 1\n", "FP16: {HYSTERESIS: many}\n", "FP16: {NO_SUCH_KEY: 1}\n"] {
                assert!(fits(&format!("{text}\n{wrong}")).is_err(), "{}: {wrong}", path.display());
            }
        }
    }
}
