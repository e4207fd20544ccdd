//! `drumline-bench gpu`: the steps that `bench/gpu/run.py` times on a GPU, beside PyTorch's. Weights and data are formulas, so
//! that losses can be compared.

use std::path::Path;
use std::time::Instant;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use drumline::optim::{AdamOptions, AdamW, Optimizer, ParameterGroups, Sgd, SgdOptions, parameters};
use drumline::trainer::Mode as Phase;
use drumline_torch::cuda::{self, GraphedStep};
use drumline_torch::{
    Autocast, Beside, Masks, MasterWeights, StepSamples, TorchError, allow_tf32, channels_last,
    weights_channels_last, weights_in,
};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use drumline_zoo::formula::{Samples, fill, samples, tokens};
use drumline_zoo::gpt::GptConfig;
use drumline_zoo::models::gpt::{Gpt, GptOptions};
use drumline_zoo::models::{self, Checkpointing, Model, ModelOptions};

const GPU: Device = Device::Cuda(0);
const WARM_UP: usize = 10;
/// Steps between two looks at the clock.
const CHUNK: usize = 10;

/// How a step is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// Launched operation after operation.
    Eager,
    /// As one CUDA graph.
    Graph,
}

/// In which numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    Fp32,
    /// Products and convolutions in bfloat16, weights cast where they are used.
    Bf16,
    /// The weights themselves in bfloat16, with copies in f32 that the optimizer steps.
    Bf16Master,
}

/// Time training steps on a GPU
#[derive(Debug, Args)]
pub(super) struct GpuArgs {
    /// resnet18, resnet50, gpt2, or a configuration of a GPT, such as config/gpt2-medium.yaml, whose sizes are used
    #[arg(long)]
    model: String,
    /// How a step is made
    #[arg(long)]
    mode: Mode,
    /// In which numbers
    #[arg(long, default_value = "bf16-master")]
    precision: Precision,
    /// Samples of a batch
    #[arg(long)]
    batch: i64,
    /// Side of an image
    #[arg(long, default_value_t = 32)]
    edge: i64,
    /// Tokens of a text, at most as many as the model has places
    #[arg(long, default_value_t = 1024)]
    length: i64,
    /// Parts into which the places of a GPT's batch are split for its loss, by default as configured
    #[arg(long)]
    loss_chunks: Option<i64>,
    /// What is kept of a GPT's blocks for backward, by default as configured: none, full, selective or a number
    #[arg(long)]
    checkpoint: Option<Checkpointing>,
    /// Probability of a GPT's dropout, by default as configured
    #[arg(long)]
    dropout: Option<f64>,
    /// Timed steps
    #[arg(long)]
    steps: usize,
}

impl GpuArgs {
    /// The sizes of a GPT, if one is trained.
    fn gpt(&self) -> anyhow::Result<Option<GptOptions>> {
        let gpt2 = GptOptions { vocab_multiple: 128, ..GptOptions::default() };
        let options = if self.model == "gpt2" {
            gpt2
        } else if self.model.ends_with(".yaml") {
            let config = GptConfig::load::<&str>(Some(Path::new(&self.model)), &[])?;
            config.model.options(gpt2.vocab_size as u32)
        } else {
            return Ok(None);
        };
        let loss_chunks = self.loss_chunks.unwrap_or(options.loss_chunks);
        let checkpoint = self.checkpoint.unwrap_or(options.checkpoint);
        let dropout = self.dropout.unwrap_or(options.dropout);
        Ok(Some(GptOptions { loss_chunks, checkpoint, dropout, ..options }))
    }
}

/// What is trained.
enum Net {
    Images(Model),
    Text(Box<Gpt>),
}

/// All that a step needs.
struct Trained {
    net: Net,
    precision: Precision,
    optimizer: Box<dyn Optimizer>,
    masks: Masks,
    input: Tensor,
    target: Tensor,
    beside: Option<Beside>,
    _store: VarStore,
}

impl Trained {
    fn new(args: &GpuArgs) -> anyhow::Result<Self> {
        let store = VarStore::new(GPU);
        let gpt = args.gpt()?;
        let is_text = gpt.is_some();
        let (net, input, target) = if let Some(options) = gpt {
            // As many tokens as the peer has, though the last are in no text.
            let padded = GptOptions { vocab_size: options.padded_vocab(), ..options.clone() };
            let net = Gpt::new(&store.root(), &padded)?;
            let (input, target) =
                tokens(args.batch, args.length.min(options.n_positions), options.vocab_size);
            (Net::Text(Box::new(net)), input.to_device(GPU), target.to_device(GPU))
        } else {
            let num_classes = if args.edge > 64 { 1000 } else { 10 };
            let net = models::build(
                &args.model,
                &store.root(),
                &ModelOptions { num_classes, ..ModelOptions::default() },
            )?;
            let (images, labels) = samples(Samples { first: 0, count: args.batch, edge: args.edge });
            (Net::Images(net), channels_last(&images.to_device(GPU))?, labels.to_device(GPU))
        };
        fill(&store);
        weights_channels_last(&parameters(&store))?;
        let optimizer = optimizer(&store, args.precision, is_text)?;
        let beside = (args.mode == Mode::Graph && !is_text).then(|| Beside::new(0)).transpose()?;
        let masks = Masks::new(1, GPU)?;
        Ok(Self { net, precision: args.precision, optimizer, masks, input, target, beside, _store: store })
    }

    /// Leaves the mean loss.
    fn step(&mut self) -> Result<Tensor, TorchError> {
        self.optimizer.zero_grad()?;
        self.masks.advance()?;
        let count = self.input.size()[0] as u64;
        let _masks = self.masks.enter(StepSamples { first: 0, stride: 1, count });
        let loss = match &self.beside {
            Some(beside) => {
                let loss = beside.forward(|| self.loss())?;
                beside.backward(|| Ok::<_, TorchError>(loss.f_backward()?))?;
                loss
            }
            None => {
                let loss = self.loss()?;
                loss.f_backward()?;
                loss
            }
        };
        self.optimizer.step()?;
        Ok(loss.detach())
    }

    fn loss(&self) -> Result<Tensor, TorchError> {
        let is_short = self.precision != Precision::Fp32;
        let _scope = is_short.then(|| Autocast::new(GPU, Kind::BFloat16)).transpose()?;
        Ok(match &self.net {
            Net::Images(net) => net.forward_t(&self.input, true).cross_entropy_for_logits(&self.target),
            Net::Text(net) => {
                let sum = net.loss(&self.input, &self.target, Phase::Train);
                let failed = |cause| TorchError::Custom { operation: "the loss failed", cause };
                sum.map_err(failed)? / self.target.numel() as f64
            }
        })
    }
}

fn optimizer(store: &VarStore, precision: Precision, is_text: bool) -> anyhow::Result<Box<dyn Optimizer>> {
    if is_text {
        let adam = AdamOptions { lr: 3e-4, ..AdamOptions::default() };
        return with_precision(store, precision, |all| AdamW::new(all, adam));
    }
    let sgd =
        SgdOptions { lr: 0.01, momentum: 0.9, weight_decay: 5e-5, nesterov: true, ..SgdOptions::default() };
    with_precision(store, precision, |all| Sgd::new(all, sgd))
}

fn with_precision<O: Optimizer + 'static>(
    store: &VarStore,
    precision: Precision,
    make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
) -> anyhow::Result<Box<dyn Optimizer>> {
    if precision != Precision::Bf16Master {
        return Ok(Box::new(make(parameters(store).into())?));
    }
    weights_in(&parameters(store), Kind::BFloat16)?;
    Ok(Box::new(MasterWeights::new(parameters(store), make)?))
}

/// Trains on one batch again and again, and prints one JSON line.
pub(super) fn run(args: &GpuArgs) -> anyhow::Result<()> {
    ensure!(args.steps > 0, "nothing to time; try --steps 100");
    let began = Instant::now();
    cuda::open()?;
    tch::Cuda::cudnn_set_benchmark(true);
    if args.precision == Precision::Fp32 {
        allow_tf32(false)?;
    }
    let mut trained = Trained::new(args)?;
    let mut graphed = GraphedStep::new(0)?;
    let mut one = || -> anyhow::Result<Tensor> {
        Ok(match args.mode {
            Mode::Graph => graphed.run(|| trained.step())?.shallow_clone(),
            Mode::Eager => trained.step()?,
        })
    };
    let (mut losses, mut times) = (vec![one()?.double_value(&[])], Vec::new());
    let first_step_s = began.elapsed().as_secs_f64();
    for _ in 1..WARM_UP {
        losses.push(one()?.double_value(&[]));
    }
    for _ in 0..args.steps.div_ceil(CHUNK) {
        cuda::synchronize(0)?;
        let began = Instant::now();
        for _ in 0..CHUNK {
            drop(one()?);
        }
        cuda::synchronize(0)?;
        times.push(began.elapsed().as_secs_f64() * 1e3 / CHUNK as f64);
    }
    losses.push(one()?.double_value(&[]));
    times.sort_by(f64::total_cmp);
    let (step_ms, memory) = (times[times.len() / 2], cuda::memory(0)?);
    let (peak_bytes, reserved_bytes) = (memory.peak_allocated, memory.peak_reserved);
    let per_s = args.batch as f64 / step_ms * 1e3;
    println!(
        "{}",
        json!({
            "step_ms": step_ms, "per_s": per_s, "losses": losses, "first_step_s": first_step_s, "peak_bytes": peak_bytes,
            "reserved_bytes": reserved_bytes, "recorded": graphed.is_recorded(),
        })
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: GpuArgs,
    }

    fn gpt(model: &str) -> anyhow::Result<Option<GptOptions>> {
        let words = ["x", "--model", model, "--mode", "eager", "--batch", "1", "--steps", "1"];
        Cli::parse_from(words).args.gpt()
    }

    #[test]
    fn any_configuration_of_a_gpt_can_be_timed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
        let medium = gpt(&folder.join("gpt2-medium.yaml").to_string_lossy()).unwrap().unwrap();
        assert_eq!((medium.n_layer, medium.n_embd, medium.padded_vocab()), (24, 1024, 50304));
        assert_eq!(gpt("gpt2").unwrap().unwrap().padded_vocab(), 50304);
        assert_eq!(gpt("resnet18").unwrap(), None);
        assert!(gpt("nothing.yaml").is_err());
    }
}
