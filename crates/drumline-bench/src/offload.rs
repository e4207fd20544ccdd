//! `drumline-bench offload`: steps of a GPT on one GPU with the optimizer's state in host memory, which
//! `bench/gpu/offload.py` times beside PyTorch's FSDP2 with CPU offload. Weights and tokens are formulas, so that losses
//! can be compared.
//!
//! The bound is what no offload is faster than: the larger one of a step without the optimizer, and of the bytes that
//! Adam reads and writes in host memory at the rate of a bare loop.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use drumline::ProcessGroup;
use drumline::comm::Mesh;
use drumline::engine::{
    Clip, Engine, EngineOptions, EngineSetup, GradSync, Offload, ParallelError, Place, ShardOptions, Stage,
};
use drumline::optim::{AdamOptions, AdamW, Optimizer, parameters};
use drumline::trainer::Mode as Phase;
use drumline_torch::cuda;
use drumline_torch::{Autocast, MasterWeights, TorchError, weights_in};
use serde_json::json;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use drumline_zoo::formula::{fill, tokens};
use drumline_zoo::gpt::GptConfig;
use drumline_zoo::models::gpt::{Gpt, GptOptions};

use crate::adam::bandwidth;
use crate::checkpoint::How;

const GPU: Device = Device::Cuda(0);
const WARM_UP: usize = 2;
/// What Adam reads and writes for a parameter: the gradient and the rounded weight in bf16, and three numbers in f32 twice.
const BYTES_OF_ADAM: f64 = 28.0;
/// The bytes of a parameter's state: three numbers in f32.
const BYTES_OF_STATE: f64 = 12.0;

/// Where the optimizer's state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    /// On the GPU.
    None,
    /// In host memory.
    Host,
    /// On the GPU as far as it fits.
    Auto,
}

/// Time steps of a GPT on a GPU whose optimizer's state is in host memory
#[derive(Debug, Args)]
pub(super) struct OffloadArgs {
    /// A configuration of a GPT, such as config/gpt-13b.yaml, whose sizes are used
    #[arg(long)]
    model: PathBuf,
    /// Where the optimizer's state lies
    #[arg(long)]
    to: To,
    /// The part of the state that is offloaded to the host
    #[arg(long, default_value_t = 1.0)]
    ratio: f64,
    /// A stage of ZeRO, in which a single rank divides, gathers and reduces as if there were several; 0 does not
    #[arg(long, default_value = "0")]
    stage: Stage,
    /// What is kept of blocks for backward
    #[arg(long, default_value = "none")]
    checkpoint: How,
    /// Texts of a micro-batch
    #[arg(long, default_value_t = 4)]
    batch: i64,
    /// Tokens of a text
    #[arg(long, default_value_t = 1024)]
    places: i64,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 1)]
    accumulate: usize,
    /// Parts into which the places of a batch are split for its loss, by default as configured
    #[arg(long)]
    loss_chunks: Option<i64>,
    /// Clip the norm of all gradients
    #[arg(long, conflicts_with = "in_backward")]
    clip: Option<f64>,
    /// Step units in backward, as soon as their gradients are complete
    #[arg(long)]
    in_backward: bool,
    /// Timed steps
    #[arg(long)]
    steps: usize,
    /// Keys of the configuration with other values, such as MODEL.N_EMBD 4608
    keys: Vec<String>,
}

impl OffloadArgs {
    fn options(&self) -> anyhow::Result<GptOptions> {
        let config = GptConfig::load(Some(Path::new(&self.model)), &self.keys)?;
        let options = config.model.options(GptOptions::default().vocab_size as u32);
        let loss_chunks = self.loss_chunks.unwrap_or(options.loss_chunks);
        let n_positions = self.places.max(options.n_positions);
        Ok(GptOptions { loss_chunks, n_positions, checkpoint: self.checkpoint.checkpointing(), ..options })
    }

    fn offload(&self) -> Offload {
        let optimizer = match self.to {
            To::None => Place::Device,
            To::Host => Place::Host,
            To::Auto => Place::Auto(PathBuf::from(".")),
        };
        Offload { optimizer, ratio: self.ratio, ..Offload::default() }
    }
}

struct Trained {
    model: Gpt,
    engine: Box<dyn Engine>,
    optimizer: MasterWeights<AdamW>,
    inputs: Tensor,
    targets: Tensor,
    num_micro_batches: usize,
    clip: Option<f64>,
    num_parameters: usize,
    _store: VarStore,
}

impl Trained {
    fn new(args: &OffloadArgs, group: &ProcessGroup) -> anyhow::Result<Self> {
        let store = VarStore::new(GPU);
        let options = args.options()?;
        // As many tokens as the peer has, though the last are in no text.
        let padded = GptOptions { vocab_size: options.padded_vocab(), ..options.clone() };
        let model = Gpt::new(&store.root(), &padded)?;
        fill(&store);
        weights_in(&parameters(&store), Kind::BFloat16)?;
        let num_parameters = parameters(&store).iter().map(|named| named.tensor.numel()).sum();
        let adam = AdamOptions { lr: 1e-4, ..AdamOptions::default() };
        let mut optimizer = MasterWeights::new(parameters(&store), |all| AdamW::new(all, adam))?;
        let shards_alone = args.stage != Stage::Zero0;
        let engine = ShardOptions { shards_alone, offload: args.offload(), ..ShardOptions::new(args.stage) };
        let mesh = Mesh::new(group, engine.mesh_shape(group.size())?)?;
        let engine = Box::new(engine).engine(EngineSetup::new(&store, &mesh))?;
        engine.adopt(&mut optimizer)?;
        let texts = args.batch * args.accumulate as i64;
        let (inputs, targets) = tokens(texts, args.places, options.vocab_size);
        let (inputs, targets) = (inputs.to_device(GPU), targets.to_device(GPU));
        let (num_micro_batches, clip) = (args.accumulate, args.clip);
        Ok(Self {
            model,
            engine,
            optimizer,
            inputs,
            targets,
            num_micro_batches,
            clip,
            num_parameters,
            _store: store,
        })
    }

    /// Forward and backward of all micro-batches, and if `steps` the step in the last one. Returns the mean loss.
    fn compute(&mut self, steps: bool) -> Result<Tensor, ParallelError> {
        self.optimizer.zero_grad()?;
        let mut sum = Tensor::zeros([], (Kind::Float, GPU));
        let (num, count) = (self.num_micro_batches, self.targets.numel() as f64);
        let parts = self.inputs.chunk(num as i64, 0).into_iter().zip(self.targets.chunk(num as i64, 0));
        for (micro_batch, (inputs, targets)) in parts.enumerate() {
            let sync = GradSync::of(micro_batch, num);
            self.engine.begin_micro_batch();
            let loss = self.engine.forward_with(sync, || {
                let _autocast = Autocast::new(GPU, Kind::BFloat16)?;
                let failed = |cause| TorchError::Custom { operation: "the loss failed", cause };
                let loss = self.model.loss(&inputs, &targets, Phase::Train).map_err(failed)? / count;
                Ok::<_, TorchError>(loss)
            })??;
            if steps && sync == GradSync::Reduce {
                self.engine.backward_and_step(&loss, &mut self.optimizer)?;
            } else {
                self.engine.backward(&loss, sync)?;
            }
            sum += loss.detach();
        }
        Ok(sum)
    }

    fn update(&mut self) -> Result<(), ParallelError> {
        if let Some(norm) = self.clip {
            self.engine.clip(Clip::Norm(norm), &self.optimizer.parameters())?;
        }
        self.engine.step(&mut self.optimizer)
    }
}

/// The median time of some runs in milliseconds.
fn timed(num: usize, mut body: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..num {
        cuda::synchronize(0)?;
        let began = Instant::now();
        body()?;
        cuda::synchronize(0)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The bytes of state in host memory, as the note of the decision says.
fn bytes_on_host(note: &str) -> f64 {
    let row = note.lines().find_map(|line| line.trim().strip_prefix("host "));
    let words: Vec<&str> = row.map(|row| row.split_whitespace().collect()).unwrap_or_default();
    words.get(2).and_then(|mb| mb.parse::<f64>().ok()).map_or(0.0, |mb| mb * 1e6)
}

/// Trains on one batch again and again, and prints one JSON line.
pub(super) fn run(args: &OffloadArgs) -> anyhow::Result<()> {
    ensure!(args.steps > 0, "nothing to time; try --steps 5");
    cuda::open()?;
    let group = ProcessGroup::from_env()?;
    let threads = tch::get_num_threads() as usize;
    let rate = bandwidth(threads, 128)?;
    let began = Instant::now();
    let mut trained = Trained::new(args, &group)?;
    let note = trained.engine.offload_note().unwrap_or_default();
    eprintln!("{note}\nready after {:.1} s", began.elapsed().as_secs_f64());
    // What only making the model needed does not count.
    cuda::empty_cache()?;
    cuda::reset_peak(0)?;
    let mut losses = Vec::new();
    let mut step = |trained: &mut Trained| -> anyhow::Result<()> {
        losses.push(trained.compute(args.in_backward)?);
        if !args.in_backward {
            trained.update()?;
        }
        Ok(())
    };
    let began = Instant::now();
    step(&mut trained)?;
    cuda::synchronize(0)?;
    eprintln!("first step after {:.1} s", began.elapsed().as_secs_f64());
    for _ in 1..WARM_UP {
        step(&mut trained)?;
    }
    let step_ms = timed(args.steps, || step(&mut trained))?;
    let memory = cuda::memory(0)?;
    let compute_ms = timed(args.steps.min(5), || Ok(trained.compute(false).map(drop)?))?;
    let update_ms = timed(args.steps.min(5), || Ok(trained.update()?))?;
    let on_host = bytes_on_host(&note) / BYTES_OF_STATE;
    let adam_ms = on_host * BYTES_OF_ADAM / rate * 1e3;
    let losses: Vec<f64> = losses.iter().map(|loss| loss.double_value(&[])).collect();
    println!(
        "{}",
        json!({
            "step_ms": step_ms,
            "compute_ms": compute_ms,
            "update_ms": update_ms,
            "adam_at_bandwidth_ms": adam_ms,
            "over_bound": step_ms / compute_ms.max(adam_ms),
            "bytes_per_s": rate,
            "threads": threads,
            "parameters": trained.num_parameters,
            "parameters_on_host": on_host,
            "tokens": trained.targets.numel(),
            "peak_bytes": memory.peak_allocated,
            "reserved_bytes": memory.peak_reserved,
            "state": note,
            "losses": losses,
        })
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_of_the_engine_says_what_is_on_the_host() {
        let note = "where each rank's optimizer state lies:\n  device     2 units        0.1 MB\n  host      \
                    50 units    18686.4 MB, and 4217.6 MB pinned for 4217.5 MB of weights and gradients";
        assert_eq!(bytes_on_host(note), 18_686.4e6);
        assert_eq!(bytes_on_host(""), 0.0);
    }
}
