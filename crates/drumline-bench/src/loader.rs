//! `drumline-bench loader`: how many samples a second the loader gives; timed by `cargo xtask bench loader`.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::data::{DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use tch::Kind;

use drumline_zoo::data::Images;
use drumline_zoo::transforms::Transform;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// CIFAR-10's binary files, random crop and flip.
    Cifar,
    /// A folder of JPEG files, random resized crop and flip.
    Jpeg,
}

/// Time the loader
#[derive(Debug, Args)]
pub(super) struct LoaderArgs {
    what: What,
    /// The folder with the data sets `cifar` and `jpeg`
    #[arg(long)]
    data: PathBuf,
    #[arg(long)]
    workers: usize,
    #[arg(long)]
    batch_size: usize,
    #[arg(long)]
    seconds: f64,
}

/// Loads for the given time, and prints one JSON line.
pub(super) fn run(args: &LoaderArgs) -> anyhow::Result<()> {
    drumline::torch::keep_freed_memory();
    tch::set_num_threads(1);
    let images = match args.what {
        What::Cifar => Images::open(&args.data.join("cifar"), "train", Transform::cifar_train())?,
        What::Jpeg => Images::open(&args.data, "jpeg", Transform::imagenet_train(224))?,
    };
    let num_samples = drumline::data::Dataset::len(&images);
    let sampler = DistributedSampler::new(SamplerOptions { num_samples, ..SamplerOptions::default() })?;
    let (workers, batch_size) = (args.workers, args.batch_size);
    let loader = Loader::new(
        images,
        sampler,
        LoaderOptions { workers, batch_size, drop_last: true, ..LoaderOptions::default() },
    )?;
    // The first epoch brings files into memory; it does not count.
    let (mut shape, mut mean) = (Vec::new(), 0.0);
    for batch in loader.epoch(0) {
        let images = batch?.images;
        (shape, mean) = (images.size(), images.mean(Kind::Double).double_value(&[]));
    }
    let (began, mut samples) = (Instant::now(), 0);
    for epoch in 1.. {
        for batch in loader.epoch(epoch) {
            samples += batch?.len();
            let took = began.elapsed().as_secs_f64();
            if took >= args.seconds {
                let samples_per_s = samples as f64 / took;
                println!(
                    "{}",
                    serde_json::json!({"samples_per_s": samples_per_s, "shape": shape, "mean": mean})
                );
                return Ok(());
            }
        }
    }
    Ok(())
}
