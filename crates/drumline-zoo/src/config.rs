//! The configuration of a run: Distribuuuu's keys, read from YAML and from `KEY VALUE` pairs behind it.
//!
//! ```text
//!   defaults (keys.rs) ◀─ file (file.rs) ◀─ KEY VALUE … ─▶ Config ─check.rs─▶ a run ─▶ OUT_DIR/CFG_DEST
//!                 each value is read by the type of its key (setting.rs)            └─ can be read again
//! ```
//!
//! A key that does not exist and a value of the wrong type are errors that say where they stand and what was likely meant.

pub(crate) mod check;
mod error;
pub(crate) mod file;
mod fp16;
mod keys;
mod nearest;
pub(crate) mod section;
pub(crate) mod setting;
pub(crate) mod table;
mod value;

use std::path::{Path, PathBuf};

pub use error::{ConfigError, Place};
pub use fp16::Fp16;
pub use keys::{Config, Cudnn, Data, Model, Optim, Run, Test, Train};
pub use section::Entry;
pub use setting::{DataKind, DeviceKind, LrPolicy, MemoryFormat, PrecisionKind, Switch};
pub use value::Value;

/// A value for a key, and where it was given.
#[derive(Debug)]
struct Given {
    key: String,
    value: Value,
    place: Place,
}

impl Given {
    /// The value as the user wrote it, without quotes that he need not have written.
    fn as_typed(&self) -> String {
        match &self.value {
            Value::Text(text) => text.clone(),
            other => other.to_string(),
        }
    }
}

impl Config {
    /// The defaults, changed by the file, changed by `KEY VALUE` pairs, and checked.
    ///
    /// `TEST.DATASET` that nobody gives is the folder of `TRAIN.DATASET`.
    ///
    /// ```
    /// use drumline_zoo::config::Config;
    ///
    /// let config = Config::load(None, &["OPTIM.BASE_LR", "0.1", "MODEL.ARCH", "resnet50"])?;
    /// assert_eq!((config.optim.base_lr, config.model.arch.as_str()), (0.1, "resnet50"));
    ///
    /// let error = Config::load(None, &["OPTIM.BASELR", "0.1"]).unwrap_err();
    /// assert!(error.to_string().contains("OPTIM.BASE_LR"));
    /// # Ok::<(), drumline_zoo::config::ConfigError>(())
    /// ```
    pub fn load<S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<Self, ConfigError> {
        table::load(file, pairs)
    }

    /// As YAML, in a form that [`load`](Self::load) and Python's yacs read.
    pub fn to_yaml(&self) -> String {
        table::to_yaml(self)
    }

    /// Writes the resolved configuration to `OUT_DIR/CFG_DEST`, all of it or nothing, and says where that is.
    pub fn save(&self) -> Result<PathBuf, ConfigError> {
        self.run.save(&self.to_yaml())
    }

    /// What a file may hold, as a JSON schema.
    pub fn schema() -> serde_json::Value {
        table::schema::<Self>("A network on images: drumline train")
    }

    /// Every key with its value, what it takes and what it is for.
    pub fn entries(&self) -> Vec<Entry> {
        table::entries(self)
    }
}

impl Run {
    /// Writes a configuration to `OUT_DIR/CFG_DEST`, all of it or nothing, and says where that is.
    pub(crate) fn save(&self, yaml: &str) -> Result<PathBuf, ConfigError> {
        let path = self.out_dir.join(&self.cfg_dest);
        let beside = path.with_added_extension(format!("{}.tmp", std::process::id()));
        let written = std::fs::create_dir_all(&self.out_dir)
            .and_then(|()| std::fs::write(&beside, yaml))
            .and_then(|()| std::fs::rename(&beside, &path));
        written.map(|()| path.clone()).map_err(|source| ConfigError::Save { path, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(pairs: &[&str]) -> String {
        Config::load(None, pairs).unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_distribuuuus() {
        let config = Config::default();
        assert_eq!(config.model.arch, "resnet18");
        assert_eq!((config.train.batch_size, config.test.batch_size), (32, 200));
        assert_eq!((config.optim.base_lr, config.optim.weight_decay), (0.2, 5e-5));
        assert_eq!((config.run.out_dir.as_path(), config.run.rng_seed), (Path::new("./exp"), None));
        assert_eq!(Config::load::<&str>(None, &[]).unwrap(), config);
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let text = "OPTIM:\n  BASE_LR: 0.1\n  STEPS: [0, 30, 60]\n  LR_POLICY: steps\nTRAIN: {BATCH_SIZE: 8}\nRNG_SEED: 7\n";
        std::fs::write(&path, text).unwrap();
        let pairs =
            ["TRAIN.BATCH_SIZE", "16", "RNG_SEED", "None", "TRAIN.SHUFFLE", "False", "OPTIM.STEPS", "(0, 5)"];
        let config = Config::load(Some(&path), &pairs).unwrap();
        assert_eq!((config.optim.base_lr, config.train.batch_size, config.run.rng_seed), (0.1, 16, None));
        assert_eq!((config.optim.steps.as_slice(), config.train.shuffle), (&[0, 5][..], false));
        assert_eq!(config.optim.lr_policy, LrPolicy::Steps);
    }

    #[test]
    fn what_is_saved_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a b: #c");
        let pairs = [
            "OUT_DIR",
            out.to_str().unwrap(),
            "OPTIM.WEIGHT_DECAY",
            "1e-4",
            "OPTIM.BASE_LR",
            "1e20",
            "RNG_SEED",
            "3",
            "OPTIM.STEPS",
            "[0,15]",
            "TRAIN.MAX_STEPS",
            "9",
            "MODEL.WEIGHTS",
            "null.safetensors",
            "DATA.KIND",
            "dummy",
            "TRAIN.DATASET",
            "true",
        ];
        let config = Config::load(None, &pairs).unwrap();
        let path = config.save().unwrap();
        assert_eq!(path, out.join("config.yaml"));
        assert_eq!(Config::load::<&str>(Some(&path), &[]).unwrap(), config);
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn mistakes_say_where_they_are_and_what_was_likely_meant() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let at = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load::<&str>(Some(&path), &[]).unwrap_err().to_string()
        };
        let name = path.display();
        for (text, line, words) in [
            ("MODEL:\n  ARCH: resnet18\n  NUM_CLASS: 10\n", 3, "try MODEL.NUM_CLASSES"),
            ("OUT_DIR: x\nTRAIN:\n  BATCH_SIZE: many\n", 3, "expected a whole number, got many"),
            ("TRAIN:\n  BATCH_SIZE: 1.5\n", 2, "expected a whole number, got 1.5"),
            ("TRIAN:\n  BATCH_SIZE: 2\n", 2, "try TRAIN.BATCH_SIZE"),
            ("TRAIN: 7\n", 1, "has keys of its own"),
            ("OUT_DIR:\n  X: 7\n", 2, "has no keys of its own"),
        ] {
            let said = at(text);
            assert!(said.contains(&format!("{name}:{line}: ")) && said.contains(words), "{text}: {said}");
        }
        let bomb: String = (1..12)
            .map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(",")))
            .collect();
        let said = at(&format!("a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n{bomb}"));
        assert!(
            said.contains("try to write values out instead of aliases") && !said.contains("budget"),
            "{said}"
        );
        assert!(at("TRAIN: [\n").contains(&format!("{name}:")), "{}", at("TRAIN: [\n"));
        assert!(at("- 1\n").contains("try `TRAIN:`"), "{}", at("- 1\n"));
        assert!(at("RNG_SEED: 1\nRNG_SEED: 2\n").contains("RNG_SEED"));
        assert_eq!(
            Config::load::<&str>(Some(&path), &["RNG_SEED"]).unwrap_err().to_string().lines().count(),
            1
        );
    }

    #[test]
    fn wrong_pairs_are_refused() {
        assert!(said(&["TRAIN.BATCH_SIZE"]).contains("TRAIN.BATCH_SIZE has no value"));
        assert!(said(&["BATCH_SIZE", "3"]).contains("try TRAIN.BATCH_SIZE or TEST.BATCH_SIZE"));
        assert!(said(&["train.batch_size", "3"]).contains("try TRAIN.BATCH_SIZE"));
        assert!(said(&["TRAIN.SHUFFLE", "perhaps"]).contains("expected true or false"));
        assert!(said(&["OPTIM.LR_POLICY", "cosine"]).contains("expected cos or steps"));
        assert!(said(&["RNG_SEED", "1.5"]).contains("whole number"));
        assert!(said(&["TRAIN.BATCH_SIZE", "None"]).contains("expected a whole number, got None"));
        assert!(!said(&["x", "3"]).contains("try "), "nothing is near");
    }

    #[test]
    fn the_test_set_follows_the_training_set_unless_given() {
        let follows = Config::load(None, &["TRAIN.DATASET", "a"]).unwrap();
        assert_eq!(follows.test.dataset, Path::new("a"));
        let given = Config::load(None, &["TRAIN.DATASET", "a", "TEST.DATASET", "b"]).unwrap();
        assert_eq!(given.test.dataset, Path::new("b"));
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/training.md");
        let guide = std::fs::read_to_string(guide).unwrap();
        let row = |entry: Entry| {
            format!("| `{}` | `{}` | {} | {} |", entry.key, entry.value, entry.expects, entry.about)
        };
        let rows: Vec<_> = Config::default().entries().into_iter().map(row).collect();
        let table = guide.lines().skip_while(|line| !line.starts_with("| key | default |")).skip(2);
        let told: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
        assert_eq!(told, rows, "the table of docs/training.md should be:\n{}", rows.join("\n"));
    }
}
