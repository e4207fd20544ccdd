//! `drumline-train translate`: translates a file with all ranks and writes the lines in their order.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use drumline::comm::{Exchange, ensure_alike};
use drumline_observe::bar::{At, Figure, Pace, Progress};
use drumline_text::bleu::BleuStats;
use drumline_text::{BatchBy, detokenized};
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::Device;
use tch::nn::VarStore;

use super::args::device_kind;
use super::kind::{Kind, kind_of};
use crate::config::DeviceKind;
use crate::decode::BeamOptions;
use crate::driver::{Job, check_device, check_writable, checksum, say};
use crate::models::transformer::{Specials, Transformer};
use crate::nmt::{
    CONFIG, Codecs, Judge, Lines, NmtConfig, References, SourceLines, Translated, Translator, WorkOptions,
    bleu_options, transformer, write_lines,
};
use crate::weights;
use crate::weights_file::weights_file;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BatchingKey {
    Samples,
    Tokens,
}

/// Translate a text file with all ranks, which take batches from a shared queue
#[derive(Debug, Args)]
pub(super) struct TranslateArgs {
    /// Weights: a folder of checkpoints (the best is used) or the run's folder above it, a checkpoint, or a
    /// .safetensors file; several are an ensemble
    #[arg(long, alias = "model_path", alias = "model-path", value_name = "PATH", required = true, num_args = 1.., value_delimiter = ',')]
    model: Vec<PathBuf>,
    /// Text to translate, one sentence per line
    #[arg(long, alias = "source_path", alias = "source-path", value_name = "FILE")]
    source: PathBuf,
    /// File for the translations; FILE.0, FILE.1, … if --keep-n is more than 1
    #[arg(long, alias = "saveto", value_name = "FILE")]
    out: PathBuf,
    /// The training's configuration [default: config.yaml beside the checkpoints]
    #[arg(long, alias = "config_path", alias = "config-path", alias = "cfg", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Reference translations, for BLEU
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Beam size
    #[arg(long, alias = "beam_size", default_value_t = 5, value_name = "N")]
    beam_size: usize,
    /// Length penalty; 0 or less: none, scores are divided by the length
    #[arg(long, default_value_t = -1.0, allow_hyphen_values = true, value_name = "A")]
    alpha: f64,
    /// Number of translations per sentence
    #[arg(long, alias = "keep_n", default_value_t = 1, value_name = "N")]
    keep_n: usize,
    /// Longest translation, in tokens
    #[arg(long, alias = "max_steps", default_value_t = 150, value_name = "N")]
    max_steps: usize,
    /// Batch size
    #[arg(long, alias = "batch_size", default_value_t = 1024, value_name = "N")]
    batch_size: usize,
    /// What the batch size counts
    #[arg(long, alias = "batching_key", value_enum, default_value = "tokens")]
    batching_key: BatchingKey,
    /// Join word pieces and detokenise
    #[arg(long)]
    postprocess: bool,
    /// Gather translations through files in this folder, which all ranks see [default: sent from rank to rank]
    #[arg(long, alias = "shared_dir", value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// Device to compute on: auto, cpu or cuda [default: run_configs.device]
    #[arg(long, value_name = "DEVICE", value_parser = device_kind)]
    device: Option<DeviceKind>,
    /// Flag of NJUNMT's command line; ignored
    #[arg(long = "multi_gpu", alias = "multi-gpu", hide = true)]
    _multi_gpu: bool,
    #[arg(long = "model_name", alias = "model-name", hide = true)]
    _model_name: Option<String>,
    /// The same as --device cuda
    #[arg(long = "use_gpu", alias = "use-gpu", conflicts_with = "device")]
    use_gpu: bool,
}

impl TranslateArgs {
    fn search(&self) -> BeamOptions {
        BeamOptions {
            beam_size: self.beam_size,
            alpha: self.alpha,
            keep_n: self.keep_n,
            max_steps: self.max_steps,
            // The batches are already planned.
            batch: usize::MAX,
            specials: Specials::default(),
        }
    }

    fn device(&self, config: &NmtConfig) -> DeviceKind {
        let asked = if self.use_gpu { Some(DeviceKind::Cuda) } else { self.device };
        asked.unwrap_or(config.run.device)
    }

    fn outputs(&self) -> Vec<PathBuf> {
        match self.keep_n {
            1 => vec![self.out.clone()],
            several => (0..several).map(|place| self.out.with_added_extension(place.to_string())).collect(),
        }
    }
}

/// What every rank checks and reads by itself.
struct Checked {
    config: NmtConfig,
    device: DeviceKind,
    codecs: Codecs,
    lines: Lines,
    weights: Vec<PathBuf>,
}

/// Returns an error if the command line is invalid, or if a file that it names does not exist.
pub(super) fn check(args: &TranslateArgs) -> anyhow::Result<()> {
    check_numbers(args)?;
    let weights = args.model.iter().map(|path| weights_file(path)).collect::<Result<Vec<_>, _>>()?;
    config(args, &weights[0])?;
    std::fs::File::open(&args.source)
        .with_context(|| format!("cannot read {}", args.source.display()))
        .map(drop)
}

fn check_numbers(args: &TranslateArgs) -> anyhow::Result<()> {
    let numbers =
        [("--batch-size", args.batch_size), ("--keep-n", args.keep_n), ("--beam-size", args.beam_size)];
    if let Some((flag, _)) = numbers.into_iter().find(|(_, number)| *number == 0) {
        bail!("{flag} is 0; try 1 or more");
    }
    if args.keep_n > args.beam_size {
        bail!("--keep-n is {}, but --beam-size {}; try a greater beam", args.keep_n, args.beam_size);
    }
    Ok(())
}

impl Checked {
    fn new(args: &TranslateArgs) -> anyhow::Result<Self> {
        check_numbers(args)?;
        let weights = args.model.iter().map(|path| weights_file(path)).collect::<Result<Vec<_>, _>>()?;
        let config = config(args, &weights[0])?;
        let device = args.device(&config);
        check_device(device)?;
        let codecs = Codecs::read(&config)?;
        let by = match args.batching_key {
            BatchingKey::Samples => BatchBy::Samples(args.batch_size),
            BatchingKey::Tokens => BatchBy::Tokens(args.batch_size),
        };
        let lines = Lines::open(&args.source, &codecs, by)?;
        Ok(Self { config, device, codecs, lines, weights })
    }

    /// The settings and checksums that must be the same on all ranks.
    fn given(&self, args: &TranslateArgs) -> anyhow::Result<Vec<(String, String)>> {
        let mut given = Vec::new();
        let mut add = |name: &str, value: String| given.push((name.to_owned(), value));
        let TranslateArgs { batch_size, batching_key, .. } = args;
        add("the search", format!("{:?}", args.search()));
        add("the size of a batch", format!("{batch_size} {batching_key:?}"));
        add("a shared_dir", args.shared_dir.is_some().to_string());
        add("the text of the source", checksum(&args.source)?.to_string());
        let vocabularies = self.config.data.vocabularies.iter();
        let files = vocabularies.flat_map(|keys| std::iter::once(&keys.dict_path).chain(keys.codes.as_ref()));
        for file in files {
            add("the vocabulary", checksum(file)?.to_string());
        }
        for file in &self.weights {
            add("the weights", checksum(file)?.to_string());
        }
        Ok(given)
    }
}

/// Loads the given configuration, or the one that a training run has written beside its checkpoints, with its
/// vocabularies.
fn config(args: &TranslateArgs, weights: &Path) -> anyhow::Result<NmtConfig> {
    let load = |file: &Path| -> anyhow::Result<NmtConfig> {
        let is_other = file.is_file() && kind_of(file) != Kind::Translation;
        ensure!(
            !is_other,
            "{} is not the configuration of a translation run; try one with NJUNMT's keys",
            file.display()
        );
        Ok(NmtConfig::load::<&str>(Some(file), &[])?)
    };
    if let Some(given) = &args.config {
        return load(given);
    }
    // The file, its checkpoint, their folder, the run's folder, and the one above.
    let mut folders = weights.ancestors().take(5);
    let beside = folders.find(|folder| folder.join(CONFIG).is_file()).with_context(|| {
        format!(
            "no {CONFIG} beside {} or above it; try --config FILE, the training's configuration",
            weights.display()
        )
    })?;
    Ok(load(&beside.join(CONFIG))?.found_in(beside))
}

/// Translates as the command line says.
pub(super) fn run(args: &TranslateArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    let job = Job::join()?;
    let checked = job.agree(Checked::new(args))?;
    let given = job.agree(checked.given(args))?;
    ensure_alike(&job.group, "task", given)?;
    let judge = job.agree(if job.is_rank_0() { judge(args, &checked) } else { Ok(None) })?;
    job.on_rank_0(|| check_output(args))?;
    let device = job.device(checked.device)?;
    let loaded = job.agree(load(&checked, device))?;
    let translator = Translator {
        models: loaded.iter().map(|(model, _)| model).collect(),
        codecs: &checked.codecs,
        search: args.search(),
        device,
    };
    let work = WorkOptions {
        group: &job.group,
        queue: job.queue.clone().of_len(checked.lines.num_batches()),
        exchange: Exchange::by(args.shared_dir.as_deref()),
        stop: job.stop.clone(),
    };
    let progress = if job.is_rank_0() { Progress::new(20) } else { Progress::silent() };
    let translated = translator.translate(&checked.lines, &work, shown(&progress, &checked.lines));
    progress.finish();
    let summary = translated?.map(|translated| finish(args, translated, judge.as_ref())).transpose();
    if let Some(summary) = job.agree(summary)? {
        say(&summary);
    }
    Ok(())
}

fn judge(args: &TranslateArgs, checked: &Checked) -> anyhow::Result<Option<Judge>> {
    let Some(path) = &args.reference else { return Ok(None) };
    let source = SourceLines { path: &args.source, count: checked.lines.len() };
    let references = References::open(path, 1, source)?;
    Ok(Some(Judge { references, options: bleu_options(&checked.config)? }))
}

fn check_output(args: &TranslateArgs) -> anyhow::Result<()> {
    let folder = args.out.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = args.outputs().iter().find(|path| path.is_dir()) {
        bail!("--out {} is a folder; try a file in it", folder.display());
    }
    check_writable("the folder of --out", folder.unwrap_or(Path::new(".")))?;
    args.shared_dir.as_ref().map_or(Ok(()), |folder| check_writable("--shared-dir", folder))
}

fn load(checked: &Checked, device: Device) -> anyhow::Result<Vec<(Transformer, VarStore)>> {
    let load = |file: &PathBuf| {
        let store = VarStore::new(device);
        let model = transformer(&checked.config, &checked.codecs, &store)?;
        weights::load(&store, file)?;
        Ok((model, store))
    };
    checked.weights.iter().map(load).collect()
}

fn shown<'a>(progress: &'a Progress, lines: &Lines) -> impl FnMut(usize) + use<'a> {
    let steps = lines.num_batches() as u64;
    let mut pace = Pace::new();
    progress.begin_epoch(At { epoch: 0, epochs: 1, step: 0, steps });
    move |number| {
        pace.step(1);
        let step = number as u64 + 1;
        let figure = Figure::unnamed(format!("{:.1} batches/s of rank 0", pace.mean()));
        progress.step(At { epoch: 0, epochs: 1, step, steps }, &[figure], None);
    }
}

/// Writes the translations and returns a summary.
fn finish(args: &TranslateArgs, translated: Translated, judge: Option<&Judge>) -> anyhow::Result<String> {
    let Translated { lines, tokens, seconds, ranks } = translated;
    let shown = |text: &String| if args.postprocess { detokenized(text) } else { text.clone() };
    for (place, path) in args.outputs().iter().enumerate() {
        let texts: Vec<_> = lines.iter().map(|kept| shown(&kept[place])).collect();
        write_lines(path, &texts)?;
    }
    let at_work: f64 = ranks.iter().map(|(_, at_work)| at_work).sum();
    let busy = 100.0 * at_work / (seconds * ranks.len() as f64).max(1e-9);
    let mut summary = format!(
        "translated {} lines in {seconds:.1} s: {tokens} tokens, {:.0} tokens/s by {} ranks, {busy:.0} % of the time at work; {}",
        lines.len(),
        tokens as f64 / seconds.max(1e-9),
        ranks.len(),
        args.out.display()
    );
    if let Some(judge) = judge {
        let mut stats = BleuStats::default();
        for (line, kept) in lines.iter().enumerate() {
            stats += judge.stats(line, &shown(&kept[0]))?;
        }
        summary.push_str(&format!("\n{stats}"));
    }
    Ok(summary)
}
