//! A loop with the methods of DeepSpeed's engine, by a `ds_config.json` that is full of `"auto"`: the arguments and the
//! loader fill it.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin deepspeed                         2 ranks, config/deepspeed/zero2.json
//!   cargo run --release -p drumline-examples --bin deepspeed -- --learning-rate 0.01 --bf16
//!   drumline run --nproc-per-node 4 target/release/deepspeed --deepspeed my_config.json
//! ```
//! On the CPU `"fp16": {"enabled": "auto"}` becomes false, unless `--fp16` is given: float16 is slow there.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::ensure;
use clap::Parser;
use drumline::config::deepspeed::{Argument, Betas, Compute, Given, WarmupLength};
use drumline::data::{Cause, DistributedSampler, Loader, LoaderOptions, MapDataset, Sample, SamplerOptions};
use drumline::deepspeed::{self, ConfigSource, DeepSpeedEngine};
use drumline::launch::Spawn;
use drumline::{Accelerator, LogOptions, Worker};
use serde_json::json;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Tensor};

const POINTS: usize = 768;

/// Train a small network by a configuration of DeepSpeed
#[derive(Parser)]
struct Args {
    /// The configuration [default: config/deepspeed/zero2.json, with ZeRO-2, offload and WarmupLR]
    #[arg(long, value_name = "FILE")]
    deepspeed: Option<PathBuf>,
    /// Ranks to start, if no launcher has started some
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    #[arg(long, default_value_t = 16)]
    per_device_train_batch_size: usize,
    #[arg(long, default_value_t = 2)]
    gradient_accumulation_steps: u64,
    #[arg(long, default_value_t = 0.02)]
    learning_rate: f64,
    #[arg(long, default_value_t = 3e-7)]
    weight_decay: f64,
    #[arg(long, default_value_t = 10)]
    warmup_steps: u64,
    #[arg(long, default_value_t = 1.0)]
    max_grad_norm: f64,
    #[arg(long, default_value_t = 10)]
    num_train_epochs: u64,
    /// float16 with a scaled loss
    #[arg(long)]
    fp16: bool,
    /// bfloat16
    #[arg(long, conflicts_with = "fp16")]
    bf16: bool,
    /// Where the checkpoint is saved, and loaded again
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
}

impl Args {
    fn config(&self) -> ConfigSource {
        match &self.deepspeed {
            Some(path) => path.clone().into(),
            None => include_str!("../../../config/deepspeed/zero2.json").into(),
        }
    }

    /// The values for `"auto"`, under the names that Hugging Face's trainer gives them.
    fn given(&self) -> Given {
        let compute = match (self.fp16, self.bf16) {
            (true, _) => Compute::Fp16,
            (_, true) => Compute::Bf16,
            _ => Compute::F32,
        };
        Given {
            accumulation: Some(Argument::given(
                "--gradient-accumulation-steps",
                self.gradient_accumulation_steps,
            )),
            clip_norm: Some(Argument::given("--max-grad-norm", self.max_grad_norm)),
            compute: Some(Argument::given("--fp16 and --bf16", compute)),
            lr: Some(Argument::given("--learning-rate", self.learning_rate)),
            betas: Some(Argument::default("the usual betas of Adam", Betas(0.9, 0.999))),
            eps: Some(Argument::default("the usual epsilon of Adam", 1e-8)),
            weight_decay: Some(Argument::given("--weight-decay", self.weight_decay)),
            warmup: Some(Argument::given("--warmup-steps", WarmupLength::Steps(self.warmup_steps))),
            ..Given::default()
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    Spawn::new(args.ranks).run(|worker| train(&worker, &args))?;
    Ok(())
}

/// What each rank does.
fn train(worker: &Worker, args: &Args) -> anyhow::Result<()> {
    drumline::init_logging(LogOptions { filter: Some("warn".into()), ..LogOptions::default() })?;
    tch::set_num_threads(1);
    let group = worker.group()?;
    let accelerator = || Accelerator::builder().group(&group).cpu().seed(1);
    tch::manual_seed(1); // the initial weights
    let (store, model) = network();
    let builder = deepspeed::builder(args.config()).accelerator(accelerator()).given(args.given());
    let (mut engine, loader) = builder.initialize_with(model, &store, points(args)?)?;
    show(&engine);
    for epoch in 0..args.num_train_epochs {
        let mut sum = 0.0;
        for batch in loader.epoch(epoch) {
            let (x, y) = batch?;
            let loss = engine.forward(&x)?.cross_entropy_for_logits(&y);
            engine.backward(&loss)?;
            engine.step()?;
            sum += loss.double_value(&[]);
        }
        let (loss, lr) = (sum / loader.num_batches() as f64, engine.get_lr()[0]);
        let steps = engine.global_steps();
        engine.accelerator().print(format!("epoch {epoch}: loss {loss:.4}, lr {lr:.5}, {steps} steps"));
    }
    let Some(folder) = &args.output_dir else { return Ok(()) };
    let path = engine.save_checkpoint(folder, None, &json!({ "note": "the last one" }))?;
    engine.accelerator().print(format!("saved {}", path.strip_prefix(folder)?.display()));
    let (again, model) = network();
    let builder = deepspeed::builder(args.config()).accelerator(accelerator()).given(args.given());
    let (mut resumed, _loader) = builder.initialize_with(model, &again, points(args)?)?;
    let loaded = resumed.load_checkpoint(folder, None)?;
    ensure!(loaded.is_some_and(|loaded| loaded.client_state["note"] == "the last one"), "nothing was loaded");
    ensure!(resumed.global_steps() == engine.global_steps(), "it does not resume at the same step");
    resumed.accelerator().print(format!("resumes at step {}", resumed.global_steps()));
    Ok(())
}

fn network() -> (VarStore, nn::Sequential) {
    let store = VarStore::new(Device::Cpu);
    let root = store.root();
    let model = nn::seq()
        .add(nn::linear(&root / "hidden", 2, 32, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(&root / "head", 32, 4, Default::default()));
    (store, model)
}

/// Points in the plane, and the quarter in which each lies.
fn points(
    args: &Args,
) -> anyhow::Result<Loader<impl drumline::data::Dataset<Batch = (Tensor, Tensor)> + 'static + use<>>> {
    let load = |sample: Sample| {
        let angle = sample.index as f64 * 2.399_963;
        Ok((angle.cos() as f32, angle.sin() as f32))
    };
    let batch = |points: Vec<(f32, f32)>| {
        let flat: Vec<f32> = points.iter().flat_map(|(x, y)| [*x, *y]).collect();
        let quarter = |(x, y): &(f32, f32)| i64::from(*x > 0.0) + 2 * i64::from(*y > 0.0);
        let quarters: Vec<i64> = points.iter().map(quarter).collect();
        Ok::<_, Cause>((Tensor::from_slice(&flat).view([-1, 2]), Tensor::from_slice(&quarters)))
    };
    let sampler = DistributedSampler::new(SamplerOptions { num_samples: POINTS, ..Default::default() })?;
    let options = LoaderOptions { batch_size: args.per_device_train_batch_size, ..Default::default() };
    Ok(Loader::new(MapDataset::new(POINTS, load, batch), sampler, options)?)
}

/// Prints what each `"auto"` became.
fn show(engine: &DeepSpeedEngine<impl Module + 'static>) {
    for became in engine.autos() {
        engine.accelerator().print(format!("{} = {}, from {}", became.key, became.value, became.from));
    }
    engine.accelerator().print(format!(
        "ZeRO-{}: {} samples a step = {} x {} x {} ranks",
        engine.zero_optimization_stage(),
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.accelerator().num_processes()
    ));
}
