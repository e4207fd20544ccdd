//! Batches of word ids, padded to the longest text.

use std::path::PathBuf;
use std::sync::Arc;

use drumline::data::{Dataset, PlannedBatches, PlannedOptions, Sample, SampleError, SamplerError};
use drumline_text::{BatchPlan, TextError, Vocabulary};
use tch::Tensor;

use super::config::TextTask;
use super::lexicon::Lexicon;
use super::texts::{Labelled, Texts};
use crate::models::transformer::padded;
use crate::task::Place;

/// The target of padding: PyTorch's default `ignore_index`, which has no loss.
pub const NO_TAG: i64 = -100;

/// The most labels that an error message lists.
const LISTED: usize = 12;

/// Texts as ids. A batch is a tensor of ids `[texts, places]`, and a tensor of classes `[texts]` or tags `[texts,
/// places]`.
#[derive(Debug, Clone)]
pub struct TextData {
    path: PathBuf,
    task: TextTask,
    samples: Arc<Vec<Encoded>>,
    lengths: Arc<Vec<(u32, u32)>>,
    /// The number of texts in the file that are left out.
    left_out: usize,
}

#[derive(Debug, Clone)]
struct Encoded {
    ids: Vec<i64>,
    labels: Vec<i64>,
    line: u64,
}

impl TextData {
    /// Encodes texts with the ids of a lexicon and cuts them at `max_len` words. Returns an error for a label that the
    /// lexicon does not have.
    pub fn new(
        texts: &Texts,
        lexicon: &Lexicon,
        task: TextTask,
        max_len: Option<usize>,
    ) -> Result<Self, TextError> {
        let longest = max_len.unwrap_or(usize::MAX);
        let encode = |sample: &Labelled| -> Result<Encoded, TextError> {
            let mut labels = labels(texts, sample, lexicon)?;
            let mut ids = ids(sample, &lexicon.words);
            ids.truncate(longest);
            if task == TextTask::Tag {
                labels.truncate(longest);
            }
            Ok(Encoded { ids, labels, line: sample.lines[0] })
        };
        let samples = texts.samples.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        let (path, lengths) = (texts.path.clone(), lengths(&samples));
        Ok(Self { path, task, samples: Arc::new(samples), lengths, left_out: texts.left_out })
    }

    /// A checksum of the texts. Ranks compare it before training, so that all plan the same batches. Checkpoints store
    /// it, so that a resumed run recognises its data.
    pub fn fingerprint(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for numbers in self.samples.iter().flat_map(|sample| [&sample.ids, &sample.labels]) {
            crc.update(&(numbers.len() as u64).to_le_bytes());
            numbers.iter().for_each(|number| crc.update(&number.to_le_bytes()));
        }
        crc.finalize()
    }

    /// Leaves out the texts in which no id satisfies `is_wanted`.
    pub(crate) fn keeping(self, is_wanted: impl Fn(i64) -> bool) -> Self {
        let all = self.samples.len();
        let samples = Arc::unwrap_or_clone(self.samples).into_iter();
        let samples: Vec<_> = samples.filter(|sample| sample.ids.iter().any(|id| is_wanted(*id))).collect();
        let left_out = self.left_out + all - samples.len();
        Self { lengths: lengths(&samples), samples: Arc::new(samples), left_out, ..self }
    }

    /// The word ids of a text.
    pub(crate) fn ids(&self, index: usize) -> &[i64] {
        &self.samples[index].ids
    }

    /// A note for the user about texts that are left out. `which` describes them.
    pub(crate) fn note(&self, which: &str) -> Option<String> {
        let Self { left_out, path, .. } = self;
        (*left_out > 0).then(|| format!("note: {left_out} {which} texts of {path:?} are left out"))
    }

    /// The sampler of one rank's batches under a plan.
    pub(crate) fn sampler(&self, plan: BatchPlan, place: Place) -> Result<PlannedBatches, SamplerError> {
        let Place { rank, num_replicas } = place;
        let options = PlannedOptions { num_samples: self.len(), num_replicas, rank, seed: plan.seed };
        let lengths = Arc::clone(&self.lengths);
        PlannedBatches::new(move |epoch| Arc::new(plan.batches(&lengths, epoch)), options)
    }
}

impl Dataset for TextData {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.samples.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<(Tensor, Tensor), SampleError> {
        let chosen = || samples.iter().map(|sample| &self.samples[sample.index]);
        let ids: Vec<_> = chosen().map(|sample| sample.ids.clone()).collect();
        let labels: Vec<_> = chosen().map(|sample| sample.labels.clone()).collect();
        let target = match self.task {
            TextTask::Classify => Tensor::from_slice(&labels.concat()),
            TextTask::Tag => padded(&labels, NO_TAG),
        };
        Ok((padded(&ids, i64::from(Vocabulary::PAD)), target))
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(self.fingerprint())
    }

    fn name(&self, index: usize) -> String {
        format!("line {} of {:?}", self.samples[index].line, self.path)
    }
}

/// The lengths by which batches of similar length are planned.
fn lengths(samples: &[Encoded]) -> Arc<Vec<(u32, u32)>> {
    Arc::new(samples.iter().map(|sample| (sample.ids.len() as u32, 0)).collect())
}

/// The ids of all fields, one after the other with an end-of-sentence token between them.
fn ids(sample: &Labelled, words: &Vocabulary) -> Vec<i64> {
    // A word that is spelt like the padding token counts as unknown.
    let id = |word: &String| i64::from(words.id(word).max(Vocabulary::UNK));
    let mut ids = Vec::new();
    for (place, field) in sample.words.iter().enumerate() {
        if place > 0 {
            ids.push(i64::from(Vocabulary::EOS));
        }
        ids.extend(field.iter().map(id));
    }
    ids
}

fn labels(texts: &Texts, sample: &Labelled, lexicon: &Lexicon) -> Result<Vec<i64>, TextError> {
    let number = |(label, line): (&String, &u64)| match lexicon.labels.id(label) {
        Some(id) => Ok(i64::from(id)),
        None => {
            let known = lexicon.labels.names();
            let more = if known.len() > LISTED { ", …" } else { "" };
            let known = format!("{}{more}", known[..known.len().min(LISTED)].join(", "));
            let (path, label) = (texts.path.clone(), label.clone());
            Err(TextError::UnknownLabel { path, line: *line, label, known })
        }
    };
    sample.labels.iter().zip(&sample.lines).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::config::{Text, TextLabels};

    fn texts(name: &str, content: &str, keys: &Text, labels: &TextLabels) -> Texts {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        Texts::read(&path, keys, labels).unwrap()
    }

    fn batch(data: &TextData) -> (Tensor, Tensor) {
        let samples: Vec<_> = (0..data.len()).map(|index| Sample::new(0, 0, index)).collect();
        data.batch(&samples).unwrap()
    }

    #[test]
    fn two_fields_are_one_text_and_unknown_words_have_an_id() {
        let fields = vec!["a".to_owned(), "b".to_owned()];
        let keys = Text { fields, lower: true, ..Text::default() };
        let labels = TextLabels { label: "same".into(), ..TextLabels::default() };
        let train = texts("t.jsonl", r#"{"a": "X y", "b": "x", "same": 1}"#, &keys, &labels);
        let lexicon = Lexicon::of(&train, &keys);
        let dev = texts("d.csv", "a,b,same\nX <PAD> y,z y x,1\nx,x,1\n", &keys, &labels);
        let (ids, classes) = batch(&TextData::new(&dev, &lexicon, TextTask::Classify, Some(6)).unwrap());
        assert_eq!(ids, Tensor::from_slice2(&[[4i64, 3, 5, 1, 3, 5], [4, 1, 4, 0, 0, 0]]));
        assert_eq!(classes, Tensor::from_slice(&[0i64, 0]));
    }

    #[test]
    fn tags_are_padded_and_an_unknown_label_is_reported_with_its_line() {
        let (keys, labels) =
            (Text::default(), TextLabels { task: TextTask::Tag, tag_column: 1, ..TextLabels::default() });
        let train = texts("t.conll", "Ada B-PER\nsings O\n\nyes O\n", &keys, &labels);
        let lexicon = Lexicon::of(&train, &keys);
        let data = TextData::new(&train, &lexicon, TextTask::Tag, None).unwrap();
        assert_eq!(batch(&data).1, Tensor::from_slice2(&[[0i64, 1], [1, NO_TAG]]));
        assert!(data.name(1).starts_with("line 4 of"));
        let cut = TextData::new(&train, &lexicon, TextTask::Tag, Some(1)).unwrap();
        assert_eq!(batch(&cut).1, Tensor::from_slice2(&[[0i64], [1]]));
        assert_ne!(cut.fingerprint(), data.fingerprint());
        let dev = texts("d.conll", "Ada B-PER\n\nin O\nRome B-LOC\n", &keys, &labels);
        let error = TextData::new(&dev, &lexicon, TextTask::Tag, None).unwrap_err().to_string();
        assert!(error.starts_with("line 4 of") && error.contains("d.conll"), "{error}");
        assert!(error.contains("`B-LOC`, which the training data lacks; try one of: B-PER, O"), "{error}");
    }
}
