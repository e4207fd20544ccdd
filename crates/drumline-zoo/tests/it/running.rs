//! Runs `drumline-train` as the ranks of a job, with a small dataset in its own folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drumline_launch::{Exit, LocalJob, Output, RunningJob};
use drumline_text::synth_story::{self, SynthStoryOptions};
use drumline_text::synth_text::{self, SynthTextOptions};
use drumline_text::{GptTokenizer, write_tokens};
use drumline_zoo::synth_cifar;
use serde_json::Value;
use tempfile::TempDir;

/// The binary that cargo has built.
pub(super) const BUILT: &str = env!("CARGO_BIN_EXE_drumline-train");
const LONGEST: Duration = Duration::from_secs(240);

/// A dataset and a configuration for it.
pub(super) struct Place {
    folder: TempDir,
}

/// How a rank ended.
pub(super) struct Rank {
    pub(super) exit: Exit,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Place {
    /// 40 training and 21 test images.
    pub(super) fn new() -> Self {
        Self::of_images(40, 21)
    }

    /// So many training and test images.
    pub(super) fn of_images(train: usize, test: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        synth_cifar::write(&folder.path().join("data"), train, test, 1).unwrap();
        let text = format!(
            "MODEL: {{ARCH: mlp, NUM_CLASSES: 10}}\n\
             TRAIN: {{DATASET: {0}/data, BATCH_SIZE: 4, IM_SIZE: 32, WORKERS: 1, PRINT_FREQ: 2}}\n\
             TEST: {{BATCH_SIZE: 3, IM_SIZE: 32}}\n\
             OPTIM: {{MAX_EPOCH: 2, BASE_LR: 0.01, WARMUP_EPOCHS: 0}}\n\
             OUT_DIR: {0}/exp\nRNG_SEED: 7\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("c.yaml"), text).unwrap();
        Self { folder }
    }

    /// Texts to classify, or to tag.
    pub(super) fn of_texts(task: &str, options: &SynthTextOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        synth_text::write(folder.path().join("data"), options).unwrap();
        let ending = if task == "tag" { "conll" } else { "csv" };
        let text = format!(
            "TEXT: {{TASK: {task}, TRAIN: {0}/data/train.{ending}, DEV: {0}/data/dev.{ending}, TEST: {0}/data/test.{ending}, TAG_COLUMN: 1}}\n\
             MODEL: {{D_WORD_VEC: 32, D_HIDDEN: 32, N_HEAD: 4, D_INNER_HID: 64}}\n\
             TRAIN: {{BATCH_SIZE: 16}}\nOPTIM: {{BASE_LR: 0.01, MAX_EPOCH: 4}}\n\
             OUT_DIR: {0}/exp\nRNG_SEED: 7\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("c.yaml"), text).unwrap();
        Self { folder }
    }

    /// Texts, and a small BERT that predicts masked words of them.
    pub(super) fn of_masks(options: &SynthTextOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        synth_text::write(folder.path().join("data"), options).unwrap();
        let text = format!(
            "MLM: {{PROBABILITY: 0.15}}\n\
             TEXT: {{TRAIN: {0}/data/train.csv, DEV: {0}/data/dev.csv, TEST: {0}/data/test.csv}}\n\
             MODEL: {{NUM_HIDDEN_LAYERS: 2, NUM_ATTENTION_HEADS: 4, HIDDEN_SIZE: 64, INTERMEDIATE_SIZE: 128, MAX_POSITION_EMBEDDINGS: 64}}\n\
             TRAIN: {{BATCH_SIZE: 16}}\nTEST: {{BATCH_SIZE: 7}}\nOPTIM: {{BASE_LR: 0.003, MAX_EPOCH: 4}}\n\
             OUT_DIR: {0}/exp\nRNG_SEED: 7\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("c.yaml"), text).unwrap();
        Self { folder }
    }

    /// Stories as bytes, and a small GPT.
    pub(super) fn of_stories(options: &SynthStoryOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        synth_story::write(&data, options).unwrap();
        for name in ["train", "valid"] {
            let [text, out] = ["txt", "tokens"].map(|ending| data.join(name).with_extension(ending));
            write_tokens(&[text], &GptTokenizer::bytes(), &out, |_| Ok(())).unwrap();
        }
        let text = format!(
            "GPT: {{TRAIN: {0}/data/train.tokens, DEV: {0}/data/valid.tokens}}\n\
             MODEL: {{N_LAYER: 2, N_HEAD: 2, N_EMBD: 48, BLOCK: 48}}\n\
             TRAIN: {{BATCH_SIZE: 8}}\nTEST: {{BATCH_SIZE: 7}}\nOPTIM: {{BASE_LR: 0.005}}\n\
             OUT_DIR: {0}/exp\nRNG_SEED: 7\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("c.yaml"), text).unwrap();
        Self { folder }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `drumline-train`. `words` are split at spaces, and `--cfg` is inserted after the first.
    pub(super) fn job(&self, nproc: usize, words: &str) -> LocalJob {
        let mut args: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
        args.splice(1..1, ["--cfg".to_owned(), self.path("c.yaml").display().to_string()]);
        job(nproc, args)
    }

    pub(super) fn start(&self, nproc: usize, words: &str) -> RunningJob {
        self.job(nproc, words).start().unwrap()
    }

    pub(super) fn run(&self, nproc: usize, words: &str) -> Vec<Rank> {
        ended(self.start(nproc, words))
    }

    /// Runs it, asserts that all ranks succeed, and returns the output of rank 0.
    pub(super) fn passes(&self, nproc: usize, words: &str) -> String {
        let ranks = self.run(nproc, words);
        for rank in &ranks {
            assert!(rank.exit.is_success(), "{words}: {}{}", rank.stdout, rank.stderr);
        }
        ranks[0].stdout.clone()
    }

    /// The lines of `metrics.jsonl`.
    pub(super) fn events(&self) -> Vec<Value> {
        events(&self.path("exp/metrics.jsonl"))
    }
}

/// Runs `drumline-train` with these arguments on a number of ranks. The binary lies beside the tests if they were
/// packed for another machine.
pub(super) fn job(nproc: usize, args: Vec<String>) -> LocalJob {
    let beside = std::env::current_exe().unwrap().with_file_name("drumline-train");
    let program = if beside.is_file() { beside } else { BUILT.into() };
    job_of(&program, nproc, args)
}

fn job_of(program: &Path, nproc: usize, args: Vec<String>) -> LocalJob {
    let job = LocalJob::new(nproc, program, args).env("OMP_NUM_THREADS", "1");
    job.output(Output::Capture).deadline(LONGEST).grace(Duration::from_secs(30))
}

/// Starts the ranks.
pub(super) fn start(nproc: usize, args: Vec<String>) -> RunningJob {
    job(nproc, args).start().unwrap()
}

/// Starts the ranks with another program.
pub(super) fn start_program(program: &str, nproc: usize, args: Vec<String>) -> RunningJob {
    job_of(program.as_ref(), nproc, args).start().unwrap()
}

pub(super) fn ended(job: RunningJob) -> Vec<Rank> {
    let report = job.wait();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let ranks = report.ranks.iter();
    ranks
        .map(|rank| Rank { exit: rank.exit, stdout: text(&rank.stdout), stderr: text(&rank.stderr) })
        .collect()
}

pub(super) fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The value of a key in each event of a kind.
pub(super) fn column(events: &[Value], kind: &str, key: &str) -> Vec<f64> {
    let of_kind = events.iter().filter(|event| event["kind"] == kind);
    of_kind.map(|event| event[key].as_f64().unwrap_or(f64::NAN)).collect()
}

/// Asserts that two lines, such as `loss: 1.25 | acc 31.5 | 13 texts`, have the same words and whole numbers, and numbers
/// with a point within 1e-5, relative, and a unit of their last digit.
#[track_caller]
pub(super) fn assert_same_figures(one: &str, other: &str) {
    let [words, others] = [one, other].map(|line| line.split_whitespace().collect::<Vec<_>>());
    let is_near = |(one, other): (&&str, &&str)| {
        let point = one.find('.').filter(|_| one != other);
        let numbers = one.parse::<f64>().ok().zip(other.parse::<f64>().ok());
        point.zip(numbers).map_or(one == other, |(point, (a, b))| {
            let unit = 0.1f64.powi((one.len() - point - 1) as i32);
            (a - b).abs() <= 1e-5 * a.abs() + 1.001 * unit
        })
    };
    let is_same = words.len() == others.len() && words.iter().zip(&others).all(is_near);
    assert!(is_same && !words.is_empty(), "{one}\n{other}");
}
