//! Which environment variables are sent to other hosts: DeepSpeed's by their names, ours, and those of the user's file.

use std::ffi::{OsStr, OsString};

use super::order::starts_with;

/// The prefixes that DeepSpeed exports, in general and for CUDA, and those of variables that PyTorch, OpenMP and
/// Drumline read.
const PREFIXES: [&str; 11] =
    ["MLFLOW", "NCCL", "GLOO", "PYTHON", "MV2", "UCX", "LD_LIBRARY", "PATH", "TORCH", "OMP_", "DRUMLINE_"];

/// The prefix of the variables that say where this host keeps the key; they are not exported.
pub(super) const KEY_VARIABLES: &str = "DRUMLINE_JOB_KEY";

/// A line of the file that is not an assignment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is `{text}`; try NAME=VALUE")]
pub struct EnvFileError {
    /// The line number, from 1.
    pub line: usize,
    /// The text of the line.
    pub text: String,
}

/// Whether a variable is exported without being listed in a file.
pub fn is_exported(name: &OsStr) -> bool {
    !starts_with(name, KEY_VARIABLES) && PREFIXES.iter().any(|prefix| starts_with(name, prefix))
}

/// Reads `.deepspeed_env`: one variable in each line, with or without quotes around its value.
pub fn parse_env_file(text: &str) -> Result<Vec<(OsString, OsString)>, EnvFileError> {
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let variable = |(index, line): (usize, &str)| {
        let wrong = || EnvFileError { line: index + 1, text: line.to_string() };
        let (name, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=').ok_or_else(wrong)?;
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = Some(name.trim()).filter(|name| !name.is_empty() && name.chars().all(legal));
        Ok((name.ok_or_else(wrong)?.into(), unquoted(value.trim()).into()))
    };
    lines.map(variable).collect()
}

fn unquoted(value: &str) -> &str {
    let inside = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    inside('"').or_else(|| inside('\'')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_exported_by_their_prefix() {
        for name in ["NCCL_DEBUG", "PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "TORCH_NCCL_TRACE_BUFFER_SIZE"] {
            assert!(is_exported(name.as_ref()), "{name}");
        }
        for name in ["HOME", "CUDA_VISIBLE_DEVICES", "PET_NNODES", "DRUMLINE_JOB_KEY_FILE", "MY_PATH"] {
            assert!(!is_exported(name.as_ref()), "{name}");
        }
    }

    #[test]
    fn a_file_of_variables() {
        let text = "# ours\nA=1\n\n export B = 'two words' \nC=\"x=y\"\nD=\n";
        let expected = [("A", "1"), ("B", "two words"), ("C", "x=y"), ("D", "")];
        let expected = expected.map(|(name, value)| (name.into(), value.into()));
        assert_eq!(parse_env_file(text), Ok(expected.to_vec()));
        for (text, line) in [("A=1\nB", 2), ("=x", 1), ("a b=1", 1)] {
            assert_eq!(parse_env_file(text).unwrap_err().line, line, "{text}");
        }
    }
}
