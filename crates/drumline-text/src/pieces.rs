//! Subwords, called pieces here (byte-pair encoding, BPE), by the `tokenizers` crate of Hugging Face.
//!
//! That crate was chosen because people have its files (`tokenizer.json`), because it is well maintained, and because its BPE
//! also does what subword-nmt does, whose codes NJUNMT's users have. It is built without a C library and without network.
//!
//! ```text
//!   tokenizer.json   "lower house" ─▶ "Ġlow" "er" "Ġhouse"   as the file says; its own decoder joins them
//!   subword-nmt      "lower house" ─▶ "low@@" "er" "house"   codes: which two pieces are merged, the most frequent first
//!   already split    "low@@ er house" ─▶ the same            at white space; joined like subword-nmt's
//! ```

use crate::lines::for_each_line;
use crate::{TextError, Vocabulary};
use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use tokenizers::models::bpe::BPE;
use tokenizers::{Decoder, Model, Tokenizer};

/// The end of a piece that is not the last of its word.
const CONTINUED: &str = "@@";

/// The end of a word in the codes.
const END_OF_WORD: &str = "</w>";

/// Stands for characters that are in no code. It is a space, so it cannot be equal to a word.
const UNKNOWN: &str = " ";

/// A way to split words into pieces. Clones share the data.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("codes");
/// std::fs::write(&path, "#version: 0.2\nl o\nlo w\ne r</w>\n")?;
/// let pieces = drumline_text::Pieces::read_codes(&path)?;
/// assert_eq!(pieces.split("lower now")?, ["low@@", "er", "n@@", "o@@", "w"]);
/// assert_eq!(pieces.join(&["low@@", "er", "n@@", "o@@", "w"])?, "lower now");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Pieces {
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    SplitAlready,
    Codes(Arc<BPE>),
    File(Arc<Tokenizer>),
}

impl Pieces {
    /// For text whose pieces are already separated by spaces, as subword-nmt writes them.
    pub fn split_already() -> Self {
        Self { kind: Kind::SplitAlready }
    }

    /// Reads the codes of `subword-nmt learn-bpe`.
    pub fn read_codes(path: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = path.as_ref();
        let merges = read_merges(path)?;
        let pieces = merges.iter().flat_map(|(a, b)| [a.clone(), b.clone(), format!("{a}{b}")]);
        let pieces = [UNKNOWN.to_owned()].into_iter().chain(pieces);
        let ids = pieces.enumerate().map(|(id, piece)| (piece, id as u32)).collect();
        let bpe = BPE::builder()
            .vocab_and_merges::<tokenizers::models::bpe::Vocab>(ids, merges)
            .unk_token(UNKNOWN.to_owned())
            .end_of_word_suffix(END_OF_WORD.to_owned())
            .build();
        let bpe = bpe.map_err(|error| TextError::BadFile {
            path: path.to_owned(),
            what: format!("cannot be used as codes: {error}"),
        })?;
        Ok(Self { kind: Kind::Codes(Arc::new(bpe)) })
    }

    /// Reads a `tokenizer.json`. Its settings for padding and truncation are ignored, since batches and corpora do both.
    pub fn read_tokenizer(path: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        let bad = |error| TextError::BadFile {
            path: path.to_owned(),
            what: format!("is not a tokenizer: {error}; try a tokenizer.json as Tokenizer.save() writes it"),
        };
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(bad)?;
        tokenizer.with_padding(None).with_truncation(None).map_err(bad)?;
        Ok(Self { kind: Kind::File(Arc::new(tokenizer)) })
    }

    /// The pieces of a `tokenizer.json`, in its order; `None` for the other kinds, which have no list.
    pub fn vocabulary(&self) -> Option<Vocabulary> {
        let Kind::File(tokenizer) = &self.kind else { return None };
        let mut pieces: Vec<_> =
            tokenizer.get_vocab(true).into_iter().map(|(piece, id)| (id, piece)).collect();
        pieces.sort_unstable();
        Some(Vocabulary::of(pieces.into_iter().map(|(_, piece)| (piece, 0))))
    }

    /// The pieces of a text.
    pub fn split(&self, text: &str) -> Result<Vec<String>, TextError> {
        match &self.kind {
            Kind::SplitAlready => Ok(text.split_whitespace().map(str::to_owned).collect()),
            Kind::Codes(bpe) => split_by_codes(bpe, text),
            Kind::File(tokenizer) => {
                let encoding = tokenizer.encode(text, false).map_err(TextError::Tokenizer)?;
                Ok(encoding.get_tokens().to_vec())
            }
        }
    }

    /// Joins pieces to a text.
    pub fn join(&self, pieces: &[&str]) -> Result<String, TextError> {
        let Kind::File(tokenizer) = &self.kind else { return Ok(join_continued(pieces)) };
        let Some(decoder) = tokenizer.get_decoder() else { return Ok(pieces.join(" ")) };
        let pieces = pieces.iter().map(|piece| (*piece).to_owned()).collect();
        decoder.decode(pieces).map_err(TextError::Tokenizer)
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::SplitAlready => "Pieces(already split)",
            Kind::Codes(_) => "Pieces(codes)",
            Kind::File(_) => "Pieces(tokenizer.json)",
        })
    }
}

/// The pairs of pieces that are merged, in the order of merging.
fn read_merges(path: &Path) -> Result<Vec<(String, String)>, TextError> {
    let mut merges = Vec::new();
    let mut seen = HashSet::new();
    for_each_line(path, |line, text| {
        let bad = |what: &str| Err(TextError::BadLine { path: path.to_owned(), line, what: what.to_owned() });
        if line == 1 {
            return match text.strip_prefix("#version:").map(str::trim) {
                Some("0.2") => Ok(()),
                _ => bad("is not `#version: 0.2`; try codes learnt by subword-nmt 0.2 or later"),
            };
        }
        let [left, right] = text.split_whitespace().collect::<Vec<_>>()[..] else {
            return bad("does not have two pieces; try learning the codes again");
        };
        let pair = (left.to_owned(), right.to_owned());
        if seen.insert(pair.clone()) {
            merges.push(pair);
        }
        Ok(())
    })?;
    Ok(merges)
}

fn split_by_codes(bpe: &BPE, text: &str) -> Result<Vec<String>, TextError> {
    let mut pieces = Vec::new();
    for word in text.split_whitespace() {
        for token in bpe.tokenize(word).map_err(TextError::Tokenizer)? {
            let (start, end) = token.offsets;
            let piece = &word[start..end];
            pieces.push(if end < word.len() { format!("{piece}{CONTINUED}") } else { piece.to_owned() });
        }
    }
    Ok(pieces)
}

fn join_continued(pieces: &[&str]) -> String {
    let mut text = String::new();
    for (place, piece) in pieces.iter().enumerate() {
        match piece.strip_suffix(CONTINUED) {
            Some(start) => text.push_str(start),
            None if place + 1 == pieces.len() => text.push_str(piece),
            None => {
                text.push_str(piece);
                text.push(' ');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    fn written(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codes.bpe");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[derive(Deserialize)]
    struct Golden {
        codes: String,
        cases: Vec<(String, String)>,
    }

    #[test]
    fn codes_split_as_subword_nmt_does() {
        let golden: Golden =
            serde_json::from_str(include_str!("../../../bench/oracle/golden/bpe_codes.json")).unwrap();
        let (_folder, path) = written(&golden.codes);
        let pieces = Pieces::read_codes(path).unwrap();
        assert!(golden.cases.len() >= 300);
        for (text, expected) in golden.cases {
            let split = pieces.split(&text).unwrap();
            assert_eq!(split.join(" "), expected);
            let split: Vec<_> = split.iter().map(String::as_str).collect();
            let words: Vec<_> = text.split_whitespace().collect();
            assert_eq!(pieces.join(&split).unwrap(), words.join(" "));
        }
    }

    #[test]
    fn joining_removes_only_the_marks() {
        for (pieces, expected) in [
            (&["lo@@", "w@@", "er", "house"][..], "lower house"),
            (&["cut@@"], "cut"),
            (&["a@b", "@@", "c"], "a@b c"),
            (&[], ""),
        ] {
            assert_eq!(Pieces::split_already().join(pieces).unwrap(), expected);
        }
    }

    #[test]
    fn a_tokenizer_file_splits_and_joins() {
        let json = r#"{"version":"1.0","truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0},
            "padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},
            "post_processor":null,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},
            "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,
            "byte_fallback":false,"vocab":{"▁":0,"l":1,"o":2,"w":3,"lo":4,"▁lo":5},"merges":[["l","o"],["▁","lo"]]}}"#;
        let (_folder, path) = written(json);
        let pieces = Pieces::read_tokenizer(&path).unwrap();
        let split = pieces.split("low ow").unwrap();
        assert_eq!(split, ["▁lo", "w", "▁", "o", "w"], "not truncated to two");
        assert_eq!(pieces.join(&["▁lo", "w", "▁", "o", "w"]).unwrap(), "low ow");
        assert_eq!(pieces.vocabulary().unwrap().id("▁lo"), 9);
        assert!(Pieces::split_already().vocabulary().is_none());
    }

    #[test]
    fn errors_name_the_file_and_line() {
        for (text, expected) in [
            ("l o\n", "line 1 of"),
            ("#version: 0.2\na b\nonly\n", "line 3 of"),
            ("#version: 0.3\n", "`#version: 0.2`"),
        ] {
            let (_folder, path) = written(text);
            let error = Pieces::read_codes(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("codes.bpe"), "{error}");
            assert!(Pieces::read_tokenizer(&path).unwrap_err().to_string().contains("is not a tokenizer"));
        }
        assert!(Pieces::read_codes("/nonexistent").unwrap_err().to_string().starts_with("cannot read"));
    }
}
