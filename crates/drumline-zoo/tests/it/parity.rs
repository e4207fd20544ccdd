//! Results equal PyTorch's, and do not depend on the number of ranks.

use std::sync::Arc;
use std::time::Duration;

use drumline::engine::{SyncBatchNorm, SyncGroup};
use drumline::{Ddp, DdpOptions, ProcessGroup, ReduceOp};
use drumline_torch::{Named, Optimizer, Sgd, SgdOptions, parameters};
use drumline_zoo::models::{Model, ModelOptions, Norm, build};
use rank_test::anyhow::{self, Result};
use rank_test::ranks_test;
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use super::failing_runs::shared;
use super::golden;
use super::running::Place;
use drumline_text::synth_story::SynthStoryOptions;
use drumline_text::synth_text::SynthTextOptions;
use drumline_zoo::formula::{Samples, fill, samples};

const STEPS: i64 = 8;
const BATCH: i64 = 64;

/// A model of the zoo for ten classes, with the formula's weights.
fn model(arch: &str, store: &VarStore, norm: Norm) -> Result<Model> {
    tch::set_num_threads(1);
    let net = build(arch, &store.root(), &ModelOptions { num_classes: 10, norm, ..Default::default() })?;
    fill(store);
    Ok(net)
}

/// The mean over all ranks.
fn mean(group: &ProcessGroup, loss: &Tensor) -> Result<f64> {
    let mut mean = [loss.double_value(&[])];
    group.all_reduce(&mut mean, ReduceOp::Avg)?;
    Ok(mean[0])
}

ranks_test!(twenty_losses_of_resnet18_are_pytorchs, 2, timeout = Duration::from_secs(300), {
    let group = ProcessGroup::from_env()?;
    let golden = golden::json("ddp_resnet18.json");
    // In float32, rounding dominates the losses after a few steps, and CPUs differ in their kernels.
    let mut store = VarStore::new(Device::Cpu);
    let net = model("resnet18", &store, Norm::Batch)?;
    store.double();
    fill(&store);
    let ddp = Ddp::new(net, &store, &group, DdpOptions::default())?;
    let number = |key: &str| golden["sgd"][key].as_f64().unwrap();
    let options = SgdOptions {
        lr: number("lr"),
        momentum: number("momentum"),
        weight_decay: number("weight_decay"),
        nesterov: golden["sgd"]["nesterov"].as_bool().unwrap(),
        ..SgdOptions::default()
    };
    let mut optimizer = Sgd::new(parameters(&store), options)?;
    let count = golden["batch"].as_i64().unwrap();
    let (rank, world) = (group.rank() as i64, group.size() as i64);
    for (step, theirs) in (0..).zip(golden::floats(&golden["losses"])) {
        let (images, labels) = samples(Samples { first: (step * world + rank) * count, count, edge: 32 });
        // tch's cross_entropy_for_logits computes in float32.
        let loss =
            ddp.forward(&images.to_kind(Kind::Double))?.log_softmax(-1, Kind::Double).nll_loss(&labels);
        optimizer.zero_grad()?;
        ddp.backward(&loss)?;
        optimizer.step()?;
        let ours = mean(&group, &loss)?;
        println!(
            "step {step}: {ours}, in PyTorch {theirs}, difference {:.1e}",
            (ours - theirs).abs() / theirs
        );
        assert!((ours - theirs).abs() <= 1e-7 * theirs, "step {step}: {ours}, in PyTorch {theirs}");
    }
    let weights: Vec<Named> = parameters(&store).into_iter().filter(|named| named.tensor.dim() > 1).collect();
    assert_eq!(golden["sums"].as_object().unwrap().len(), weights.len());
    for Named { name, tensor } in weights {
        let [sum, of_sizes] = [&tensor, &tensor.abs()].map(|t| t.sum(Kind::Double).double_value(&[]));
        // The error of a sum of thousands of numbers of both signs is relative to the sum of their absolute values.
        let theirs = golden::floats(&golden["sums"][&name]);
        for (ours, theirs_one) in [(sum, theirs[0]), (of_sizes, theirs[1])] {
            assert!((ours - theirs_one).abs() <= 1e-9 * theirs[1], "{name}: {ours}, in PyTorch {theirs_one}");
        }
    }
});

/// The norm of the small network.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Normed {
    Not,
    /// Batch norm, synchronised if there are several ranks.
    Batch,
}

impl Normed {
    fn norm(self, group: &ProcessGroup) -> Result<Norm> {
        let sync = SyncGroup::new(group)?;
        Ok(match self {
            Self::Not => Norm::With(Arc::new(|_, _| Box::new(nn::func_t(|x, _| x.shallow_clone())))),
            Self::Batch if group.size() == 1 => Norm::Batch,
            Self::Batch => Norm::With(Arc::new(move |path, channels| {
                Box::new(SyncBatchNorm::new(path, channels, Default::default(), &sync))
            })),
        })
    }
}

/// The outcome of a few steps on batches of [`BATCH`] over all ranks: the losses, then parameters and buffers.
fn train(group: &ProcessGroup, normed: Normed, micro_batches: i64) -> Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = model("convnet", &store, normed.norm(group)?)?;
    let ddp = Ddp::new(net, &store, group, DdpOptions::default())?;
    // Without norms, gradients are small.
    let lr = if normed == Normed::Not { 0.5 } else { 0.05 };
    let options = SgdOptions { lr, momentum: 0.9, ..SgdOptions::default() };
    let mut optimizer = Sgd::new(parameters(&store), options)?;
    let count = BATCH / group.size() as i64 / micro_batches;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut sum = 0.0;
        let mut backward = |micro: i64| -> Result<()> {
            let first = step * BATCH + (group.rank() as i64 * micro_batches + micro) * count;
            let (images, labels) = samples(Samples { first, count, edge: 16 });
            let loss = ddp.forward(&images)?.cross_entropy_for_logits(&labels) / micro_batches;
            sum += loss.double_value(&[]);
            Ok(ddp.backward(&loss)?)
        };
        ddp.no_sync(|| (0..micro_batches - 1).try_for_each(&mut backward))?;
        backward(micro_batches - 1)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(mean(group, &Tensor::from(sum))? as f32);
    }
    println!("{normed:?}: losses {losses:?}");
    assert!(losses[STEPS as usize - 1] < losses[0] - 0.05, "control: something is learnt: {losses:?}");
    let mut all: Vec<(String, Tensor)> = store.variables().into_iter().collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    let floats = all.iter().filter(|(_, tensor)| tensor.kind() == Kind::Float);
    let values = floats.map(|(_, tensor)| tensor.detach().copy());
    Ok(std::iter::once(Tensor::from_slice(&losses)).chain(values).collect())
}

/// The largest difference, relative to the largest value of its tensor.
fn difference(ours: &[Tensor], theirs: &[Tensor]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let most = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let pairs = ours.iter().zip(theirs);
    pairs.map(|(ours, theirs)| most(&(ours - theirs)) / most(theirs).max(1e-2)).fold(0.0, f64::max)
}

/// 1 rank × 64 = 2 × 32 = 4 × 16.
fn equals_one_rank() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let alone = lone_group(&group)?;
    for normed in [Normed::Not, Normed::Batch] {
        let (ours, reference) = (train(&group, normed, 1)?, train(&alone, normed, 1)?);
        let difference = difference(&ours, &reference);
        println!("{normed:?}: {difference:.1e}");
        assert!(difference <= 1e-5, "{normed:?}: {difference:e}");
    }
    Ok(())
}

/// A group of this rank only.
fn lone_group(group: &ProcessGroup) -> Result<ProcessGroup> {
    let groups = (0..group.size()).map(|rank| Ok(group.new_group(&[rank])?));
    let groups: Vec<Option<ProcessGroup>> = groups.collect::<Result<_>>()?;
    groups.into_iter().flatten().next().ok_or_else(|| anyhow::anyhow!("each rank has a group of its own"))
}

ranks_test!(two_ranks_of_32_are_one_of_64, 2, timeout = Duration::from_secs(120), { equals_one_rank()? });
ranks_test!(four_ranks_of_16_are_one_of_64, 4, timeout = Duration::from_secs(120), { equals_one_rank()? });

ranks_test!(ranks_that_do_not_share_their_norms_differ, 2, timeout = Duration::from_secs(120), {
    // The control of the two tests above: with unsynchronised norms, the results differ.
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(Device::Cpu);
    let ddp = Ddp::new(model("convnet", &store, Norm::Batch)?, &store, &group, DdpOptions::default())?;
    let first = group.rank() as i64 * 32;
    let (images, labels) = samples(Samples { first, count: 32, edge: 16 });
    let own = mean(&group, &ddp.forward(&images)?.cross_entropy_for_logits(&labels))?;
    let shared = train(&group, Normed::Batch, 1)?[0].double_value(&[0]);
    assert!((own - shared).abs() > 1e-5 * shared, "{own} {shared}");
});

ranks_test!(micro_batches_without_sync_are_one_big_batch, 2, timeout = Duration::from_secs(120), {
    let group = ProcessGroup::from_env()?;
    let whole = train(&lone_group(&group)?, Normed::Not, 1)?;
    for micro_batches in [1, 2, 4] {
        let difference = difference(&train(&group, Normed::Not, micro_batches)?, &whole);
        println!("{micro_batches} micro-batches: {difference:.1e}");
        assert!(difference <= 1e-5, "{micro_batches} micro-batches: {difference:e}");
    }
});

/// Whether the table has this many steps, and the runs are equal.
#[track_caller]
fn assert_same(said: &str, steps: usize) {
    let rows = said.lines().filter(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
    let last_word = |line: &str| line.split_whitespace().last()?.parse::<f64>().ok();
    assert_eq!(rows.filter_map(last_word).count(), steps, "{said}");
    assert!(said.contains("gradient of step 1: largest difference "), "{said}");
    assert!(said.contains(&format!("parameters after {steps} steps: largest difference ")), "{said}");
    assert!(said.contains("the same, but for rounding: at most "), "{said}");
}

#[test]
fn the_program_verifies_its_parity() {
    let place = Place::new();
    for ranks in [1, 2, 4] {
        for more in ["", "MODEL.ARCH convnet MODEL.SYNCBN True", "TRAIN.ACCUMULATE 2 PRECISION bf16"] {
            let words = format!("train --verify-parity=3 TRAIN.BATCH_SIZE {} {more}", 8 / ranks);
            let said = place.passes(ranks, &words);
            assert!(said.contains("1 rank x 8") && said.contains(&format!("{ranks} ranks x {}", 8 / ranks)));
            assert_same(&said, 3);
        }
    }
    for precision in ["fp16", "bf16-master"] {
        assert_same(&place.passes(2, &format!("train --verify-parity PRECISION {precision}")), 5);
    }
    assert!(!place.path("exp").exists(), "nothing is written");
}

#[test]
fn ranks_with_unsynchronised_norms_fail_the_parity_check() {
    // The control of the test above: without SYNCBN, two ranks do not compute the same as one, and the program fails.
    let place = Place::new();
    let ranks = place.run(2, "train --verify-parity=3 MODEL.ARCH convnet");
    let said = shared(&ranks);
    assert!(said.contains("one rank and all of them differ: the loss of step 1 by "), "{said}");
    assert!(
        said.contains("batch norm sees another batch on each side; MODEL.SYNCBN True makes them the same")
    );
    assert!(ranks[0].stdout.contains("parameters after 3 steps: largest difference "), "{}", ranks[0].stdout);
}

#[test]
fn masked_language_modelling_has_parity() {
    let place = Place::of_masks(&SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 });
    for (ranks, more) in
        [(2, ""), (3, "TRAIN.ACCUMULATE 2"), (2, "PRECISION bf16"), (2, "PRECISION bf16-master")]
    {
        let said = place.passes(ranks, &format!("train --verify-parity=3 TRAIN.BATCH_SIZE 4 {more}"));
        assert!(said.contains("note: dropout is off here"), "{said}");
        assert_same(&said, 3);
    }
    assert!(!place.path("exp").exists(), "nothing is written");
}

#[test]
fn texts_and_tokens_have_parity() {
    let texts = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };
    for (task, net) in [("classify", "bilstm"), ("tag", "transformer")] {
        let place = Place::of_texts(task, &texts);
        let words = format!("train --verify-parity=3 MODEL.NET {net} TRAIN.BATCH_SIZE 4 OPTIM.GRAD_CLIP 1.0");
        let said = place.passes(2, &words);
        assert!(said.contains("note: dropout is off here"), "{said}");
        assert_same(&said, 3);
        assert_same(&place.passes(3, &format!("{words} TRAIN.ACCUMULATE 2 PRECISION bf16")), 3);
    }
    let place = Place::of_stories(&SynthStoryOptions { train: 24, valid: 6, seed: 3 });
    for more in ["", "TRAIN.ACCUMULATE 2 MODEL.LOSS_CHUNKS 3", "PRECISION bf16-master", "PRECISION fp16"] {
        let said = place.passes(2, &format!("train --verify-parity=2 TRAIN.BATCH_SIZE 4 {more}"));
        assert!(!said.contains("note: dropout"), "there is none: {said}");
        assert_same(&said, 2);
    }
    assert!(!place.path("exp").exists(), "nothing is written");
}

#[test]
fn divided_trainings_have_parity() {
    let place = Place::new();
    for stage in 1..=3 {
        let words = format!("train --verify-parity=3 TRAIN.BATCH_SIZE 4 PARALLEL.ZERO {stage}");
        assert_same(&place.passes(2, &words), 3);
    }
    for more in [
        "MODEL.ARCH convnet MODEL.SYNCBN True PARALLEL.ZERO 3",
        "TRAIN.ACCUMULATE 2 PRECISION bf16 PARALLEL.ZERO 2",
        "PRECISION bf16-master PARALLEL.ZERO 3",
        "PRECISION fp16 PARALLEL.ZERO 1",
    ] {
        let words = format!("train --verify-parity=3 TRAIN.BATCH_SIZE 2 {more}");
        assert_same(&place.passes(2, &words), 3);
    }
    let place = Place::of_stories(&SynthStoryOptions { train: 24, valid: 6, seed: 3 });
    let hybrid = "train --verify-parity=2 TRAIN.BATCH_SIZE 2 PARALLEL.ZERO 3 PARALLEL.DP 2";
    assert_same(&place.passes(4, hybrid), 2);
    assert!(!place.path("exp").exists(), "nothing is written");
}

#[test]
fn divided_trainings_with_unsynchronised_norms_fail_the_parity_check() {
    // The control of the test above.
    let place = Place::new();
    let ranks = place.run(2, "train --verify-parity=3 MODEL.ARCH convnet PARALLEL.ZERO 3");
    let said = shared(&ranks);
    assert!(said.contains("one rank and all of them differ: the loss of step 1 by "), "{said}");
}
