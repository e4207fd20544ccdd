//! The tokens of a sentence: words, or subwords by byte-pair encoding.

use crate::{Pieces, TextError};

/// A way to split sentences into tokens, and to join them again.
///
/// ```
/// use drumline_text::{Pieces, Tokens};
///
/// assert_eq!(Tokens::Words.split(" a  house ")?, ["a", "house"]);
/// assert_eq!(Tokens::Words.join(&["a", "house"])?, "a house");
/// assert_eq!(Tokens::Pieces(Pieces::split_already()).join(&["ho@@", "use"])?, "house");
/// # Ok::<(), drumline_text::TextError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub enum Tokens {
    /// Words, split at white space (NJUNMT's `word`).
    #[default]
    Words,
    /// Byte-pair encoding (NJUNMT's `bpe`).
    Pieces(Pieces),
}

impl Tokens {
    /// The tokens of a sentence.
    pub fn split(&self, text: &str) -> Result<Vec<String>, TextError> {
        match self {
            Self::Words => Ok(text.split_whitespace().map(str::to_owned).collect()),
            Self::Pieces(pieces) => pieces.split(text),
        }
    }

    /// The number of tokens of a sentence.
    pub fn count(&self, text: &str) -> Result<usize, TextError> {
        match self {
            Self::Words => Ok(text.split_whitespace().count()),
            Self::Pieces(pieces) => Ok(pieces.split(text)?.len()),
        }
    }

    /// Joins tokens to a sentence.
    pub fn join(&self, tokens: &[&str]) -> Result<String, TextError> {
        match self {
            Self::Words => Ok(tokens.join(" ")),
            Self::Pieces(pieces) => pieces.join(tokens),
        }
    }
}
