//! Tokens for causal language models: bytes, or GPT-2's byte-level BPE by the `tokenizers` crate of Hugging Face.
//!
//! ```text
//!   bytes   "héllo"  ─▶ 104 195 169 108 108 111            any text; 256 tokens and the end of a text
//!   BPE     "hello a" ─▶ "hello" "Ġa"                      vocab.json and merges.txt, or tokenizer.json
//! ```
//! Both encode every text, and decode it without loss. The ids are those of the file, which trained weights expect;
//! [`Pieces`](crate::Pieces) get their ids from a [`Vocabulary`](crate::Vocabulary) instead.

use crate::TextError;
use crate::beside::write_whole;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Model, Tokenizer};

/// The mark between texts.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The token of [`END_OF_TEXT`] if tokens are bytes.
const END_OF_BYTES: u32 = 256;

const VOCABULARY: &str = "vocab.json";
const MERGES: &str = "merges.txt";
const TOKENIZER: &str = "tokenizer.json";

/// Encodes text as tokens, and decodes tokens to text. Clones share the data.
///
/// ```
/// use drumline_text::{END_OF_TEXT, GptTokenizer};
///
/// let bytes = GptTokenizer::bytes();
/// let tokens = bytes.encode(&format!("né{END_OF_TEXT}b"))?;
/// assert_eq!(tokens, [110, 195, 169, bytes.end_of_text(), 98]);
/// assert_eq!(bytes.decode(&tokens)?, "néb");
/// # Ok::<(), drumline_text::TextError>(())
/// ```
#[derive(Clone)]
pub struct GptTokenizer {
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    Bpe {
        tokenizer: Arc<Tokenizer>,
        end_of_text: u32,
        /// The token that was added for [`END_OF_TEXT`] because the file has none.
        added: Option<u32>,
    },
}

impl GptTokenizer {
    /// One token for each byte, and one for the end of a text.
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes }
    }

    /// Opens a tokenizer: `bytes`, the path of a `tokenizer.json`, or a folder with such a file or with GPT-2's `vocab.json` and
    /// `merges.txt`.
    pub fn open(name: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = name.as_ref();
        if path == Path::new("bytes") {
            return Ok(Self::bytes());
        }
        if !path.is_dir() {
            return Self::read_tokenizer(path);
        }
        let file = path.join(TOKENIZER);
        if file.is_file() { Self::read_tokenizer(&file) } else { Self::read_bpe(path) }
    }

    fn read_bpe(folder: &Path) -> Result<Self, TextError> {
        let files = [VOCABULARY, MERGES].map(|name| folder.join(name));
        if let Some(missing) = files.iter().find(|file| !file.is_file()) {
            let what =
                format!("does not exist; try a folder with {VOCABULARY} and {MERGES}, or with {TOKENIZER}");
            return Err(TextError::BadFile { path: missing.clone(), what });
        }
        let [vocabulary, merges] = files.map(|file| file.to_string_lossy().into_owned());
        let bpe = BPE::from_file(&vocabulary, &merges).build().map_err(|error| bad(folder, &error))?;
        Self::of(byte_level(bpe), folder)
    }

    fn read_tokenizer(path: &Path) -> Result<Self, TextError> {
        let bytes =
            std::fs::read(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| bad(path, &error))?;
        tokenizer.with_padding(None).with_truncation(None).map_err(|error| bad(path, &error))?;
        Self::of(tokenizer, path)
    }

    /// Adds a token for the end of a text if the tokenizer has none.
    fn of(mut tokenizer: Tokenizer, path: &Path) -> Result<Self, TextError> {
        let has_one = tokenizer.token_to_id(END_OF_TEXT).is_some();
        tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
        let end_of_text = tokenizer.token_to_id(END_OF_TEXT);
        let end_of_text = end_of_text.ok_or_else(|| bad(path, &format!("no token {END_OF_TEXT}").into()))?;
        let added = (!has_one).then_some(end_of_text);
        Ok(Self { kind: Kind::Bpe { tokenizer: Arc::new(tokenizer), end_of_text, added } })
    }

    /// Uses another token for the end of a text, such as the one of a model's configuration. If the tokenizer has no
    /// [`END_OF_TEXT`] of its own, that is encoded as this token, too. The byte tokenizer does not change.
    #[must_use]
    pub fn with_end_of_text(mut self, token: u32) -> Self {
        if let Kind::Bpe { end_of_text, .. } = &mut self.kind {
            *end_of_text = token;
        }
        self
    }

    /// Learns a byte-level BPE of `size` tokens from texts, and writes it to a folder in GPT-2's format. It is an error if the folder
    /// already has a tokenizer; nothing is overwritten.
    ///
    /// ```
    /// use drumline_text::GptTokenizer;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let texts = ["a house, a mouse, a house".to_owned(), "the mouse of the house".to_owned()];
    /// let bpe = GptTokenizer::learn(texts, 270, folder.path())?;
    /// let tokens = bpe.encode("a houseboat")?;
    /// assert!(tokens.len() < 11 && bpe.decode(&tokens)? == "a houseboat");
    /// assert_eq!(GptTokenizer::open(folder.path())?.encode("a houseboat")?, tokens);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn learn(
        texts: impl IntoIterator<Item = String, IntoIter: Send>,
        size: usize,
        folder: impl AsRef<Path>,
    ) -> Result<Self, TextError> {
        let folder = folder.as_ref();
        let least = END_OF_BYTES as usize + 1;
        if size < least {
            return Err(TextError::SmallVocabulary { size, least });
        }
        let mut files = [TOKENIZER, VOCABULARY, MERGES].into_iter().map(|name| folder.join(name));
        if let Some(path) = files.find(|path| path.symlink_metadata().is_ok()) {
            let what = "exists already, and was not overwritten; try another folder".to_owned();
            return Err(TextError::BadFile { path, what });
        }
        let trainer = BpeTrainer::builder()
            .vocab_size(size)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut tokenizer = byte_level(BPE::default());
        tokenizer
            .train(&mut TrainerWrapper::from(trainer), texts.into_iter())
            .map_err(TextError::Tokenizer)?;
        let failed = |source| TextError::WriteFile { path: folder.to_owned(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let beside = tempfile::tempdir_in(folder).map_err(failed)?;
        tokenizer.get_model().save(beside.path(), None).map_err(TextError::Tokenizer)?;
        for name in [VOCABULARY, MERGES] {
            write_whole(&folder.join(name), &std::fs::read(beside.path().join(name)).map_err(failed)?)?;
        }
        Self::read_bpe(folder)
    }

    /// The tokens of a text. [`END_OF_TEXT`] in it is one token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        match &self.kind {
            Kind::Bytes => {
                let mut tokens = Vec::with_capacity(text.len());
                for (place, part) in text.split(END_OF_TEXT).enumerate() {
                    tokens.extend((place > 0).then_some(END_OF_BYTES));
                    tokens.extend(part.bytes().map(u32::from));
                }
                Ok(tokens)
            }
            Kind::Bpe { tokenizer, end_of_text, added } => {
                let tokens = tokenizer.encode_fast(text, false).map_err(TextError::Tokenizer)?;
                let replace = |token: &u32| if Some(*token) == *added { *end_of_text } else { *token };
                Ok(tokens.get_ids().iter().map(replace).collect())
            }
        }
    }

    /// The text of some tokens, without the marks for the end of a text. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Bpe { tokenizer, .. } => tokenizer.decode(tokens, true).map_err(TextError::Tokenizer),
        }
    }

    /// The size of the vocabulary: the highest token plus one.
    pub fn vocabulary(&self) -> u32 {
        match &self.kind {
            Kind::Bytes => END_OF_BYTES + 1,
            Kind::Bpe { tokenizer, .. } => {
                let known = tokenizer.get_vocab(true).into_values().filter(|id| Some(*id) != self.replaced());
                known.max().map_or(0, |highest| highest + 1)
            }
        }
    }

    /// The token that ends a text.
    pub fn end_of_text(&self) -> u32 {
        match self.kind {
            Kind::Bytes => END_OF_BYTES,
            Kind::Bpe { end_of_text, .. } => end_of_text,
        }
    }

    /// A checksum of all tokens and their ids, to compare vocabularies. It is 0 for bytes.
    pub fn fingerprint(&self) -> u32 {
        let Kind::Bpe { tokenizer, .. } = &self.kind else { return 0 };
        let mut tokens: Vec<_> =
            tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let mut crc = crc32fast::Hasher::new();
        for (id, token) in tokens {
            crc.update(&id.to_le_bytes());
            crc.update(token.as_bytes());
        }
        crc.finalize()
    }

    /// Writes `tokenizer.json` to a folder, for [`open`](Self::open) to read, and returns its path. Bytes need no file. An
    /// [`END_OF_TEXT`] that was added and then [replaced](Self::with_end_of_text) is not written.
    pub fn save(&self, folder: &Path) -> Result<Option<PathBuf>, TextError> {
        let Kind::Bpe { tokenizer, .. } = &self.kind else { return Ok(None) };
        let mut text = tokenizer.to_string(false).map_err(TextError::Tokenizer)?;
        if let Some(replaced) = self.replaced() {
            let mut json: Value =
                serde_json::from_str(&text).map_err(|error| TextError::Tokenizer(error.into()))?;
            if let Some(added) = json["added_tokens"].as_array_mut() {
                added.retain(|token| token["id"] != replaced);
            }
            text = json.to_string();
        }
        let path = folder.join(TOKENIZER);
        write_whole(&path, text.as_bytes())?;
        Ok(Some(path))
    }

    /// The token that was added for [`END_OF_TEXT`], if texts end with another one now.
    fn replaced(&self) -> Option<u32> {
        let Kind::Bpe { end_of_text, added, .. } = &self.kind else { return None };
        added.filter(|added| added != end_of_text)
    }
}

impl fmt::Debug for GptTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Bytes => f.write_str("GptTokenizer(bytes)"),
            Kind::Bpe { .. } => write!(f, "GptTokenizer({} tokens)", self.vocabulary()),
        }
    }
}

/// A tokenizer that splits like GPT-2: it adds no space before a text, and writes bytes as letters.
fn byte_level(bpe: BPE) -> Tokenizer {
    let level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(level)).with_decoder(Some(level));
    tokenizer
}

fn bad(path: &Path, error: &tokenizers::Error) -> TextError {
    let what =
        format!("is not a tokenizer: {error}; try GPT-2's {VOCABULARY} and {MERGES}, or a {TOKENIZER}");
    TextError::BadFile { path: path.to_owned(), what }
}

/// Decodes tokens one by one, and returns the text in whole characters.
///
/// ```
/// use drumline_text::{GptTokenizer, TextStream};
///
/// let bytes = GptTokenizer::bytes();
/// let mut stream = TextStream::new(&bytes);
/// let shown: Vec<_> = "né".bytes().map(|byte| stream.push(byte.into())).collect::<Result<_, _>>()?;
/// assert_eq!(shown, ["n", "", "é"]);
/// # Ok::<(), drumline_text::TextError>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a GptTokenizer,
    tokens: Vec<u32>,
    /// The bytes of their text that were already returned.
    num_returned: usize,
}

impl<'a> TextStream<'a> {
    /// A stream without tokens.
    pub fn new(tokenizer: &'a GptTokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), num_returned: 0 }
    }

    /// The text that this token adds; empty in the middle of a character.
    pub fn push(&mut self, token: u32) -> Result<String, TextError> {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens)?;
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let new = whole.get(self.num_returned..).unwrap_or_default().to_owned();
        self.num_returned = self.num_returned.max(whole.len());
        if text.ends_with('\n') {
            // Tokens before the end of a line do not change the text after it, so a long text is not decoded again and again.
            self.tokens.clear();
            self.num_returned = 0;
        }
        Ok(new)
    }

    /// The rest of the text: a last character that is incomplete.
    pub fn finish(self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.tokens)?;
        Ok(text.get(self.num_returned..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 3] = [
        "Ada had a red kite. She took the red kite to the lake, and it's there still.\n\n  Then 42 birds came.",
        "The kite was Ada's; naïve café, 东京 🙂.",
        "the lake, the lake, the red lake",
    ];

    fn learnt() -> (tempfile::TempDir, GptTokenizer) {
        let folder = tempfile::tempdir().unwrap();
        let bpe = GptTokenizer::learn(TEXTS.map(str::to_owned), 300, folder.path()).unwrap();
        (folder, bpe)
    }

    #[test]
    fn every_text_is_decoded_without_loss() {
        let (_folder, bpe) = learnt();
        for tokenizer in [GptTokenizer::bytes(), bpe] {
            for text in TEXTS.iter().copied().chain(["", " ", "\n\n\n", "\u{1F3BA}q", "a\r\nb\0"]) {
                let tokens = tokenizer.encode(text).unwrap();
                assert!(tokens.iter().all(|token| *token < tokenizer.vocabulary()), "{text:?}");
                assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
                let mut stream = TextStream::new(&tokenizer);
                let mut shown: String = tokens.iter().map(|token| stream.push(*token).unwrap()).collect();
                shown.push_str(&stream.finish().unwrap());
                assert_eq!(shown, text);
            }
        }
    }

    #[test]
    fn tokens_are_learnt_and_the_end_is_one_token() {
        let (folder, bpe) = learnt();
        assert_eq!(bpe.vocabulary(), 300);
        assert!(bpe.encode("the lake").unwrap().len() <= 3);
        let tokens = bpe.encode(&format!("a{END_OF_TEXT}a")).unwrap();
        assert_eq!((tokens[1], tokens.len()), (bpe.end_of_text(), 3));
        let merges = std::fs::read_to_string(folder.path().join("merges.txt")).unwrap();
        assert!(merges.starts_with("#version") && merges.contains("Ġ"), "{merges}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no other files are left");
    }

    #[test]
    fn a_saved_tokenizer_is_the_same_and_another_has_another_fingerprint() {
        let (_folder, bpe) = learnt();
        let other = tempfile::tempdir().unwrap();
        assert_eq!(GptTokenizer::bytes().save(other.path()).unwrap(), None);
        let path = bpe.save(other.path()).unwrap().unwrap();
        for read in [GptTokenizer::open(&path).unwrap(), GptTokenizer::open(other.path()).unwrap()] {
            assert_eq!(read.fingerprint(), bpe.fingerprint());
            assert_eq!(read.encode(TEXTS[0]).unwrap(), bpe.encode(TEXTS[0]).unwrap());
        }
        let third = tempfile::tempdir().unwrap();
        let larger = GptTokenizer::learn(TEXTS.map(str::to_owned), 310, third.path()).unwrap();
        assert!(larger.fingerprint() != bpe.fingerprint() && GptTokenizer::bytes().fingerprint() == 0);
    }

    #[test]
    fn an_existing_tokenizer_is_not_overwritten() {
        let (folder, bpe) = learnt();
        let learn = |folder: &Path| GptTokenizer::learn(TEXTS.map(str::to_owned), 310, folder);
        let error = learn(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("vocab.json\" exists already, and was not overwritten; try another"),
            "{error}"
        );
        assert_eq!(GptTokenizer::open(folder.path()).unwrap().fingerprint(), bpe.fingerprint());
        for name in [TOKENIZER, VOCABULARY, MERGES] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join(name), "{}").unwrap();
            let error = learn(folder.path()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing was written");
        }
    }

    #[test]
    fn another_end_of_text_replaces_one_that_was_added() {
        let folder = tempfile::tempdir().unwrap();
        let with_end = |end: &str| {
            std::fs::write(folder.path().join(VOCABULARY), format!(r#"{{"a": 0, "b": 1{end}}}"#)).unwrap();
            std::fs::write(folder.path().join(MERGES), "#version: 0.2\n").unwrap();
            GptTokenizer::open(folder.path()).unwrap()
        };
        let text = format!("a{END_OF_TEXT}b");
        let added = with_end("");
        assert_eq!((added.end_of_text(), added.encode(&text).unwrap()), (2, vec![0, 2, 1]));
        let other = added.with_end_of_text(1);
        assert_eq!((other.end_of_text(), other.encode(&text).unwrap()), (1, vec![0, 1, 1]));
        assert_eq!(other.vocabulary(), 2, "without the one that was added");
        let saved = tempfile::tempdir().unwrap();
        other.save(saved.path()).unwrap();
        let read = GptTokenizer::open(saved.path()).unwrap().with_end_of_text(1);
        assert_eq!((read.vocabulary(), read.encode(&text).unwrap()), (2, vec![0, 1, 1]));
        let own = with_end(r#", "<|endoftext|>": 2"#).with_end_of_text(0);
        assert_eq!((own.end_of_text(), own.encode(&text).unwrap()), (0, vec![0, 2, 1]), "its own stays");
        assert_eq!(GptTokenizer::bytes().with_end_of_text(7).end_of_text(), 256);
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = |path: &Path| GptTokenizer::open(path).unwrap_err().to_string();
        assert!(error(folder.path()).contains("vocab.json\" does not exist; try a folder with"));
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        assert!(error(folder.path()).contains("is not a tokenizer"), "{}", error(folder.path()));
        assert!(error(Path::new("/nonexistent")).starts_with("cannot read"));
        let few = GptTokenizer::learn(["a".to_owned()], 100, folder.path()).unwrap_err().to_string();
        assert!(few.contains("try at least 257"), "{few}");
    }
}
