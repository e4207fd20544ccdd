//! BLEU in validations: each rank translates its share, and the counts of all ranks are summed to one score.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use drumline::data::Cause;
use drumline::trainer::BatchMetric;
use drumline_text::bleu::{BleuOptions, BleuStats, BleuTokens};
use drumline_text::{LineFile, TextError, detokenized};

use super::bitext::{Bitext, Codecs, NumberedPairs};
use super::config::NmtConfig;
use crate::config::PrecisionKind;
use crate::decode::{BeamOptions, beam_search};
use crate::models::Logits;
use crate::models::transformer::{Specials, Transformer};

/// The reference translations: one file or several, line by line.
#[derive(Debug)]
pub struct References(Vec<LineFile>);

/// The lines that are translated.
#[derive(Debug, Clone, Copy)]
pub struct SourceLines<'a> {
    /// Their file.
    pub path: &'a Path,
    /// How many there are.
    pub count: usize,
}

impl References {
    /// Opens `path`, or `path0`, `path1`, … if there are several references. Each file must have as many lines as
    /// `source`.
    pub fn open(path: &Path, num_refs: usize, source: SourceLines<'_>) -> Result<Self, TextError> {
        let paths: Vec<PathBuf> = match num_refs {
            1 => vec![path.to_owned()],
            several => (0..several).map(|place| format!("{}{place}", path.display()).into()).collect(),
        };
        let files = paths.iter().map(|path| {
            let file = LineFile::open(path)?;
            if file.len() == source.count {
                return Ok(file);
            }
            Err(TextError::UnequalLines {
                source_path: source.path.to_owned(),
                source_lines: source.count as u64,
                target_path: path.clone(),
                target_lines: file.len() as u64,
            })
        });
        Ok(Self(files.collect::<Result<_, _>>()?))
    }

    /// The references of a line.
    pub fn of_line(&self, line: usize) -> Result<Vec<String>, TextError> {
        self.0.iter().map(|file| file.line(line)).collect()
    }
}

/// Compares translations with references.
#[derive(Debug)]
pub struct Judge {
    /// The references.
    pub references: References,
    /// How BLEU is counted.
    pub options: BleuOptions,
}

impl Judge {
    /// The judge for the validation of `config`.
    pub(crate) fn of_validation(config: &NmtConfig, valid: &Bitext) -> Result<Self, TextError> {
        let data = &config.data;
        let path = data.bleu_valid_reference.as_ref().unwrap_or(&data.valid_data[1]);
        let source = SourceLines { path: &data.valid_data[0], count: valid.corpus().left_out().of };
        let references = References::open(path, data.num_refs, source)?;
        Ok(Self { references, options: options(config)? })
    }

    /// The BLEU counts of a line's translation.
    pub fn stats(&self, line: usize, translation: &str) -> Result<BleuStats, TextError> {
        let references = self.references.of_line(line)?;
        let references: Vec<_> = references.iter().map(String::as_str).collect();
        Ok(BleuStats::with(&self.options, translation, &references))
    }
}

/// The BLEU options of `config`.
pub(crate) fn options(config: &NmtConfig) -> Result<BleuOptions, TextError> {
    let options: BleuOptions = config.bleu.sacrebleu_args.parse()?;
    Ok(if config.data.eval_at_char_level {
        BleuOptions { tokens: BleuTokens::Characters, ..options }
    } else {
        options
    })
}

/// State of a validation: whether it translates, and its translations. The metric shares it with the callback that
/// decides when to translate and writes the result.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) translates: Cell<bool>,
    /// Line numbers with their translations, for this rank's share.
    pub(crate) translations: RefCell<Vec<(usize, String)>>,
}

/// The metric `bleu`.
pub(crate) struct Bleu<'a> {
    pub(crate) model: &'a Transformer,
    pub(crate) codecs: Codecs,
    pub(crate) valid: Bitext,
    pub(crate) judge: Judge,
    pub(crate) search: BeamOptions,
    pub(crate) precision: PrecisionKind,
    /// Whether word pieces are joined and text is detokenised.
    pub(crate) postprocess: bool,
    pub(crate) round: Rc<Round>,
    /// The counts of empty lines, which no rank translates. Only rank 0 has them; they are zero on other ranks.
    pub(crate) left_out: BleuStats,
    pub(crate) stats: BleuStats,
}

impl<'a> Bleu<'a> {
    pub(crate) fn new(
        model: &'a Transformer,
        config: &NmtConfig,
        valid: &Bitext,
        codecs: &Codecs,
    ) -> Result<Self, TextError> {
        let bleu = &config.bleu;
        Ok(Self {
            model,
            codecs: codecs.clone(),
            valid: valid.clone(),
            judge: Judge::of_validation(config, valid)?,
            search: BeamOptions {
                beam_size: bleu.beam_size,
                alpha: bleu.alpha,
                keep_n: 1,
                max_steps: bleu.max_steps,
                batch: config.training.bleu_valid_batch_size,
                specials: Specials::default(),
            },
            precision: config.run.precision,
            postprocess: bleu.postprocess,
            round: Rc::default(),
            left_out: BleuStats::default(),
            stats: BleuStats::default(),
        })
    }

    /// Makes this rank count the empty lines.
    pub(crate) fn counting_left_out(mut self) -> Result<Self, TextError> {
        let corpus = self.valid.corpus();
        let mut next = (0..corpus.len()).map(|index| corpus.line_of(index)).peekable();
        for line in 0..corpus.left_out().of {
            if next.next_if_eq(&line).is_none() {
                self.left_out += self.judge.stats(line, "")?;
            }
        }
        Ok(self)
    }
}

impl BatchMetric<NumberedPairs, Logits> for Bleu<'_> {
    fn update(&mut self, _: &Logits, batch: &NumberedPairs) -> Result<(), Cause> {
        let source = &batch.pairs.source;
        let _autocast = self.precision.autocast_of_weights(source.device())?;
        let found = beam_search(&[self.model], source, &self.search)?;
        for (index, best) in batch.indices.iter().zip(found) {
            let text = self.codecs.target_text(best.first().map_or(&[], |best| &best.tokens))?;
            let text = if self.postprocess { detokenized(&text) } else { text };
            let line = self.valid.corpus().line_of(*index);
            self.stats += self.judge.stats(line, &text)?;
            self.round.translations.borrow_mut().push((line, text));
        }
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        self.stats.to_sums().to_vec()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        BleuStats::from_sums(&std::array::from_fn(|place| sums[place])).score()
    }

    fn reset(&mut self) {
        self.stats = self.left_out;
        self.round.translations.borrow_mut().clear();
    }

    fn is_due(&self) -> bool {
        self.round.translates.get()
    }

    fn uses_model(&self) -> bool {
        true
    }
}
