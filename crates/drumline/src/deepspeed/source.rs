//! The ways in which a program names a configuration.

use std::path::{Path, PathBuf};

use crate::config::deepspeed::{DeepSpeedConfig, DeepSpeedError};

/// A configuration of DeepSpeed: the path of a file, its text (which begins with `{`), base64 as its launcher passes it,
/// or one that was read already.
#[derive(Debug, Clone)]
pub struct ConfigSource(Source);

#[derive(Debug, Clone)]
enum Source {
    /// A path, a text, or base64.
    Argument(String),
    File(PathBuf),
    Config(Box<DeepSpeedConfig>),
}

impl ConfigSource {
    pub(super) fn read(self) -> Result<DeepSpeedConfig, DeepSpeedError> {
        match self.0 {
            Source::Argument(text) if text.trim_start().starts_with('{') => {
                DeepSpeedConfig::parse("the configuration", &text)
            }
            Source::Argument(text) => DeepSpeedConfig::from_argument(&text),
            Source::File(path) => DeepSpeedConfig::read(&path),
            Source::Config(config) => Ok(*config),
        }
    }
}

impl From<&str> for ConfigSource {
    fn from(argument: &str) -> Self {
        Self(Source::Argument(argument.to_owned()))
    }
}

impl From<String> for ConfigSource {
    fn from(argument: String) -> Self {
        Self(Source::Argument(argument))
    }
}

impl From<&Path> for ConfigSource {
    fn from(path: &Path) -> Self {
        Self(Source::File(path.to_owned()))
    }
}

impl From<PathBuf> for ConfigSource {
    fn from(path: PathBuf) -> Self {
        Self(Source::File(path))
    }
}

impl From<DeepSpeedConfig> for ConfigSource {
    fn from(config: DeepSpeedConfig) -> Self {
        Self(Source::Config(Box::new(config)))
    }
}
