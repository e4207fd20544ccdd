//! `drumline-bench shard-gpu`: steps of a GPT on GPUs with each stage of ZeRO, which `bench/gpu/shard.py` times beside PyTorch's
//! FSDP2. Weights and tokens are formulas, so that losses can be compared.

use std::time::Instant;

use clap::Args;
use drumline::engine::{Engine, GradSync, ParallelError};
use drumline::optim::{AdamOptions, AdamW, Optimizer, parameters};
use drumline::trainer::Mode as Phase;
use drumline::{ProcessGroup, ReduceOp};
use drumline_torch::cuda::{self, GraphedStep};
use drumline_torch::{Autocast, MasterWeights, TorchError, weights_in};
use serde_json::json;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use drumline_zoo::formula::{fill, tokens};
use drumline_zoo::models::gpt::{Gpt, GptOptions};

use crate::gpu::Mode;
use crate::shard::{How, Size, engine};

const GPU: Device = Device::Cuda(0);
const WARM_UP: usize = 8;
/// Steps between two looks at the clock.
const CHUNK: usize = 5;

/// Time steps of a GPT on GPUs whose states are divided among ranks
#[derive(Debug, Args)]
pub(super) struct ShardGpuArgs {
    /// How ranks train: a stage of ZeRO (0 is DDP), or `alone`, each a model of its own
    #[arg(long)]
    how: How,
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// How a step is made
    #[arg(long)]
    mode: Mode,
    /// Let a single rank divide, gather and reduce as if there were several
    #[arg(long)]
    shards_alone: bool,
    /// Texts of a rank's batch
    #[arg(long)]
    batch: i64,
    /// Tokens of a text
    #[arg(long, default_value_t = 1024)]
    places: i64,
    /// Timed steps
    #[arg(long)]
    steps: usize,
}

struct Trained {
    model: Gpt,
    engine: Box<dyn Engine>,
    optimizer: MasterWeights<AdamW>,
    inputs: Tensor,
    targets: Tensor,
    _store: VarStore,
}

impl Trained {
    fn new(args: &ShardGpuArgs, group: &ProcessGroup) -> anyhow::Result<Self> {
        let store = VarStore::new(GPU);
        // As many tokens as the peer has, though the last are in no text.
        let options = args.size.options();
        let model =
            Gpt::new(&store.root(), &GptOptions { vocab_size: options.padded_vocab(), ..options.clone() })?;
        fill(&store);
        weights_in(&parameters(&store), Kind::BFloat16)?;
        let adam = AdamOptions { lr: 3e-4, ..AdamOptions::default() };
        let mut optimizer = MasterWeights::new(parameters(&store), |all| AdamW::new(all, adam))?;
        let engine = engine(args.how, args.shards_alone, &store, group)?;
        engine.adopt(&mut optimizer)?;
        let (inputs, targets) = tokens(args.batch * group.size() as i64, args.places, options.vocab_size);
        let own = |all: Tensor| all.narrow(0, args.batch * group.rank() as i64, args.batch).to_device(GPU);
        let (inputs, targets) = (own(inputs), own(targets));
        Ok(Self { model, engine, optimizer, inputs, targets, _store: store })
    }

    fn step(&mut self) -> Result<Tensor, ParallelError> {
        self.optimizer.zero_grad()?;
        let loss = self.engine.forward_with(GradSync::Reduce, || {
            let _autocast = Autocast::new(GPU, Kind::BFloat16)?;
            let sum = self.model.loss(&self.inputs, &self.targets, Phase::Train);
            let failed = |cause| TorchError::Custom { operation: "the loss failed", cause };
            Ok::<_, TorchError>(sum.map_err(failed)? / self.targets.numel() as f64)
        })??;
        self.engine.backward(&loss, GradSync::Reduce)?;
        self.engine.step(&mut self.optimizer)?;
        Ok(loss.detach())
    }
}

/// Trains on one batch again and again, and rank 0 prints one JSON line.
pub(super) fn run(args: &ShardGpuArgs) -> anyhow::Result<()> {
    cuda::open()?;
    let group = ProcessGroup::from_env()?;
    let mut trained = Trained::new(args, &group)?;
    // What only making the model needed does not count.
    cuda::empty_cache()?;
    cuda::reset_peak(0)?;
    let mut graphed = GraphedStep::new(0)?;
    let mut one = || -> anyhow::Result<Tensor> {
        Ok(match args.mode {
            Mode::Graph => graphed.run(|| trained.step())?.shallow_clone(),
            Mode::Eager => trained.step()?,
        })
    };
    let mut losses = Vec::new();
    for _ in 0..WARM_UP {
        losses.push(one()?.double_value(&[]));
    }
    let mut times = Vec::new();
    for _ in 0..args.steps.div_ceil(CHUNK) {
        cuda::synchronize(0)?;
        group.barrier()?;
        let began = Instant::now();
        for _ in 0..CHUNK {
            drop(one()?);
        }
        cuda::synchronize(0)?;
        times.push(began.elapsed().as_secs_f64() * 1e3 / CHUNK as f64);
    }
    group.all_reduce(&mut losses, ReduceOp::Avg)?;
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.sort_by(f64::total_cmp);
    let memory = cuda::memory(0)?;
    let (peak_bytes, reserved_bytes) = (memory.peak_allocated, memory.peak_reserved);
    if group.rank() == 0 {
        let step_ms = times[times.len() / 2];
        println!(
            "{}",
            json!({ "step_ms": step_ms, "losses": losses, "peak_bytes": peak_bytes, "reserved_bytes": reserved_bytes })
        );
    }
    Ok(())
}
