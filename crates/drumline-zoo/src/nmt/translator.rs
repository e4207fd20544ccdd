//! Lines translated by all ranks: who is done with a batch takes the next.
//!
//! ```text
//!   lines ─▶ batches of like length, the longest first ─▶ a queue ◀─ take ─ rank 0, 1, 2, …: beam search
//!   rank 0 ◀─ gathered: (line, its best translations) ─▶ in the order of the lines
//! ```

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use drumline::{Cause, Exchange, ProcessGroup, RunError, StopRequest, WorkQueue, agree_on};
use drumline_text::{BatchBy, BatchPlan, LineFile, TextError};
use tch::Device;

use super::bitext::Codecs;
use crate::decode::{BeamOptions, beam_search};
use crate::models::transformer::{Transformer, padded};

/// Lines to be translated, as batches.
#[derive(Debug)]
pub struct Lines {
    file: LineFile,
    batches: Vec<Vec<usize>>,
}

impl Lines {
    /// Reads the file once, and plans its batches. Lines without words are in none.
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
        // What takes longest comes first, so that the last batches, which ranks do not end together, are short.
        batches.reverse();
        Ok(Self { file, batches })
    }

    /// How many lines there are.
    pub fn len(&self) -> usize {
        self.file.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.file.is_empty()
    }

    /// How many batches there are.
    pub fn num_batches(&self) -> usize {
        self.batches.len()
    }
}

/// How the work is shared.
pub struct WorkOptions<'a> {
    /// The ranks that share it.
    pub group: &'a ProcessGroup,
    /// Batches are taken from here; as many as [`Lines`] has.
    pub queue: WorkQueue,
    /// How translations come to rank 0.
    pub exchange: Exchange,
    /// Asks for an early end.
    pub stop: StopRequest,
}

/// What was translated, on rank 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Translated {
    /// Of each line its translations, the best first; of lines without words as many empty ones.
    pub lines: Vec<Vec<String>>,
    /// Words, or pieces, of all best translations.
    pub tokens: u64,
    /// Time until all ranks were done.
    pub seconds: f64,
    /// Batches that each rank has done, and how long it was at work.
    pub ranks: Vec<(usize, f64)>,
}

/// One model or several, and how they are searched.
pub struct Translator<'a> {
    /// Whose probabilities are averaged.
    pub models: Vec<&'a Transformer>,
    /// Sentences as ids.
    pub codecs: &'a Codecs,
    /// How translations are searched for.
    pub search: BeamOptions,
    /// Where the models are.
    pub device: Device,
}

/// A rank's part.
type Done = (Vec<(usize, Vec<String>)>, u64, usize, f64);

impl Translator<'_> {
    /// Translates all lines, together with the other ranks; the outcome is rank 0's. `progress` hears of each batch that this rank has done, and which it was.
    pub fn translate(
        &self,
        lines: &Lines,
        work: &WorkOptions<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Option<Translated>, RunError> {
        let share = self.share(lines, work, progress);
        if share.is_err() {
            // The others stop at their next batch; what is wrong with the store is told by who asks it next.
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
                    drumline::signal_name(signal.as_raw())
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

    /// Of each line its translations, and how many tokens the best has.
    fn batch(&self, lines: &Lines, batch: &[usize]) -> Result<Vec<(Vec<String>, usize)>, Cause> {
        let sources: Result<Vec<_>, TextError> =
            batch.iter().map(|line| self.codecs.source_ids(&lines.file.line(*line)?)).collect();
        let source = padded(&sources?, self.search.specials.pad).f_to_device(self.device);
        let source = source.map_err(drumline::TorchError::from)?;
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

/// Writes lines to a file, which is complete or not there: what stood at `path` is replaced at the end. Where that fails, they are in `path.part`.
pub(crate) fn write_lines(path: &Path, lines: &[impl AsRef<str>]) -> Result<(), TextError> {
    let beside = path.with_added_extension("part");
    let write = || -> io::Result<()> {
        let mut file = BufWriter::new(std::fs::File::create(&beside)?);
        for line in lines {
            writeln!(file, "{}", line.as_ref())?;
        }
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().map_err(|source| TextError::WriteFile { path: path.to_owned(), source })
}
