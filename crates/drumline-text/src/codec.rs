//! Sentences as ids, and ids as sentences.

use crate::{TextError, Tokens, Vocabulary};

/// Tokens and their vocabulary: what one side of a translation needs.
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
    /// Put the two together.
    pub fn new(tokens: Tokens, vocabulary: Vocabulary) -> Self {
        Self { tokens, vocabulary }
    }

    /// How sentences are split.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// Which tokens have ids.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// The ids of a sentence, with nothing put before or behind them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        if let Tokens::Words = self.tokens {
            return Ok(text.split_whitespace().map(|word| self.vocabulary.id(word)).collect());
        }
        Ok(self.tokens.split(text)?.iter().map(|token| self.vocabulary.id(token)).collect())
    }

    /// The sentence of ids, up to the first [`Vocabulary::EOS`], without what begins it or fills it up.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        let ids = ids.iter().take_while(|id| **id != Vocabulary::EOS);
        let ids = ids.filter(|id| ![Vocabulary::PAD, Vocabulary::BOS].contains(id));
        let tokens: Vec<_> = ids.map(|id| self.vocabulary.word(*id)).collect();
        self.tokens.join(&tokens)
    }
}
