//! Beam search in batches, with one model or an ensemble.
//!
//! ```text
//!   source ─▶ encode once ─▶ ┌ Decoder: next token of each row, with cached keys, values ─▶ best tokens of each row ┐
//!                            └ rows reordered, finished sentences dropped ◀─ Beam: which translations continue     ┘
//! ```
//! A *row* is one partial translation; a sentence has `beam_size` rows. The search is NJUNMT's: a finished translation
//! keeps its place in the beam, and a sentence is done when its whole beam is finished. `beam` decides which
//! translations to keep, `decoder` computes; read them in this order.

mod beam;
mod decoder;

use tch::{Kind, Tensor, no_grad};

use crate::error::ZooError;
use crate::models::transformer::{Specials, Transformer};
use beam::Beam;

pub use beam::Hypothesis;
pub use decoder::{Decoder, Kept};

/// The options of a search. The defaults are those of NJUNMT's `translate`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamOptions {
    /// Number of partial translations per sentence.
    pub beam_size: usize,
    /// Exponent of the length penalty ((5 + length) / 6)^alpha, by which scores are divided during the search and at
    /// the end. If it is 0 or less, the search compares plain log probabilities, and the final scores are divided by
    /// the length.
    pub alpha: f64,
    /// Number of translations returned per sentence.
    pub keep_n: usize,
    /// The largest number of tokens in a translation.
    pub max_steps: usize,
    /// Number of sentences per batch.
    pub batch: usize,
    /// The ids of the begin, end and padding tokens.
    pub specials: Specials,
}

impl Default for BeamOptions {
    fn default() -> Self {
        Self { beam_size: 5, alpha: -1.0, keep_n: 1, max_steps: 150, batch: 5, specials: Specials::default() }
    }
}

impl BeamOptions {
    fn check(&self, models: &[&Transformer], source: &Tensor) -> Result<(), ZooError> {
        let refused = |what: String, fix: &str| Err(ZooError::Unsuitable { what, fix: fix.to_owned() });
        let numbers = [("beam_size", self.beam_size), ("keep_n", self.keep_n), ("batch", self.batch)];
        if let Some((name, _)) = numbers.into_iter().find(|(_, number)| *number == 0) {
            return refused(format!("{name} is 0"), "1 or more");
        }
        if self.keep_n > self.beam_size {
            let what = format!("keep_n is {}, but the beam {}", self.keep_n, self.beam_size);
            return refused(what, "a greater beam_size");
        }
        let vocabs: Vec<_> = models.iter().map(|model| model.options().tgt_vocab).collect();
        if vocabs.is_empty() {
            return refused("there is no model to translate with".into(), "one or more");
        }
        if vocabs.iter().any(|vocab| *vocab != vocabs[0]) {
            let what = format!("the models have different vocabularies, of {vocabs:?} words");
            return refused(what, "models of one training");
        }
        let Specials { pad, eos, bos } = self.specials;
        if let Some(id) = [pad, eos, bos].into_iter().find(|id| !(0..vocabs[0]).contains(id)) {
            return refused(
                format!("there is no word {id} in a vocabulary of {}", vocabs[0]),
                "other specials",
            );
        }
        if source.dim() != 2 || source.kind() != Kind::Int64 {
            let what = format!("the source is {:?} of {:?}", source.size(), source.kind());
            return refused(what, "i64 ids of sentences × places");
        }
        Ok(())
    }
}

/// Translates `source`, a padded tensor of ids `[sentences, places]`. Returns the `keep_n` best translations of each
/// sentence, the best first. The probabilities of several models are averaged.
///
/// ```
/// use drumline_zoo::decode::{BeamOptions, beam_search};
/// use drumline_zoo::models::transformer::{Transformer, TransformerOptions, padded};
/// use tch::{Device, nn::VarStore};
///
/// let store = VarStore::new(Device::Cpu);
/// let (d_word_vec, d_model, src_vocab, tgt_vocab) = (16, 16, 11, 13);
/// let small = TransformerOptions {
///     n_layers: 2, n_head: 4, d_word_vec, d_model, d_inner_hid: 32, src_vocab, tgt_vocab, ..Default::default()
/// };
/// let model = Transformer::new(&store.root(), &small)?;
/// let source = padded(&[vec![4, 5, 6], vec![7, 8]], 0);
/// let options = BeamOptions { beam_size: 4, keep_n: 2, max_steps: 10, ..Default::default() };
/// let translations = beam_search(&[&model], &source, &options)?;
/// assert_eq!(translations.len(), 2);
/// assert!(translations[0][0].score >= translations[0][1].score);
/// assert!(translations[1][0].tokens.len() <= 10);
/// # Ok::<(), drumline_zoo::ZooError>(())
/// ```
pub fn beam_search(
    models: &[&Transformer],
    source: &Tensor,
    options: &BeamOptions,
) -> Result<Vec<Vec<Hypothesis>>, ZooError> {
    options.check(models, source)?;
    let mut translations = Vec::new();
    for first in (0..source.size()[0]).step_by(options.batch) {
        let count = (options.batch as i64).min(source.size()[0] - first);
        let some = trimmed(&source.narrow(0, first, count), options.specials.pad);
        translations.extend(no_grad(|| search(models, &some, options)));
    }
    Ok(translations)
}

/// Removes the columns that have only padding. At least one column is left.
fn trimmed(source: &Tensor, pad: i64) -> Tensor {
    if source.size()[1] == 0 {
        return source.constant_pad_nd([0, 1, 0, 0]).fill_(pad);
    }
    let used = source.ne(pad).any_dim(0, false).nonzero();
    let width = if used.numel() == 0 { 1 } else { used.max().int64_value(&[]) + 1 };
    source.narrow(1, 0, width)
}

/// A sentence that is not done yet.
struct Open {
    /// Its index in the batch.
    place: usize,
    beam: Beam,
}

fn search(models: &[&Transformer], source: &Tensor, options: &BeamOptions) -> Vec<Vec<Hypothesis>> {
    let mut decoders: Vec<_> =
        models.iter().map(|model| Decoder::new(model, source, options.beam_size)).collect();
    let count = source.size()[0] as usize;
    let mut open: Vec<_> = (0..count).map(|place| Open { place, beam: Beam::new(options) }).collect();
    let mut done: Vec<_> = (0..count).map(|_| Vec::new()).collect();
    for _ in 0..options.max_steps {
        if open.is_empty() {
            break;
        }
        let words: Vec<_> = open.iter().flat_map(|open| open.beam.last_words()).collect();
        let words = Tensor::from_slice(&words).to_device(source.device());
        let logits = decoders.iter_mut().map(|decoder| decoder.next(&words)).collect();
        let best = Best::of(logits, options);
        let kept = advance(&mut open, &best, options.beam_size);
        for Open { place, beam } in open.extract_if(.., |open| open.beam.is_done()) {
            done[place] = beam.best(options.keep_n);
        }
        if !open.is_empty() {
            decoders.iter_mut().for_each(|decoder| decoder.keep(&kept));
        }
    }
    for Open { place, beam } in open {
        done[place] = beam.best(options.keep_n);
    }
    done
}

/// Advances all beams by one token. Returns which rows continue, without those of finished sentences.
fn advance(open: &mut [Open], best: &Best, beam_size: usize) -> Kept {
    let (mut rows, mut sentences) = (Vec::new(), Vec::new());
    for (sentence, open) in open.iter_mut().enumerate() {
        let first = sentence * beam_size;
        let parents = open.beam.advance(|entry| best.of_row(first + entry));
        if !open.beam.is_done() {
            sentences.push(sentence as i64);
            rows.extend(parents.into_iter().map(|parent| (first + parent) as i64));
        }
    }
    Kept { rows, sentences }
}

/// The most probable next tokens of each row, with their log probabilities.
struct Best {
    words: Vec<i64>,
    scores: Vec<f32>,
    per_row: usize,
}

impl Best {
    /// Selects them from the logits of one or several models.
    fn of(mut logits: Vec<Tensor>, options: &BeamOptions) -> Self {
        let per_row = (options.beam_size as i64).min(logits[0].size()[1]);
        for logits in &mut logits {
            let _ = logits.select(1, options.specials.pad).fill_(f64::NEG_INFINITY);
        }
        let (scores, words) = match &logits[..] {
            // The normaliser is the same for all tokens of a row, so it is applied to the best ones only.
            [logits] => {
                let (best, words) = logits.topk(per_row, 1, true, true);
                (best - logits.logsumexp(1, true), words)
            }
            several => {
                let each: Vec<_> = several.iter().map(|logits| logits.log_softmax(1, None)).collect();
                let mean = Tensor::stack(&each, 0).logsumexp(0, false) - (each.len() as f64).ln();
                mean.topk(per_row, 1, true, true)
            }
        };
        let vector = |tensor: &Tensor| tensor.flatten(0, 1).contiguous();
        Self {
            words: Vec::try_from(vector(&words)).expect("topk gives i64 indices"),
            scores: Vec::try_from(vector(&scores).to_kind(Kind::Float)).expect("made f32 just now"),
            per_row: per_row as usize,
        }
    }

    fn of_row(&self, row: usize) -> impl Iterator<Item = (i64, f64)> {
        let range = row * self.per_row..(row + 1) * self.per_row;
        let scores = self.scores[range.clone()].iter().map(|score| f64::from(*score));
        self.words[range].iter().copied().zip(scores)
    }
}

#[cfg(test)]
mod tests;
