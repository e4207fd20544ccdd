//! Where a configuration comes from: a file, or the base64 of a file's text, as on DeepSpeed's command line.

use std::path::Path;

use base64::Engine;
use base64::alphabet::URL_SAFE;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};

use super::error::DeepSpeedError;
use crate::config::json::{JsonError, JsonProblem, MAX_BYTES, Position};

/// What a configuration is called that has no file.
const BASE64: &str = "the base64 configuration";

/// A text and its name for messages.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) name: String,
    pub(super) text: String,
}

/// The text of a file.
pub(super) fn file(path: &Path) -> Result<Source, DeepSpeedError> {
    let file = path.display().to_string();
    let read = || {
        let bytes = std::fs::metadata(path)?.len();
        Ok(if bytes > MAX_BYTES as u64 { None } else { Some(std::fs::read_to_string(path)?) })
    };
    match read() {
        Ok(Some(text)) => Ok(Source { name: file, text }),
        Ok(None) => Err(too_long(file, MAX_BYTES + 1)),
        Err(source) => Err(DeepSpeedError::Read { file, source }),
    }
}

/// A file, or what a base64 text stands for if there is no such file.
pub(super) fn argument(given: &str) -> Result<Source, DeepSpeedError> {
    let path = Path::new(given);
    if path.exists() {
        return file(path);
    }
    match decoded(given) {
        Some(text) => Ok(Source { name: BASE64.to_owned(), text }),
        None => file(path),
    }
}

/// The text of a map in base64, with either alphabet, padded or not.
fn decoded(given: &str) -> Option<String> {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let engine = GeneralPurpose::new(&URL_SAFE, config);
    let bytes = engine.decode(given.trim().replace('+', "-").replace('/', "_")).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    text.contains('{').then_some(text)
}

fn too_long(file: String, bytes: usize) -> DeepSpeedError {
    let at = Position { line: 1, column: 1 };
    DeepSpeedError::Json { file, source: JsonError { at, problem: JsonProblem::TooLong { bytes } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_or_the_base64_of_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ds.json");
        std::fs::write(&path, "{\"a\": 1}").unwrap();
        assert_eq!(argument(path.to_str().unwrap()).unwrap().text, "{\"a\": 1}");
        for base64 in ["eyJhIjogMX0=", "eyJhIjogMX0", " eyJhIjogMX0=\n"] {
            let source = argument(base64).unwrap();
            assert_eq!((source.text.as_str(), source.name.as_str()), ("{\"a\": 1}", BASE64));
        }
        assert_eq!(argument("eyJhIjogIj8_In0=").unwrap().text, "{\"a\": \"??\"}");
        assert_eq!(argument("eyJhIjogIj8/In0=").unwrap().text, "{\"a\": \"??\"}");
    }

    #[test]
    fn a_file_that_is_not_there_is_an_error_with_its_name() {
        for given in ["nosuch.json", "nosuch", ""] {
            let error = argument(given).unwrap_err().to_string();
            assert!(error.starts_with(&format!("cannot read {given}: ")), "{error}");
            assert!(error.ends_with("; try the path of a ds_config.json"), "{error}");
        }
    }
}
