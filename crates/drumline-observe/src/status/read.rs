//! Reads the files of all ranks, whatever else is in the folder.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Deserializer};

use super::{RANKS, RankStatus};
use crate::tail::open_plain;

/// A rank's file has a few hundred bytes.
const LONGEST: u64 = 64 << 10;
/// More ranks than a person looks at.
const MOST_RANKS: usize = 4096;

/// The status of all ranks of a run, in rank order. Files that are broken or have other names are skipped.
pub fn read(out_dir: &Path) -> Vec<RankStatus> {
    try_read(out_dir).unwrap_or_default()
}

/// As [`read`]; an error if the folder exists and cannot be read.
pub(crate) fn try_read(out_dir: &Path) -> io::Result<Vec<RankStatus>> {
    let entries = match fs::read_dir(out_dir.join(RANKS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let files = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_a_ranks(path));
    let mut all: Vec<_> = files.take(MOST_RANKS).filter_map(|path| read_file(&path).ok()).collect();
    all.sort_by_key(|status| status.rank);
    Ok(all)
}

fn is_a_ranks(path: &Path) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn read_file(path: &Path) -> io::Result<RankStatus> {
    let mut text = Vec::new();
    open_plain(path)?.take(LONGEST).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Reads null, which is written for what is no number, as 0.
pub(super) fn or_zero<'de, D: Deserializer<'de>>(given: D) -> Result<f64, D::Error> {
    Option::deserialize(given).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks_of(files: &[(&str, String)]) -> Vec<usize> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(RANKS)).unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(RANKS).join(name), text).unwrap();
        }
        read(folder.path()).iter().map(|status| status.rank).collect()
    }

    #[test]
    fn ranks_come_in_order_and_unknown_files_are_skipped() {
        let text = |rank: usize| format!("{{\"rank\":{rank}}}");
        let good = [("00011.json", text(11)), ("00002.json", text(2)), ("00000.json", "{}".to_owned())];
        let padding = " ".repeat(LONGEST as usize);
        let strange = [
            ("00005.json", "{\"rank\":".to_owned()),
            ("00006.json", padding + &text(6)),
            ("x.json", text(7)),
            (".json", text(8)),
            ("00009.json.tmp", text(9)),
        ];
        assert_eq!(ranks_of(&[&good[..], &strange].concat()), [0, 2, 11]);
        assert!(read(Path::new("/no/such/run")).is_empty());
    }

    #[test]
    fn missing_numbers_do_not_hide_a_rank() {
        let read: RankStatus =
            serde_json::from_str(r#"{"rank":3,"op_s":null,"samples_per_s":null,"compute_s":1.5}"#).unwrap();
        assert_eq!(read, RankStatus { rank: 3, compute_s: 1.5, ..RankStatus::default() });
        assert_eq!((read.mesh, read.bubble), (None, None), "as in files of older versions");
    }
}
