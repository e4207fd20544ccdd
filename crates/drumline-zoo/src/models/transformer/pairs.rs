//! Batches of sentences and their translations.

use drumline::torch::TorchError;
use drumline::trainer::{Batch, Supervised};
use drumline_text::Vocabulary;
use tch::{Device, Tensor};

/// The ids of special tokens. The defaults are those of [`Vocabulary`] and NJUNMT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Specials {
    /// Padding.
    pub pad: i64,
    /// End of a sentence.
    pub eos: i64,
    /// Begin of a sentence.
    pub bos: i64,
}

impl Default for Specials {
    fn default() -> Self {
        Self { pad: Vocabulary::PAD.into(), eos: Vocabulary::EOS.into(), bos: Vocabulary::BOS.into() }
    }
}

/// A batch of pairs. Its targets are the words of all translations in one row, without padding. A
/// [`Transformer`](super::Transformer) computes the logits of these words only. With
/// [`WordLoss`](crate::words::WordLoss), the loss is label-smoothed and counted by words.
///
/// ```
/// use drumline::trainer::{CrossEntropy, Loss, Mode, Model};
/// use drumline_zoo::models::transformer::{Pairs, Specials, Transformer, TransformerOptions};
/// use drumline_zoo::words::WordLoss;
/// use tch::{Device, Tensor, nn::VarStore};
///
/// let batch = Pairs::new(&[vec![4, 5, 6], vec![7]], &[vec![8, 9], vec![10, 11, 12]], Specials::default());
/// assert_eq!(batch.target_in, Tensor::from_slice2(&[[2i64, 8, 9, 0], [2, 10, 11, 12]]));
/// assert_eq!(batch.words, Tensor::from_slice(&[8i64, 9, 1, 10, 11, 12, 1]));
///
/// let store = VarStore::new(Device::Cpu);
/// let (d_word_vec, d_model, src_vocab, tgt_vocab) = (8, 8, 13, 13);
/// let small = TransformerOptions {
///     n_layers: 1, n_head: 2, d_word_vec, d_model, d_inner_hid: 16, src_vocab, tgt_vocab, ..Default::default()
/// };
/// let model = Transformer::new(&store.root(), &small)?;
/// let loss = WordLoss(CrossEntropy { label_smoothing: 0.1, ..Default::default() });
/// let logits = model.forward_batch(&batch, Mode::Train)?;
/// assert_eq!(logits.whole()?.size(), [7, 13]);
/// (loss.sum(&logits, &batch)? / 7.0).backward();
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
#[derive(Debug)]
pub struct Pairs {
    /// The source sentences, padded.
    pub source: Tensor,
    /// The decoder's input: target sentences with the begin token, padded.
    pub target_in: Tensor,
    /// The targets: the words of all target sentences with the end token, one after the other.
    pub words: Tensor,
    /// For each target word, the index in the flattened `target_in` at which it is predicted.
    pub places: Tensor,
}

impl Pairs {
    /// Pads sentences to the longest, and adds begin and end tokens to the targets. Sources get no extra token.
    pub fn new(sources: &[Vec<i64>], targets: &[Vec<i64>], specials: Specials) -> Self {
        let Specials { pad, eos, bos } = specials;
        let begun: Vec<_> = targets.iter().map(|words| [&[bos], &words[..]].concat()).collect();
        let words: Vec<_> = targets.iter().flat_map(|words| words.iter().copied().chain([eos])).collect();
        let target_in = padded(&begun, pad);
        let width = target_in.size()[1];
        let places = (0..).step_by(width.max(1) as usize).zip(&begun);
        let places: Vec<_> = places.flat_map(|(first, words)| first..first + words.len() as i64).collect();
        Self {
            source: padded(sources, pad),
            target_in,
            words: Tensor::from_slice(&words),
            places: Tensor::from_slice(&places),
        }
    }
}

/// Pads sentences to one tensor `[sentences, longest]`.
///
/// ```
/// use drumline_zoo::models::transformer::padded;
/// use tch::Tensor;
///
/// assert_eq!(padded(&[vec![4], vec![5, 6]], 0), Tensor::from_slice2(&[[4i64, 0], [5, 6]]));
/// ```
pub fn padded(sentences: &[Vec<i64>], pad: i64) -> Tensor {
    let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
    let mut ids = vec![pad; sentences.len() * longest];
    for (place, sentence) in sentences.iter().enumerate() {
        ids[place * longest..][..sentence.len()].copy_from_slice(sentence);
    }
    Tensor::from_slice(&ids).view([sentences.len() as i64, longest as i64])
}

impl Batch for Pairs {
    fn num_samples(&self) -> usize {
        self.source.size()[0] as usize
    }

    fn to_device(self, device: Device) -> Result<Self, TorchError> {
        Ok(Self {
            source: self.source.f_to_device(device)?,
            target_in: self.target_in.f_to_device(device)?,
            words: self.words.f_to_device(device)?,
            places: self.places.f_to_device(device)?,
        })
    }

    fn tensors(&self) -> Option<Vec<&Tensor>> {
        Some(vec![&self.source, &self.target_in, &self.words, &self.places])
    }
}

impl Supervised for Pairs {
    fn input(&self) -> &Tensor {
        &self.source
    }

    fn target(&self) -> &Tensor {
        &self.words
    }
}
