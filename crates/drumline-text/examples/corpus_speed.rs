//! How long a pair of files takes to open, how much memory it holds, and how fast its pairs are read in an epoch's order.
//!
//! ```text
//! cargo run --release -p drumline-text --example corpus_speed -- train.src train.tgt
//! cargo run --release -p drumline-text --example corpus_speed -- --make 1000000000 train.src train.tgt
//! ```
//! With `--make BYTES` the two files are written first, so many bytes together, of sentences made by rule.

use drumline_text::synth::{self, SynthOptions};
use drumline_text::{BatchBy, BatchPlan, CorpusOptions, ParallelCorpus};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Pairs that are read one by one.
const READ: usize = 1_000_000;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--make", bytes, source, target] => {
            make(Path::new(source), Path::new(target), bytes.parse()?)?;
            measure(Path::new(source), Path::new(target))
        }
        [source, target] => measure(Path::new(source), Path::new(target)),
        _ => Err("usage: corpus_speed [--make BYTES] SOURCE TARGET".into()),
    }
}

fn measure(source: &Path, target: &Path) -> Outcome {
    let bytes = source.metadata()?.len() + target.metadata()?.len();
    let before = Instant::now();
    let corpus = ParallelCorpus::open(source, target, &CorpusOptions::default())?;
    let took = before.elapsed().as_secs_f64();
    let (pairs, megabytes) = (corpus.len() as f64, bytes as f64 / 1e6);
    println!(
        "open: {megabytes:.0} MB, {pairs} pairs in {took:.2} s: {:.0} pairs/s, {:.0} MB/s",
        pairs / took,
        megabytes / took
    );
    println!(
        "{}; memory of the process: {:.0} MB, at most {:.0} MB",
        corpus.left_out(),
        memory("VmRSS")?,
        memory("VmHWM")?
    );

    let plan = BatchPlan { shuffle: true, ..BatchPlan::new(BatchBy::Tokens(4096)) };
    let before = Instant::now();
    let batches = plan.batches(corpus.lengths(), 0);
    println!("plan: {} batches in {:.2} s", batches.len(), before.elapsed().as_secs_f64());

    let before = Instant::now();
    let (mut read, mut characters) = (0, 0);
    for index in batches.into_iter().flatten().take(READ) {
        let (source, target) = corpus.pair(index)?;
        (read, characters) = (read + 1, characters + source.len() + target.len());
    }
    let took = before.elapsed().as_secs_f64();
    println!(
        "read: {read} pairs, {characters} bytes, in that order in {took:.2} s: {:.0} pairs/s",
        read as f64 / took
    );
    Ok(())
}

/// A figure of /proc/self/status, in MB.
fn memory(name: &str) -> Outcome<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with(name)).ok_or("no such figure")?;
    Ok(line.split_whitespace().nth(1).ok_or("no number")?.parse::<f64>()? / 1e3)
}

/// The same sentences over and over: what they say is of no account here.
fn make(source: &Path, target: &Path, bytes: usize) -> Outcome {
    let folder = tempfile::tempdir()?;
    synth::write(folder.path(), &SynthOptions::default())?;
    let texts = ["train.src", "train.tgt"].map(|name| std::fs::read(folder.path().join(name)));
    let [source_text, target_text] = texts;
    let (source_text, target_text) = (source_text?, target_text?);
    let times = bytes.div_ceil(source_text.len() + target_text.len());
    for (path, text) in [(source, source_text), (target, target_text)] {
        let mut file = BufWriter::new(File::create(path)?);
        for _ in 0..times {
            file.write_all(&text)?;
        }
        file.flush()?;
    }
    Ok(())
}
