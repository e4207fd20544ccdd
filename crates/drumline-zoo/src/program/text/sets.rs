//! The data of a training: read by the run's words, the same on all ranks, and the same as before where a run goes on.

use anyhow::{anyhow, ensure};
use drumline::checkpoint::Loaded;
use drumline::ensure_alike;
use drumline_text::TextError;

use crate::config::table;
use crate::program::job::Job;
use crate::program::resumed::{Change, changes, is_within_epoch};
use crate::text::{Lexicon, Task, TextConfig, TextData, Texts};

/// Keys that say which texts make a batch.
const PLAN: [&str; 4] = ["TRAIN.BATCH_SIZE", "TRAIN.BUCKET", "TRAIN.SHUFFLE", "TEXT.MAX_LEN"];

pub(super) struct Sets {
    pub(super) train: TextData,
    pub(super) dev: Option<TextData>,
    /// What a person should know of them.
    pub(super) notes: Vec<String>,
}

impl Sets {
    /// By the words and labels of a run, which goes on from what was found.
    pub(super) fn read(
        config: &TextConfig,
        lexicon: &Lexicon,
        found: Option<&Loaded>,
    ) -> anyhow::Result<Self> {
        let (keys, mut notes) = (&config.text, Vec::new());
        let mut read = |path, max_len| -> Result<TextData, TextError> {
            let texts = Texts::read(path, keys)?;
            if texts.left_out > 0 {
                notes.push(format!("{} empty texts of {:?} are left out", texts.left_out, texts.path));
            }
            TextData::new(&texts, lexicon, keys.task, max_len)
        };
        let train = read(&keys.train, keys.max_len).map_err(|error| of_run(error, config, found))?;
        let labels = lexicon.labels.len();
        ensure!(
            labels > 1,
            "{:?} has {labels} label, expected at least two; try another TEXT.LABEL",
            keys.train
        );
        // Each word of an evaluation counts.
        let max_len = keys.max_len.filter(|_| keys.task == Task::Classify);
        let dev = keys.dev.as_ref().map(|dev| read(dev, max_len)).transpose()?;
        let sets = Self { train, dev, notes };
        found.map_or(Ok(()), |found| same_plan(config, found))?;
        Ok(sets)
    }

    /// Hosts with other files would make other plans, and train past each other.
    pub(super) fn ensure_alike(&self, job: &Job) -> anyhow::Result<()> {
        let dev = self.dev.as_ref().map_or("none".to_owned(), print);
        let given = [("the text of TEXT.TRAIN", print(&self.train)), ("the text of TEXT.DEV", dev)];
        let given = given.map(|(name, print)| (name.to_owned(), print)).to_vec();
        Ok(ensure_alike(&job.group, "data set", given)?)
    }
}

/// An error if what is left of an epoch would be of other batches. Other texts are refused by the trainer.
fn same_plan(config: &TextConfig, found: &Loaded) -> anyhow::Result<()> {
    let (path, is_within_epoch) = (found.path.display(), is_within_epoch(found)?);
    for Change { key, saved, now } in changes(found, table::to_json(config)) {
        ensure!(
            !is_within_epoch || !PLAN.contains(&key.as_str()),
            "{path} is in the middle of an epoch: {key} was {saved}, and is {now} now, so that other texts would \
             make a batch; try {saved} up to the end of the epoch, or another OUT_DIR for a new run"
        );
    }
    Ok(())
}

fn print(data: &TextData) -> String {
    format!("{:08x}", data.fingerprint())
}

/// What is wrong with a training file. The labels that a run has begun with are those of the file of then.
fn of_run(error: TextError, config: &TextConfig, found: Option<&Loaded>) -> anyhow::Error {
    match (error, found) {
        (TextError::UnknownLabel { path, line, label, .. }, Some(_)) => anyhow!(
            "line {line} of {path:?} has the label `{label}`, which the run in {} was not begun with; try the file of then, \
             another OUT_DIR, or TRAIN.AUTO_RESUME False to begin anew there",
            config.run.out_dir.display()
        ),
        (error, _) => error.into(),
    }
}
