//! `--verify-parity`: the first steps as one rank with the whole batch, and as all ranks with a part each; how far they differ.
//!
//! ```text
//!   every rank:   [batch of rank 0 | batch of rank 1 | …] ─▶ one network alone          ─▶ losses, parameters ─┐ compared
//!   together:      own batch ─▶ network of this rank, gradients averaged over all ranks ─▶ losses, parameters ─┘ on rank 0
//! ```
//!
//! Both begin with the same weights. Nothing is written to `OUT_DIR`.

use std::sync::Arc;

use anyhow::{Context, ensure};
use drumline::{At, Ddp, ImageBatch, LoaderError, ProcessGroup, Schedule};
use drumline_torch::{Optimizer, parameters};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::checked::CheckedTraining;
use super::job::Job;
use super::pieces;
use super::step::Sums;
use crate::config::PrecisionKind;

/// What a run of a few steps has come to.
struct Ran {
    losses: Vec<f64>,
    store: VarStore,
}

/// Makes both runs, and prints on rank 0 how they differ.
pub(super) fn verify(job: &Job, checked: &CheckedTraining, seed: u64, steps: u64) -> anyhow::Result<()> {
    job.agree(check_precision(checked.run.config.run.precision))?;
    let device = job.device(checked.run.config.run.device)?;
    let (config, world_size) = (&checked.run.config, job.group.size());
    let images = Arc::new(job.agree(pieces::train_images(checked))?);
    let loader = |rank| pieces::train_loader(&images, config, (rank, world_size), seed);
    let loaders = job.agree((0..world_size).map(loader).collect::<anyhow::Result<Vec<_>>>())?;
    let steps = (steps as usize).min(loaders[0].num_batches());

    let alone = alone(&job.group)?;
    let mut shares: Vec<_> = loaders.iter().map(|loader| loader.epoch(0)).collect();
    let whole = (0..steps).map(|_| whole_batch(shares.iter_mut().filter_map(Iterator::next)));
    let one = job.agree(train(checked, seed, &alone, (device, whole)))?;
    let own = loaders[job.group.rank()].epoch(0).take(steps).map(|batch| Ok(batch?));
    let all = train(checked, seed, &job.group, (device, own))?;
    if job.is_first() {
        println!("{}", compared(&one, &all, world_size, checked.run.config.train.batch_size));
        if has_own_statistics(&all.store) && world_size > 1 && !checked.run.config.model.syncbn {
            println!(
                "note: batch norm sees another batch on each side; MODEL.SYNCBN True makes them the same"
            );
        }
    }
    Ok(())
}

/// With fewer bits the two runs differ by rounding, and the comparison would say nothing.
fn check_precision(precision: PrecisionKind) -> anyhow::Result<()> {
    ensure!(
        precision == PrecisionKind::Fp32,
        "--verify-parity compares steps in fp32, and PRECISION is {}: rounding to 16 bits would hide what it looks for; try PRECISION fp32",
        precision.name()
    );
    Ok(())
}

/// A group of this rank only; all ranks call it.
fn alone(group: &ProcessGroup) -> anyhow::Result<ProcessGroup> {
    let colour = group.rank() as u32;
    group.split(Some(colour), 0)?.context("a rank is in the group of its colour")
}

fn whole_batch(parts: impl Iterator<Item = Result<ImageBatch, LoaderError>>) -> anyhow::Result<ImageBatch> {
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let images: Vec<_> = parts.iter().map(|part| &part.images).collect();
    let labels: Vec<_> = parts.iter().map(|part| &part.labels).collect();
    let indices = parts.iter().flat_map(|part| part.indices.clone()).collect();
    Ok(ImageBatch { images: Tensor::cat(&images, 0), labels: Tensor::cat(&labels, 0), indices })
}

/// The steps on `group`, from the seed's weights.
fn train(
    checked: &CheckedTraining,
    seed: u64,
    group: &ProcessGroup,
    (device, batches): (Device, impl Iterator<Item = anyhow::Result<ImageBatch>>),
) -> anyhow::Result<Ran> {
    let config = &checked.run.config;
    tch::manual_seed(seed as i64);
    let store = VarStore::new(device);
    let (net, options) = pieces::model(config, &store, group)?;
    let replica = Ddp::new(net, &store, group, options)?;
    let mut optimizer = pieces::sgd(&store, &config.optim)?;
    optimizer.set_lr(pieces::schedule(&config.optim)?.lr(At { epoch: 0.0, step: 0 }));
    let mut losses = Vec::new();
    for batch in batches {
        let batch = batch?.to_device(device)?;
        let output = replica.forward(&batch.images)?;
        let loss = output.cross_entropy_for_logits(&batch.labels);
        optimizer.zero_grad()?;
        replica.backward(&loss)?;
        optimizer.step()?;
        losses.push(Sums::of(&output, &batch.labels, &loss, 1).reduced(group)?.loss());
    }
    Ok(Ran { losses, store })
}

fn compared(one: &Ran, all: &Ran, world_size: usize, batch_size: usize) -> String {
    let (left, right) =
        (format!("1 rank x {}", world_size * batch_size), format!("{world_size} ranks x {batch_size}"));
    let mut text = format!("step  loss, {left:<14}  loss, {right:<14}  relative difference\n");
    for (step, (one, all)) in one.losses.iter().zip(&all.losses).enumerate() {
        let difference = (one - all).abs() / one.abs().max(f64::MIN_POSITIVE);
        text.push_str(&format!("{:4}  {one:<20.9}  {all:<20.9}  {difference:.2e}\n", step + 1));
    }
    let (name, difference) = furthest(&one.store, &all.store);
    text.push_str(&format!(
        "parameters after {} steps: largest difference {difference:.2e} ({name})",
        one.losses.len()
    ));
    text
}

/// The parameter that differs most, relative to its largest value.
fn furthest(one: &VarStore, all: &VarStore) -> (String, f64) {
    let pairs = parameters(one).into_iter().zip(parameters(all));
    let differences = pairs.map(|(one, all)| {
        let most = |tensor: &Tensor| tensor.abs().max().to_kind(Kind::Double).double_value(&[]);
        let difference = most(&(&one.tensor - &all.tensor).detach());
        (one.name, difference / most(&one.tensor.detach()).max(f64::MIN_POSITIVE))
    });
    differences.max_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap_or_default()
}

fn has_own_statistics(store: &VarStore) -> bool {
    drumline_torch::buffers(store).iter().any(|buffer| buffer.name.ends_with("running_mean"))
}
