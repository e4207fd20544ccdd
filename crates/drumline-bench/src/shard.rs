//! `drumline-bench shard`: steps of a GPT with each stage of ZeRO, which `cargo xtask bench shard` times and weighs.
//! Weights and tokens are formulas, so that losses can be compared.

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use drumline::comm::{Axis, Mesh};
use drumline::engine::{
    Alone, DdpOptions, Engine, EngineOptions, EngineSetup, GradSync, NoSuchStage, ShardOptions, Stage,
};
use drumline::optim::{AdamOptions, AdamW, Optimizer, parameters};
use drumline::trainer::Mode;
use drumline::{ProcessGroup, ReduceOp};
use drumline_torch::{Named, flush_denormals, keep_freed_memory, set_grad};
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

use drumline_zoo::formula::{fill, tokens};
use drumline_zoo::models::gpt::{Gpt, GptOptions};

const WARM_UP: usize = 2;

/// The model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Size {
    /// 6 layers of 384, 8000 tokens.
    Mini,
    /// GPT-2 with 124 million parameters.
    Gpt2,
    /// With 355 million.
    Medium,
    /// With 774 million.
    Large,
    /// With 1.56 billion.
    Xl,
}

impl Size {
    pub(super) fn options(self) -> GptOptions {
        let gpt2 = |n_layer, n_head, n_embd| GptOptions {
            n_layer,
            n_head,
            n_embd,
            vocab_multiple: 64,
            ..GptOptions::default()
        };
        match self {
            Self::Mini => GptOptions {
                n_layer: 6,
                n_head: 6,
                n_embd: 384,
                n_positions: 256,
                vocab_size: 8000,
                ..GptOptions::default()
            },
            Self::Gpt2 => gpt2(12, 12, 768),
            Self::Medium => gpt2(24, 16, 1024),
            Self::Large => gpt2(36, 20, 1280),
            Self::Xl => gpt2(48, 25, 1600),
        }
    }
}

/// How ranks train together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Stage(Stage),
    Alone,
}

impl FromStr for How {
    type Err = NoSuchStage;

    fn from_str(text: &str) -> Result<Self, NoSuchStage> {
        if text == "alone" { Ok(Self::Alone) } else { text.parse().map(Self::Stage) }
    }
}

/// Time steps of a GPT whose states are divided among ranks
#[derive(Debug, Args)]
pub(super) struct ShardArgs {
    /// How ranks train: a stage of ZeRO (0 is DDP), or `alone`, each a model of its own
    #[arg(long)]
    how: How,
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// Texts of a rank's batch
    #[arg(long)]
    batch: i64,
    /// Tokens of a text
    #[arg(long)]
    places: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
    /// Give freed memory back to the system, so that memory can be compared with formulas
    #[arg(long)]
    weigh: bool,
}

/// Trains, and rank 0 prints one JSON line.
pub(super) fn run(args: &ShardArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    warm_up(&group)?;
    let empty = pss()?;
    if !args.weigh {
        keep_freed_memory();
    }
    let store = VarStore::new(Device::Cpu);
    let options = args.size.options();
    let model = Gpt::new(&store.root(), &options)?;
    fill(&store);
    let engine = engine(args.how, false, &store, &group)?;
    let adam = AdamOptions { lr: 1e-4, ..AdamOptions::default() };
    let (stepped, others) = stepped(args.how, parameters(&store), group.size());
    let mut optimizer = AdamW::new(stepped, adam)?;
    engine.adopt(&mut optimizer)?;
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for step in 0..WARM_UP + args.steps {
        let rank = (step * group.size() + group.rank()) as i64;
        let (inputs, targets) = batch(args, rank, options.vocab_size);
        group.barrier()?;
        let began = Instant::now();
        optimizer.zero_grad()?;
        others.iter().try_for_each(|other| set_grad(&other.tensor, None))?;
        let sum = engine.forward_with(GradSync::Reduce, || model.loss(&inputs, &targets, Mode::Train))?;
        let sum = sum.map_err(anyhow::Error::from_boxed)?;
        let loss = sum / (args.batch * args.places) as f64;
        engine.backward(&loss, GradSync::Reduce)?;
        engine.step(&mut optimizer)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        losses.push(loss.double_value(&[]));
    }
    times.drain(..WARM_UP);
    group.all_reduce(&mut losses, ReduceOp::Avg)?;
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.sort_by(f64::total_cmp);
    let mut states = [pss()? - empty];
    group.all_reduce(&mut states, ReduceOp::Sum)?;
    let num_parameters: usize = parameters(&store).iter().map(|named| named.tensor.numel()).sum();
    let line = json!({
        "step_ms": times[times.len() / 2],
        "losses": losses,
        "pss_bytes": states[0],
        "parameters": num_parameters,
    });
    if group.rank() == 0 {
        println!("{line}");
    }
    Ok(())
}

/// Steps of a small model, after which the code of libtorch is in memory and does not count as the model's.
pub(super) fn warm_up(group: &ProcessGroup) -> anyhow::Result<()> {
    let store = VarStore::new(Device::Cpu);
    let tiny = GptOptions {
        n_layer: 1,
        n_head: 2,
        n_embd: 32,
        n_positions: 8,
        vocab_size: 50,
        ..Size::Mini.options()
    };
    let model = Gpt::new(&store.root(), &tiny)?;
    let mut optimizer = AdamW::new(parameters(&store), AdamOptions::default())?;
    for _ in 0..WARM_UP {
        let (inputs, targets) = tokens(2, 8, tiny.vocab_size);
        let loss = model.loss(&inputs, &targets, Mode::Train).map_err(anyhow::Error::from_boxed)?;
        loss.f_backward()?;
        optimizer.step()?;
    }
    Ok(group.barrier()?)
}

/// The engine; with `shards_alone` a single rank communicates as if there were several.
pub(super) fn engine(
    how: How,
    shards_alone: bool,
    store: &VarStore,
    group: &ProcessGroup,
) -> anyhow::Result<Box<dyn Engine>> {
    let options: Box<dyn EngineOptions> = match how {
        How::Stage(Stage::Zero0) => {
            DdpOptions { reduces_alone: shards_alone, ..DdpOptions::default() }.into()
        }
        How::Stage(stage) => ShardOptions { shards_alone, ..ShardOptions::new(stage) }.into(),
        How::Alone => {
            let alone = group.split(Some(group.rank() as u32), 0)?.context("a rank is in its own group")?;
            return Ok(Box::new(Alone::new(store, &Mesh::along(&alone, Axis::Dp)?)));
        }
    };
    let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
    Ok(options.engine(EngineSetup::new(store, &mesh))?)
}

/// The parameters that a rank steps, and the others. Ranks that do not communicate step as many as if they had divided them, so
/// that their step differs from a sharded one by communication alone.
fn stepped(how: How, all: Vec<Named>, num_ranks: usize) -> (Vec<Named>, Vec<Named>) {
    if how != How::Alone {
        return (all, Vec::new());
    }
    let mut left = all.iter().map(|named| named.tensor.numel()).sum::<usize>() / num_ranks;
    all.into_iter().partition(|named| {
        let is_stepped = named.tensor.numel() <= left;
        left -= if is_stepped { named.tensor.numel() } else { 0 };
        is_stepped
    })
}

/// The batch of a rank and step.
fn batch(args: &ShardArgs, index: i64, vocabulary: i64) -> (tch::Tensor, tch::Tensor) {
    let (inputs, targets) = tokens((index + 1) * args.batch, args.places, vocabulary);
    let own = |all: tch::Tensor| all.narrow(0, index * args.batch, args.batch).contiguous();
    (own(inputs), own(targets))
}

/// This process's share of the memory that it uses: pages that several processes map count in parts.
pub(super) fn pss() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").context("cannot read the memory in use")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    ensure!(kib.is_some(), "/proc/self/smaps_rollup has no Pss");
    Ok(kib.unwrap_or_default() * 1024.0)
}
