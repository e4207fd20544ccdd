//! Tags: the names that DeepSpeed gives saves, and the file `latest` with the last one.
//!
//! ```text
//!   DIR/latest        "global_step100", as text
//!   DIR/global_step100/…
//! ```

use std::io;
use std::path::{Component, Path};

use drumline_files::{Durability, replace};

/// The file with the tag of the last save.
pub(crate) const LATEST: &str = "latest";

/// The longest tag that is read.
const LONGEST: usize = 255;

/// A tag that is not the name of a folder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{tag}` is no tag: it is not the name of one folder; try one such as global_step100")]
pub struct NoTag {
    /// The tag.
    pub tag: String,
}

/// The tag, if it is the name of one folder.
pub(crate) fn checked(tag: &str) -> Result<&str, NoTag> {
    let mut parts = Path::new(tag).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    if is_name && tag.len() <= LONGEST && !tag.contains(|c: char| c == '/' || c.is_control()) {
        return Ok(tag);
    }
    Err(NoTag { tag: tag.chars().take(LONGEST).collect() })
}

/// The text of `latest`; `None` if there is none.
pub(crate) fn latest(dir: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(dir.join(LATEST)) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes `latest`, when the files of the tag are safe on disk.
pub(crate) fn set_latest(dir: &Path, tag: &str) -> io::Result<()> {
    replace(dir.join(LATEST), tag, Durability::Disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_the_name_of_one_folder() {
        for tag in ["global_step100", "best model", "..a", "中"] {
            assert_eq!(checked(tag), Ok(tag));
        }
        for tag in ["", ".", "..", "/", "a/b", "/a", "a/", "a\nb", &"a".repeat(256)] {
            assert!(checked(tag).is_err(), "{tag:?}");
        }
    }

    #[test]
    fn latest_is_written_and_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(latest(folder.path()).unwrap(), None);
        set_latest(folder.path(), "global_step7").unwrap();
        assert_eq!(std::fs::read(folder.path().join("latest")).unwrap(), b"global_step7");
        assert_eq!(latest(folder.path()).unwrap().as_deref(), Some("global_step7"));
    }
}
