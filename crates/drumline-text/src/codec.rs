//! Encodes sentences as ids, and decodes ids to sentences.

use crate::{TextError, Tokens, Vocabulary};

/// A way to split sentences into tokens, with the vocabulary of those tokens. Each side of a translation has one.
///
/// ```
/// use drumline_text::{Codec, Tokens, Vocabulary};
///
/// let vocabulary = Vocabulary::of([("a".to_owned(), 2), ("house".to_owned(), 1)]);
/// let codec = Codec::new(Tokens::Words, vocabulary);
/// assert_eq!(codec.encode("a big house")?, [4, Vocabulary::UNK, 5]);
/// assert_eq!(codec.decode(&[Vocabulary::BOS, 4, 5, Vocabulary::EOS, 5])?, "a house");
/// # Ok::<(), drumline_text::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Codec {
    tokens: Tokens,
    vocabulary: Vocabulary,
}

impl Codec {
    /// Splits sentences by `tokens`, and looks the tokens up in `vocabulary`.
    pub fn new(tokens: Tokens, vocabulary: Vocabulary) -> Self {
        Self { tokens, vocabulary }
    }

    /// How sentences are split.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The ids of tokens.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The ids of a sentence, without [`Vocabulary::BOS`] and [`Vocabulary::EOS`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        if let Tokens::Words = self.tokens {
            return Ok(text.split_whitespace().map(|word| self.vocabulary.id(word)).collect());
        }
        Ok(self.tokens.split(text)?.iter().map(|token| self.vocabulary.id(token)).collect())
    }

    /// The sentence of some ids, up to the first [`Vocabulary::EOS`]. [`Vocabulary::BOS`] and [`Vocabulary::PAD`] are skipped.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        let ids = ids.iter().take_while(|id| **id != Vocabulary::EOS);
        let ids = ids.filter(|id| ![Vocabulary::PAD, Vocabulary::BOS].contains(id));
        let tokens: Vec<_> = ids.map(|id| self.vocabulary.word(*id)).collect();
        self.tokens.join(&tokens)
    }
}
