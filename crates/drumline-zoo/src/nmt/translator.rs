//! Translation of a file by all ranks: a rank that has finished a batch takes the next one.
//!
//! ```text
//!   lines ─▶ batches of similar length, the longest first ─▶ a queue ◀─ take ─ rank 0, 1, 2, …: beam search
//!   rank 0 ◀─ gathered: (line, its best translations) ─▶ in the order of the lines
//! ```

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use drumline::comm::{Exchange, RunError, WorkQueue, agree_on};
use drumline::data::Cause;
use drumline::{ProcessGroup, StopRequest};
use drumline_files::{Durability, Replacement};
use drumline_text::{BatchBy, BatchPlan, LineFile, TextError};
use tch::Device;

use super::bitext::Codecs;
use crate::decode::{BeamOptions, beam_search};
use crate::models::transformer::{Transformer, padded};

/// The lines to translate, as batches.
#[derive(Debug)]
pub struct Lines {
    file: LineFile,
    batches: Vec<Vec<usize>>,
}

impl Lines {
    /// Reads the file once and plans its batches. Empty lines are in no batch.
    pub fn open(path: &Path, codecs: &Codecs, by: BatchBy) -> Result<Self, TextError> {
        let mut lengths = Vec::new();
        let tokens = codecs.source.tokens();
        let file = LineFile::open_with(path, |line| {
            lengths.push(u32::try_from(tokens.count(line)?).unwrap_or(u32::MAX));
            Ok(())
        })?;
        let with_words: Vec<_> = (0..lengths.len()).filter(|line| lengths[*line] > 0).collect();
        let sizes: Vec<_> = with_words.iter().map(|line| (lengths[*line].saturating_add(1), 1)).collect();
        let plan = BatchPlan { buffer: usize::MAX, ..BatchPlan::new(by) };
        let mut batches = plan.batches(&sizes, 0);
        for batch in &mut batches {
            batch.iter_mut().for_each(|place| *place = with_words[*place]);
        }
        // The longest batches come first: ranks do not finish at the same time, so the last batches should be short.
        batches.reverse();
        Ok(Self { file, batches })
    }

    /// The number of lines.
    pub fn len(&self) -> usize {
        self.file.len()
    }

    /// Whether there are no lines.
    pub fn is_empty(&self) -> bool {
        self.file.is_empty()
    }

    /// The number of batches.
    pub fn num_batches(&self) -> usize {
        self.batches.len()
    }
}

/// How the ranks share the work.
pub struct WorkOptions<'a> {
    /// The ranks that share it.
    pub group: &'a ProcessGroup,
    /// The queue of batch numbers. It must have as many entries as [`Lines`] has batches.
    pub queue: WorkQueue,
    /// How translations are gathered on rank 0.
    pub exchange: Exchange,
    /// A request to stop early.
    pub stop: StopRequest,
}

/// The translations, on rank 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Translated {
    /// The translations of each line, the best first. Empty lines have empty translations.
    pub lines: Vec<Vec<String>>,
    /// The number of tokens in all best translations.
    pub tokens: u64,
    /// The time until all ranks had finished.
    pub seconds: f64,
    /// For each rank, the number of its batches and its busy time.
    pub ranks: Vec<(usize, f64)>,
}

/// One model or an ensemble, and the search options.
pub struct Translator<'a> {
    /// The models, whose probabilities are averaged.
    pub models: Vec<&'a Transformer>,
    /// The encoders of source and target text.
    pub codecs: &'a Codecs,
    /// The beam search options.
    pub search: BeamOptions,
    /// The device of the models.
    pub device: Device,
}

/// The outcome of a rank: translations by line, tokens, batches and busy seconds.
type Done = (Vec<(usize, Vec<String>)>, u64, usize, f64);

impl Translator<'_> {
    /// Translates all lines together with the other ranks. Only rank 0 returns the translations. `progress` is called
    /// with the number of each batch that this rank has finished.
    pub fn translate(
        &self,
        lines: &Lines,
        work: &WorkOptions<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Option<Translated>, RunError> {
        let share = self.share(lines, work, progress);
        if share.is_err() {
            // The other ranks stop at their next batch. If the store itself has failed, the next rank that uses it
            // reports that.
            let _ = work.queue.close();
        }
        let own = agree_on(work.group, share)?;
        Ok(work.exchange.gather(work.group, &own)?.map(|all| self.put_together(lines.len(), all)))
    }

    fn share(
        &self,
        lines: &Lines,
        work: &WorkOptions<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<Done, Cause> {
        let begin = Instant::now();
        let (mut found, mut tokens, mut batches) = (Vec::new(), 0, 0);
        while let Some(number) = work.queue.take()? {
            if let Some(signal) = work.stop.signal() {
                return Err(format!(
                    "stopped by {} before all was translated; nothing was written",
                    drumline::launch::signal_name(signal.as_raw())
                )
                .into());
            }
            let batch = &lines.batches[number];
            for (line, (texts, words)) in batch.iter().zip(self.batch(lines, batch)?) {
                tokens += words as u64;
                found.push((*line, texts));
            }
            batches += 1;
            progress(number);
        }
        Ok((found, tokens, batches, begin.elapsed().as_secs_f64()))
    }

    /// The translations of each line in a batch, and the number of tokens in the best.
    fn batch(&self, lines: &Lines, batch: &[usize]) -> Result<Vec<(Vec<String>, usize)>, Cause> {
        let sources: Result<Vec<_>, TextError> =
            batch.iter().map(|line| self.codecs.source_ids(&lines.file.line(*line)?)).collect();
        let source = padded(&sources?, self.search.specials.pad).f_to_device(self.device);
        let source = source.map_err(drumline::torch::TorchError::from)?;
        let search = BeamOptions { batch: batch.len(), ..self.search };
        let found = beam_search(&self.models, &source, &search)?;
        let texts = found.into_iter().map(|kept| {
            let texts: Result<Vec<_>, _> =
                kept.iter().map(|hypothesis| self.codecs.target_text(&hypothesis.tokens)).collect();
            Ok((texts?, kept.first().map_or(0, |best| best.tokens.len())))
        });
        texts.collect()
    }

    fn put_together(&self, lines: usize, all: Vec<Done>) -> Translated {
        let seconds = all.iter().map(|(.., at_work)| *at_work).fold(0.0, f64::max);
        let mut translated =
            Translated { lines: vec![Vec::new(); lines], tokens: 0, seconds, ranks: Vec::new() };
        for (found, tokens, batches, at_work) in all {
            for (line, texts) in found {
                translated.lines[line] = texts;
            }
            translated.tokens += tokens;
            translated.ranks.push((batches, at_work));
        }
        for texts in &mut translated.lines {
            texts.resize(self.search.keep_n, String::new());
        }
        translated
    }
}

/// Writes lines to a file, which replaces the one at `path` when it is complete.
pub(crate) fn write_lines(path: &Path, lines: &[impl AsRef<str>]) -> Result<(), TextError> {
    let write = || -> io::Result<()> {
        let mut file = Replacement::new(path)?;
        for line in lines {
            writeln!(file, "{}", line.as_ref())?;
        }
        file.commit(Durability::Disk)
    };
    write().map_err(|source| TextError::WriteFile { path: path.to_owned(), source })
}
