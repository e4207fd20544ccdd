//! Batches of ids, filled up to the longest text.

use std::path::PathBuf;
use std::sync::Arc;

use drumline::{Dataset, PlannedBatches, PlannedOptions, Sample, SampleError, SamplerError};
use drumline_text::{BatchPlan, TextError, Vocabulary};
use tch::Tensor;

use super::config::Task;
use super::lexicon::Lexicon;
use super::texts::{Labelled, Texts};
use crate::models::transformer::padded;

/// The tag of a place where there is no word: PyTorch's class that has no loss.
pub const NO_TAG: i64 = -100;

/// Labels that an error lists.
const LISTED: usize = 12;

/// Texts as numbers: a batch is ids of texts × places, and classes of texts or tags of texts × places.
#[derive(Debug)]
pub struct TextData {
    path: PathBuf,
    task: Task,
    samples: Vec<Encoded>,
    lengths: Arc<Vec<(u32, u32)>>,
}

#[derive(Debug)]
struct Encoded {
    ids: Vec<i64>,
    labels: Vec<i64>,
    line: u64,
}

impl TextData {
    /// Texts by the numbers of a lexicon, cut at `max_len` words. A label that it lacks is an error.
    pub fn new(
        texts: &Texts,
        lexicon: &Lexicon,
        task: Task,
        max_len: Option<usize>,
    ) -> Result<Self, TextError> {
        let longest = max_len.unwrap_or(usize::MAX);
        let encode = |sample: &Labelled| -> Result<Encoded, TextError> {
            let mut labels = labels(texts, sample, lexicon)?;
            let mut ids = ids(sample, &lexicon.words);
            ids.truncate(longest);
            if task == Task::Tag {
                labels.truncate(longest);
            }
            Ok(Encoded { ids, labels, line: sample.lines[0] })
        };
        let samples = texts.samples.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        let lengths = samples.iter().map(|sample| (sample.ids.len() as u32, 0)).collect();
        Ok(Self { path: texts.path.clone(), task, samples, lengths: Arc::new(lengths) })
    }

    /// A number that ranks compare before they begin, so that their plans are of the same texts; and checkpoints keep, so that a run that goes on
    /// knows its texts again.
    pub fn fingerprint(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for numbers in self.samples.iter().flat_map(|sample| [&sample.ids, &sample.labels]) {
            crc.update(&(numbers.len() as u64).to_le_bytes());
            numbers.iter().for_each(|number| crc.update(&number.to_le_bytes()));
        }
        crc.finalize()
    }

    /// The batches of a plan that are a rank's, of so many ranks.
    pub fn sampler(
        &self,
        plan: BatchPlan,
        (rank, num_replicas): (usize, usize),
    ) -> Result<PlannedBatches, SamplerError> {
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
            Task::Classify => Tensor::from_slice(&labels.concat()),
            Task::Tag => padded(&labels, NO_TAG),
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

/// Of the fields, one behind the other with an end of sentence between them.
fn ids(sample: &Labelled, words: &Vocabulary) -> Vec<i64> {
    // A word that looks like padding is none.
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
    use crate::text::config::Text;

    fn texts(name: &str, content: &str, keys: &Text) -> Texts {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        Texts::read(&path, keys).unwrap()
    }

    fn batch(data: &TextData) -> (Tensor, Tensor) {
        let samples: Vec<_> = (0..data.len()).map(|index| Sample::new(0, 0, index)).collect();
        data.batch(&samples).unwrap()
    }

    #[test]
    fn two_fields_are_one_text_and_unknown_words_have_an_id() {
        let fields = vec!["a".to_owned(), "b".to_owned()];
        let keys = Text { fields, label: "same".into(), lower: true, ..Text::default() };
        let train = texts("t.jsonl", r#"{"a": "X y", "b": "x", "same": 1}"#, &keys);
        let lexicon = Lexicon::of(&train, &keys);
        let dev = texts("d.csv", "a,b,same\nX <PAD> y,z y x,1\nx,x,1\n", &keys);
        let (ids, classes) = batch(&TextData::new(&dev, &lexicon, Task::Classify, Some(6)).unwrap());
        assert_eq!(ids, Tensor::from_slice2(&[[4i64, 3, 5, 1, 3, 5], [4, 1, 4, 0, 0, 0]]));
        assert_eq!(classes, Tensor::from_slice(&[0i64, 0]));
    }

    #[test]
    fn tags_have_places_and_a_label_that_training_lacks_its_line() {
        let keys = Text { task: Task::Tag, tag_column: 1, ..Text::default() };
        let train = texts("t.conll", "Ada B-PER\nsings O\n\nyes O\n", &keys);
        let lexicon = Lexicon::of(&train, &keys);
        let data = TextData::new(&train, &lexicon, Task::Tag, None).unwrap();
        assert_eq!(batch(&data).1, Tensor::from_slice2(&[[0i64, 1], [1, NO_TAG]]));
        assert!(data.name(1).starts_with("line 4 of"));
        let cut = TextData::new(&train, &lexicon, Task::Tag, Some(1)).unwrap();
        assert_eq!(batch(&cut).1, Tensor::from_slice2(&[[0i64], [1]]));
        assert_ne!(cut.fingerprint(), data.fingerprint());
        let dev = texts("d.conll", "Ada B-PER\n\nin O\nRome B-LOC\n", &keys);
        let error = TextData::new(&dev, &lexicon, Task::Tag, None).unwrap_err().to_string();
        assert!(error.starts_with("line 4 of") && error.contains("d.conll"), "{error}");
        assert!(error.contains("`B-LOC`, which the training data lacks; try one of: B-PER, O"), "{error}");
    }
}
