//! Parallel text as batches.

use std::path::Path;
use std::sync::Arc;

use drumline::data::{Cause, Dataset, PlannedBatches, PlannedOptions, Sample, SampleError, SamplerError};
use drumline::torch::TorchError;
use drumline::trainer::{Batch, Mode, Model, Supervised};
use drumline_text::{
    BatchBy, BatchPlan, Codec, CorpusOptions, ParallelCorpus, Pieces, Side, TextError, Tokens, Vocabulary,
};
use tch::{Device, Tensor};

use super::config::{BatchingKey, NmtConfig, VocabularyKeys, VocabularyKind};
use crate::models::Logits;
use crate::models::transformer::{Pairs, Specials, Transformer};
use crate::task::Place;

/// The encoders of source and target text.
#[derive(Debug, Clone)]
pub struct Codecs {
    /// The source codec.
    pub source: Codec,
    /// The target codec.
    pub target: Codec,
}

impl Codecs {
    /// Reads the vocabularies that `data_configs.vocabularies` names.
    pub fn read(config: &NmtConfig) -> Result<Self, TextError> {
        let [source, target] = &config.data.vocabularies[..] else {
            unreachable!("a configuration has two vocabularies, or is refused")
        };
        Ok(Self { source: codec(source)?, target: codec(target)? })
    }

    /// The ids of a source sentence, with the end token.
    pub fn source_ids(&self, text: &str) -> Result<Vec<i64>, TextError> {
        let ids = self.source.encode(text)?.into_iter().map(i64::from);
        Ok(ids.chain([Specials::default().eos]).collect())
    }

    /// The text of a translation's ids.
    pub fn target_text(&self, ids: &[i64]) -> Result<String, TextError> {
        let ids: Vec<_> = ids.iter().map(|id| *id as u32).collect();
        self.target.decode(&ids)
    }
}

fn codec(keys: &VocabularyKeys) -> Result<Codec, TextError> {
    let most = usize::try_from(keys.max_n_words).ok();
    let vocabulary = Vocabulary::read(&keys.dict_path, most)?;
    let is_json = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    let tokens = match (keys.kind, &keys.codes) {
        (VocabularyKind::Word, _) => Tokens::Words,
        (VocabularyKind::Bpe, None) => Tokens::Pieces(Pieces::split_already()),
        (VocabularyKind::Bpe, Some(path)) if is_json(path) => Tokens::Pieces(Pieces::read_tokenizer(path)?),
        (VocabularyKind::Bpe, Some(path)) => Tokens::Pieces(Pieces::read_codes(path)?),
    };
    Ok(Codec::new(tokens, vocabulary))
}

/// Which sentences a corpus contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// Sentences of at most `max_len` tokens.
    UpToMaxLen,
    /// All sentences but empty ones.
    All,
}

/// Parallel text, sentence by sentence as ids.
#[derive(Debug, Clone)]
pub struct Bitext {
    corpus: Arc<ParallelCorpus>,
    codecs: Codecs,
}

impl Bitext {
    /// Opens the training text.
    pub fn of_training(config: &NmtConfig, codecs: &Codecs) -> Result<Self, TextError> {
        Self::open(&config.data.train_data, config, codecs, Keep::UpToMaxLen)
    }

    /// Opens the validation text, if there is one.
    pub fn of_validation(config: &NmtConfig, codecs: &Codecs) -> Result<Option<Self>, TextError> {
        match &config.data.valid_data[..] {
            [] => Ok(None),
            files => Self::open(files, config, codecs, Keep::All).map(Some),
        }
    }

    fn open(
        files: &[impl AsRef<Path>],
        config: &NmtConfig,
        codecs: &Codecs,
        keep: Keep,
    ) -> Result<Self, TextError> {
        let max_len = |side: usize| match keep {
            Keep::UpToMaxLen => u32::try_from(config.data.max_len[side]).ok(),
            Keep::All => None,
        };
        let source = Side { tokens: codecs.source.tokens().clone(), max_len: max_len(0) };
        let target = Side { tokens: codecs.target.tokens().clone(), max_len: max_len(1) };
        let corpus = ParallelCorpus::open(&files[0], &files[1], &CorpusOptions { source, target })?;
        Ok(Self { corpus: Arc::new(corpus), codecs: codecs.clone() })
    }

    /// The files, pair by pair.
    pub fn corpus(&self) -> &ParallelCorpus {
        &self.corpus
    }

    /// The sampler for training, as `training_configs` says.
    pub(crate) fn train_sampler(
        &self,
        config: &NmtConfig,
        place: Place,
    ) -> Result<PlannedBatches, SamplerError> {
        let training = &config.training;
        let by = match training.batching_key {
            BatchingKey::Samples => BatchBy::Samples(training.batch_size),
            BatchingKey::Tokens => BatchBy::Tokens(training.batch_size),
        };
        self.sampler(
            BatchPlan {
                by,
                bucket: training.use_bucket,
                buffer: training.buffer_size,
                shuffle: training.shuffle,
                seed: training.seed,
            },
            place,
        )
    }

    /// The sampler for validation: batches of `batch_size` sentences of similar length.
    pub(crate) fn valid_sampler(
        &self,
        config: &NmtConfig,
        place: Place,
    ) -> Result<PlannedBatches, SamplerError> {
        let by = BatchBy::Samples(config.training.valid_batch_size);
        let plan = BatchPlan { buffer: usize::MAX, seed: config.training.seed, ..BatchPlan::new(by) };
        self.sampler(plan, place)
    }

    fn sampler(&self, plan: BatchPlan, place: Place) -> Result<PlannedBatches, SamplerError> {
        let Place { rank, num_replicas } = place;
        let (corpus, seed) = (Arc::clone(&self.corpus), plan.seed);
        // Both sides get an end token.
        let lengths: Arc<[_]> =
            corpus.lengths().iter().map(|(source, target)| (source + 1, target + 1)).collect();
        let options = PlannedOptions { num_samples: corpus.len(), num_replicas, rank, seed };
        PlannedBatches::new(move |epoch| Arc::new(plan.batches(&lengths, epoch)), options)
    }

    fn pair(&self, index: usize) -> Result<(Vec<i64>, Vec<i64>), TextError> {
        let (source, target) = self.corpus.pair(index)?;
        let target = self.codecs.target.encode(&target)?;
        Ok((self.codecs.source_ids(&source)?, target.into_iter().map(i64::from).collect()))
    }
}

impl Dataset for Bitext {
    type Batch = NumberedPairs;

    fn len(&self) -> usize {
        self.corpus.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<NumberedPairs, SampleError> {
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for sample in samples {
            let pair = self.pair(sample.index);
            let (source, target) =
                pair.map_err(|error| SampleError::new(sample.index, self.name(sample.index), error))?;
            sources.push(source);
            targets.push(target);
        }
        let indices = samples.iter().map(|sample| sample.index).collect();
        Ok(NumberedPairs { pairs: Pairs::new(&sources, &targets, Specials::default()), indices })
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(self.corpus.fingerprint())
    }

    fn name(&self, index: usize) -> String {
        format!("line {}", self.corpus.line_of(index) + 1)
    }
}

/// A batch of pairs with their sentence numbers.
#[derive(Debug)]
pub struct NumberedPairs {
    /// The pairs as ids.
    pub pairs: Pairs,
    /// The indices of the pairs in the corpus.
    pub indices: Vec<usize>,
}

impl NumberedPairs {
    /// What the first of [`layers`](crate::models::transformer::layers) gets.
    pub fn inputs(&self) -> Vec<Tensor> {
        let Pairs { source, target_in, places, .. } = &self.pairs;
        [source, target_in, places].map(Tensor::shallow_clone).into()
    }
}

impl Batch for NumberedPairs {
    fn num_samples(&self) -> usize {
        self.indices.len()
    }

    fn to_device(self, device: Device) -> Result<Self, TorchError> {
        Ok(Self { pairs: self.pairs.to_device(device)?, ..self })
    }

    fn tensors(&self) -> Option<Vec<&Tensor>> {
        self.pairs.tensors()
    }
}

impl Supervised for NumberedPairs {
    fn input(&self) -> &Tensor {
        self.pairs.input()
    }

    fn target(&self) -> &Tensor {
        self.pairs.target()
    }
}

impl Model<NumberedPairs> for Transformer {
    type Output = Logits;

    fn forward_batch(&self, batch: &NumberedPairs, mode: Mode) -> Result<Logits, Cause> {
        self.forward_batch(&batch.pairs, mode)
    }
}
