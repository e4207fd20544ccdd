//! Batches of texts with masked words.

use drumline::data::{Dataset, Sample, SampleError, SampleRng};
use drumline_text::Vocabulary;
use tch::Tensor;

use super::masking::{Chosen, Masking};
use crate::models::bert::{MaskedBatch, PAD};
use crate::models::transformer::padded;
use crate::text::TextData;

/// What the masks of a text are drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masks {
    /// The run's seed, the epoch and the text. Masks differ between epochs, and are the same on any rank and in a
    /// resumed run.
    OfEpoch,
    /// The text's index in the file. Masks are the same in all evaluations of all runs.
    Fixed,
}

/// A dataset of texts `<BOS> words <EOS>`, or `<BOS> words <EOS> words <EOS>` for two fields, with masks.
#[derive(Debug, Clone)]
pub struct MaskedData {
    texts: TextData,
    masking: Masking,
    masks: Masks,
}

impl MaskedData {
    /// The number of tokens that are added to the words of a text.
    pub(super) const ADDED: usize = 2;

    /// Creates the dataset. Texts without a known word are left out, because they have nothing to predict.
    pub fn new(texts: TextData, masking: Masking, masks: Masks) -> Self {
        Self { texts: texts.keeping(Masking::is_word), masking, masks }
    }

    /// The texts that are used.
    pub(super) fn texts(&self) -> &TextData {
        &self.texts
    }

    fn rng(&self, sample: &Sample) -> SampleRng {
        match self.masks {
            Masks::OfEpoch => sample.rng(),
            Masks::Fixed => Sample::new(0, 0, sample.index).rng(),
        }
    }
}

impl Dataset for MaskedData {
    type Batch = MaskedBatch;

    fn len(&self) -> usize {
        self.texts.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<MaskedBatch, SampleError> {
        let (bos, eos) = (i64::from(Vocabulary::BOS), i64::from(Vocabulary::EOS));
        let begun = |sample: &Sample| [&[bos], self.texts.ids(sample.index), &[eos]].concat();
        let mut tokens: Vec<_> = samples.iter().map(begun).collect();
        let types: Vec<_> = tokens.iter().map(|tokens| types(tokens, eos)).collect();
        let width = tokens.iter().map(Vec::len).max().unwrap_or(0);
        let (mut places, mut words) = (Vec::new(), Vec::new());
        for (row, (tokens, sample)) in tokens.iter_mut().zip(samples).enumerate() {
            for Chosen { place, word } in self.masking.apply(tokens, &mut self.rng(sample)) {
                places.push((row * width + place) as i64);
                words.push(word);
            }
        }
        let [places, words] = [places, words].map(|row| Tensor::from_slice(&row));
        Ok(MaskedBatch { tokens: padded(&tokens, PAD), types: padded(&types, 0), places, words })
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(self.texts.fingerprint())
    }

    fn name(&self, index: usize) -> String {
        self.texts.name(index)
    }
}

/// The token types: 0 up to the end of the first text, then 1.
fn types(tokens: &[i64], eos: i64) -> Vec<i64> {
    let first = tokens.iter().position(|token| *token == eos).unwrap_or(tokens.len());
    (0..tokens.len()).map(|place| i64::from(place > first)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::config::Text;
    use crate::text::{Lexicon, TextTask, Texts};

    fn data(masks: Masks) -> MaskedData {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tsv");
        let long = vec!["word"; 40].join(" ");
        std::fs::write(&path, format!("a\tb\nred fox\tblue\nrare rare\trare\n{long}\t{long}\n")).unwrap();
        let keys = Text { fields: vec!["a".into(), "b".into()], ..Text::default() };
        let texts = Texts::unlabelled(&path, &keys).unwrap();
        let mut lexicon = Lexicon::of(&texts, &keys);
        lexicon.words = Vocabulary::of(["red", "fox", "blue", "word"].map(|word| (word.to_owned(), 1)));
        let masking = Masking { probability: 0.15, mask: lexicon.words.len() as i64 };
        MaskedData::new(
            TextData::new(&texts, &lexicon, TextTask::Classify, Some(70)).unwrap(),
            masking,
            masks,
        )
    }

    fn batch(data: &MaskedData, epoch: u64, indices: &[usize]) -> MaskedBatch {
        data.batch(&indices.iter().map(|index| Sample::new(3, epoch, *index)).collect::<Vec<_>>()).unwrap()
    }

    fn flat(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.flatten(0, -1)).unwrap()
    }

    #[test]
    fn texts_have_special_tokens_and_the_second_field_has_type_1() {
        let data = data(Masks::OfEpoch);
        assert_eq!(data.len(), 2, "a text without a known word is left out");
        assert!(data.name(1).starts_with("line 4 of"));
        let MaskedBatch { tokens, types, places, words } = batch(&data, 0, &[0]);
        assert_eq!(flat(&types), [0, 0, 0, 0, 1, 1]);
        let mut whole = flat(&tokens);
        for (place, word) in flat(&places).into_iter().zip(flat(&words)) {
            whole[place as usize] = word;
        }
        assert_eq!(whole, [2, 4, 5, 1, 6, 1]);
        let MaskedBatch { tokens, types, places, .. } = batch(&data, 0, &[1, 0]);
        assert_eq!((tokens.size(), types.size()), (vec![2, 72], vec![2, 72]), "cut at max_len");
        assert_eq!(flat(&tokens)[78..], [0; 66], "padding is not masked");
        assert!(
            flat(&places).iter().all(|place| *place < 78) && flat(&places).iter().any(|place| *place > 71)
        );
    }

    #[test]
    fn masks_depend_on_seed_epoch_and_text_and_fixed_masks_on_the_text_only() {
        let (moving, fixed) = (data(Masks::OfEpoch), data(Masks::Fixed));
        let places = |data, epoch, indices: &[usize]| flat(&batch(data, epoch, indices).places);
        assert_eq!(places(&moving, 5, &[1]), places(&moving, 5, &[1]));
        assert_ne!(places(&moving, 5, &[1]), places(&moving, 6, &[1]));
        assert_eq!(places(&fixed, 5, &[1]), places(&fixed, 6, &[1]));
        // The other texts of the batch make no difference.
        let [alone, beside] = [&[1][..], &[1, 0]].map(|indices| batch(&moving, 5, indices));
        assert_eq!(flat(&alone.tokens), flat(&beside.tokens)[..72]);
    }
}
